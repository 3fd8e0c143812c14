"""Bytes of activations that one rank keeps for backward, with 1 and with 4 ranks a sequence.

    python benchmarks/activation_bytes.py --tokens 32768

Counts what autograd saves in the forward and the loss of a micro-batch of one sample, each storage
once and weights not; the chunked log-probs, the gathered ones and the loss are in it. Ranks are
gloo processes on this machine, so it takes no GPU. Models are random, of one layer at half of its
real width: neither weights nor the number of layers have a part in the ratio.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.multiprocessing.spawn import spawn

from stages.logprobs import LogprobModel
from stages.packed import ATTENTION
from stages.update.config import UpdateConfig
from stages.update.losses import find_loss
from stages.update.mesh import RankMesh
from stages.update.microbatch import MicroBatch, microbatch_loss
from stages.update.samples import Samples
from stages.update.step_sums import StepSums

SP = 4
VOCABULARY, PROMPT = 32_000, 1024
# Family, width, width of the MLP, heads, key/value heads.
MODELS = {
    "llama 16/16": ("llama", 1024, 2752, 16, 16),
    "qwen3 16/8": ("qwen3", 512, 1536, 16, 8),
    "qwen2 14/2": ("qwen2", 448, 2432, 14, 2),
}


def main() -> None:
    """Print a row for each model and number of ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.json:
        print(f"{'model':12} {'sp':>3} {'MB a rank':>10} {'of sp=1':>8}")
    rows = []
    for name in MODELS:
        alone, shared = (measure(name, options.tokens, sp) for sp in (1, SP))
        for sp, count in ((1, alone), (SP, shared)):
            rows.append({"model": name, "sp": sp, "bytes": count, "ratio": count / alone})
            if not options.json:
                print(f"{name:12} {sp:3} {count / 1e6:10.1f} {count / alone:8.3f}", flush=True)
    if options.json:
        print(json.dumps(rows))


def measure(name: str, tokens: int, sp: int) -> int:
    """Bytes that the fullest of ``sp`` ranks keeps."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (name, tokens, sp, folder), nprocs=sp)
        return int(Path(folder, "bytes").read_text())


def _rank(rank: int, name: str, tokens: int, sp: int, folder: str) -> None:
    torch.set_num_threads(1 if sp > 1 else 2)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=sp)
    mesh = RankMesh.of(torch.device("cpu"), sp)
    model = LogprobModel(_model(name, tokens))
    batch = MicroBatch.of(
        _sample(tokens), [0], None, mesh.device, {0: 1 / tokens}, ranks=mesh.sequence
    )
    config = UpdateConfig(kl_coef=0.1, dtype="float32")
    saved = Saved(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor):
        inputs = batch.inputs(*model(batch.packed, 1.0))
        loss = microbatch_loss(find_loss("clip"), batch, inputs, config, StepSums(mesh.device))
    assert loss.requires_grad
    most = torch.tensor(sum(saved.storages.values()))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if rank == 0:
        Path(folder, "bytes").write_text(str(int(most)))
    dist.destroy_process_group()


class Saved:
    """What autograd has saved: address of a storage to its bytes."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages: dict[int, int] = {}

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that is saved. All live until the loss goes, so no address comes twice."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor


def _model(name: str, tokens: int) -> Any:
    family, width, mlp, heads, kv_heads = MODELS[name]
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=width,
        head_dim=width // heads,
        intermediate_size=mlp,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=tokens,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)


def _sample(tokens: int) -> Samples:
    """One sample of a row of ``tokens``."""
    prompt = min(PROMPT, tokens // 2)
    response = tokens - prompt + 1  # whose last token is no input
    column = np.full(response, -1.0, np.float32)
    return Samples(
        ids=["0"],
        groups=["0"],
        sequences=[([1] * prompt, [2] * response)],
        loss_masks=[np.ones(response, np.int8)],
        sampler_logprobs=[column],
        reference_logprobs=[column],
        rewards_S=np.ones(1),
        max_new_tokens=response,
        weights_S=np.ones(1),
        chosen_S=np.ones(1, dtype=bool),
        advantages=[np.ones(response)],
    )


if __name__ == "__main__":
    main()
