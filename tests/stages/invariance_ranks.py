"""One rank of the invariance suite: every case in its layouts, in one process group.

Run as a child: ``main(rank, world, folder)``. Each rank writes ``results-<world>-<rank>.pickle``.
"""

import pickle
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from invariance_cases import CASES, LAYOUTS, TEMPERATURE, layouts_of, samples, with_logprobs
from made_samples import reordered
from stages import logprobs
from stages.logprobs import LogprobModel
from stages.models import load_causal_lm
from stages.update.config import UpdateConfig
from stages.update.sharding import shard_model
from stages.update.step import accumulate_gradients, microbatches_of, plan_step


def main(rank, world, folder):
    """Compute all cases; ``folder`` holds the model and now.pickle."""
    torch.set_num_threads(1)
    folder = Path(folder)
    meeting = f"file://{folder}/meeting-{world}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    models = {wanted: _model(folder, mesh, wanted) for wanted in (False, True)}
    made, old = with_logprobs(samples(), pickle.loads((folder / "now.pickle").read_bytes()))
    results = {}
    for number, (name, config) in enumerate(CASES.items()):
        for layout in layouts_of(number, world):
            model = models[LAYOUTS[layout].activation_checkpointing]
            results[name, layout] = _compute(model, made, old, config, LAYOUTS[layout], rank, world)
    (folder / f"results-{world}-{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()


def _model(folder, mesh, activation_checkpointing):
    model = load_causal_lm(str(folder), torch.float32)
    if activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return shard_model(LogprobModel(model), mesh, UpdateConfig(dtype="float32")).train()


def _compute(model, made, old, config, layout, rank, world):
    """(metrics, this rank's rows of each parameter's gradient) of one step."""
    order = np.arange(len(made))
    if layout.shuffle:
        order = np.random.RandomState(layout.shuffle).permutation(order)
    made, old = reordered(made, order), [old[i] for i in order]
    logprobs.CHUNK = layout.chunk
    step = plan_step(made, range(len(made)), config)
    microbatches = microbatches_of(made, step.units, layout.max_tokens, rank, world)
    metrics = accumulate_gradients(
        model, made, step, microbatches, old, config, TEMPERATURE
    ).reduce()
    gradients = [p.grad.to_local().numpy() for p in model.parameters()]
    model.zero_grad()
    return metrics, gradients
