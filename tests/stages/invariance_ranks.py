"""One rank of the invariance suite: every case in its layouts, in groups of more and more ranks.

Run as a child: ``main(rank, size, folder, is_thorough)``. Rank r writes
``results-<ranks>-<r>.pickle`` for each group that it is in.
"""

import pickle
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from invariance_cases import CASES, SHARED, TEMPERATURE, jobs_of, samples, shape_name, with_logprobs
from made_samples import reordered
from stages import logprobs
from stages.logprobs import LogprobModel
from stages.models import load_causal_lm
from stages.update.config import UpdateConfig
from stages.update.mesh import RankMesh
from stages.update.sharding import shard_model
from stages.update.step import accumulate_gradients, microbatches_of, plan_step


def main(rank, size, folder, is_thorough):
    """Compute all jobs of 1, 2, 4 ... ``size`` ranks; to start a process costs more than most of
    them. ``folder`` holds a folder for each shape, with its model and now.pickle."""
    torch.set_num_threads(1)
    for ranks in SHARED:
        if rank < ranks <= size:
            results = _results(rank, ranks, Path(folder), is_thorough)
            file = Path(folder) / f"results-{ranks}-{rank}.pickle"
            file.write_bytes(pickle.dumps(results))


def _results(rank, ranks, folder, is_thorough):
    meeting = f"file://{folder}/meeting-{ranks}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    meshes = {sp: RankMesh.of(torch.device("cpu"), sp) for sp in SHARED[ranks]}

    @cache
    def model(shape, activation_checkpointing):
        made = load_causal_lm(str(folder / shape_name(shape)), torch.float32)
        if activation_checkpointing:
            made.gradient_checkpointing_enable({"use_reentrant": False})
        everyone = next(iter(meshes.values())).everyone
        return shard_model(LogprobModel(made), everyone, UpdateConfig(dtype="float32")).train()

    @cache
    def data(shape):
        now = pickle.loads((folder / shape_name(shape) / "now.pickle").read_bytes())
        return with_logprobs(samples(), now)

    results = {}
    for job in jobs_of(ranks, is_thorough):
        ready = model(job.shape, job.layout.activation_checkpointing)
        results[job] = _compute(ready, *data(job.shape), job, meshes[job.layout.sp])
    dist.destroy_process_group()
    return results


def _compute(model, made, old, job, mesh):
    """(metrics, this rank's rows of each parameter's gradient) of one step."""
    config, layout = CASES[job.case], job.layout
    order = np.arange(len(made))
    if layout.shuffle:
        order = np.random.RandomState(layout.shuffle).permutation(order)
    made, old = reordered(made, order), [old[i] for i in order]
    logprobs.CHUNK = layout.chunk
    step = plan_step(made, range(len(made)), config)
    share = mesh.dp_rank, mesh.num_dp
    microbatches = microbatches_of(made, step.units, layout.max_tokens, *share)
    sums = accumulate_gradients(
        model, made, step, microbatches, old, config, TEMPERATURE, mesh.sequence
    )
    metrics = sums.reduce(mesh.dp_group)
    gradients = [p.grad.to_local().numpy() for p in model.parameters()]
    model.zero_grad()
    return metrics, gradients
