"""The estimate of a rank's memory, against what autograd keeps; and what it decides."""

import logging
from types import SimpleNamespace

import pytest
import torch
import transformers

import handmade
import tiny
from artifacts.store import Store
from stages import logprobs
from stages.logprobs import LogprobModel
from stages.packed import ATTENTION, pack, segments_of
from stages.update import memory, trainers
from stages.update import run as update_stage
from stages.update.config import UpdateConfig
from stages.update.memory import MemoryEstimate, estimate_memory, model_shape, room_of_rank
from stages.update.trainer_spec import OutOfMemoryError, TrainerSpec
from stages.update.trainers import Trainers
from stages.workers import LocalCluster, Placement

TOKENS = 512
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
}


@pytest.fixture(params=["Llama", "Qwen2", "Qwen3"])
def family(request):
    return getattr(transformers, f"{request.param}Config")


def made(family, dtype=torch.float32, **changes):
    config = family(**{**SIZES, **changes})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).to(
        dtype
    )


def kept_bytes(model):
    """What autograd keeps of a forward over TOKENS tokens, each storage once."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held: no address comes twice
        return tensor

    batch = pack([([1] * 8, [2] * (TOKENS - 7))], torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        found = LogprobModel(model)(batch, 1.0)
    with segments_of(batch):
        found[0].sum().backward()  # nothing was kept for a backward that can't be
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [2, 6])
def test_activations_are_what_autograd_keeps(family, dtype, layers, tmp_path):
    model = made(family, dtype, num_hidden_layers=layers)
    model.save_pretrained(tmp_path)
    config = UpdateConfig(dtype=str(dtype).partition(".")[2], max_tokens_per_rank=TOKENS)
    found = estimate_memory(model_shape(str(tmp_path)), config, 1, 0, checkpoints=False)
    # The last norm and the hidden states, without their gradient.
    last = TOKENS * (4 + 3 * dtype.itemsize) * SIZES["hidden_size"]
    assert found.activations + last == pytest.approx(kept_bytes(model), rel=0.06)


@pytest.mark.parametrize("tied", [True, False])
def test_state_is_four_numbers_a_parameter_shared_out(family, tied, tmp_path):
    model = made(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    shape = model_shape(str(tmp_path))
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    outside = SIZES["hidden_size"] * (SIZES["vocab_size"] * (1 if tied else 2) + 1)
    assert shape.root_parameters == outside
    found = estimate_memory(shape, UpdateConfig(), 4, 0, checkpoints=False)
    assert found.state == 16 * shape.num_parameters // 4


def test_longest_sample_counts_where_it_is_over_the_budget_and_is_shared_by_its_ranks(tmp_path):
    made(transformers.LlamaConfig).save_pretrained(tmp_path)
    shape = model_shape(str(tmp_path))

    def activations(longest, sp=1):
        config = UpdateConfig(max_tokens_per_rank=100, sp=sp)
        return estimate_memory(shape, config, 4, longest, checkpoints=False).activations

    assert activations(50) == activations(100) == activations(400, sp=4)
    assert activations(400) == 4 * activations(100)


def test_chunk_of_the_estimate_is_that_of_the_log_probs():
    assert memory.CHUNK == logprobs.CHUNK


def test_room_is_a_share_of_a_gpu_or_of_the_machine():
    assert room_of_rank(100, 4, 0.0) == 22
    assert room_of_rank(100, 4, 0.5) == 45
    assert room_of_rank(100, 4, 2.0) == 90


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.save_model(tmp_path_factory.mktemp("model")))


def updated(folder, store, **fields):
    """An update on handmade samples, and the pool that made it."""
    config = UpdateConfig(**{"dtype": "float32", "max_tokens_per_rank": 40, **fields})
    spec = TrainerSpec(folder, config, "drop_sample", 0.8, 3, "float32")
    pool = Trainers(LocalCluster(), spec, 1, Placement())
    rollout, scores = handmade.commit_iteration(store, 1)
    work = update_stage.update_work(
        1,
        config,
        "drop_sample",
        0.8,
        3,
        [(rollout.ref, scores.ref)],
        rollout.manifest.inputs["policy"],
        functions=update_stage.function_digests(config),
    )
    made = update_stage.run(store, work, [], 1, lambda: pool, lambda **_: None)
    return made.manifest, pool


def test_auto_checkpoints_where_the_estimate_does_not_fit(folder, tmp_path, monkeypatch, caplog):
    plain, pool = updated(folder, Store(str(tmp_path / "plain")))
    assert pool.layout["activation_checkpointing"] is False
    need = MemoryEstimate(1 << 50, 0, 0, 0)
    monkeypatch.setattr(trainers, "estimate_of", lambda spec, ranks, checkpoints: need)
    with caplog.at_level(logging.WARNING, "ratchet.update"):
        saving, pool = updated(folder, Store(str(tmp_path / "saving")))
    assert saving.provenance["layout"]["activation_checkpointing"] is True
    assert "activation_checkpointing=on reason=a rank would need 1048576.0 of" in caplog.text
    assert saving.outcome == plain.outcome


LOSS = """
from pathlib import Path

import torch

from stages.update.losses import clip as plain

TRIES = Path(__file__).with_name("tries")


def scarce(inputs, config):
    if len(TRIES.read_text()) < {failures}:
        TRIES.write_text(TRIES.read_text() + "x")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return plain(inputs, config)
"""


def scarce(tmp_path, failures):
    """A loss that finds no memory so many times."""
    (tmp_path / "scarce.py").write_text(LOSS.format(failures=failures))
    (tmp_path / "tries").write_text("")
    return f"{tmp_path}/scarce.py:scarce"


def test_rank_that_runs_out_of_memory_goes_on_with_checkpointing(folder, tmp_path, caplog):
    loss = scarce(tmp_path, 1)
    with caplog.at_level(logging.WARNING, "ratchet.update"):
        made, _ = updated(folder, Store(str(tmp_path / "run")), loss=loss)
    assert made.provenance["layout"]["activation_checkpointing"] is True
    assert "reason=a rank ran out of memory without it" in caplog.text
    # The same loss, now that there is enough.
    options = {"loss": loss, "activation_checkpointing": False}
    plain, _ = updated(folder, Store(str(tmp_path / "plain")), **options)
    assert made.outcome["weights_digest"] == plain.outcome["weights_digest"]


@pytest.mark.parametrize("wanted", [True, False, "auto"])
def test_lack_of_memory_that_checkpointing_does_not_mend_is_said(folder, tmp_path, wanted):
    loss = scarce(tmp_path, 9)
    with pytest.raises(OutOfMemoryError, match=r"out of memory in phase steps: set .*2\.00 GiB"):
        updated(folder, Store(str(tmp_path / "run")), loss=loss, activation_checkpointing=wanted)
    assert len((tmp_path / "tries").read_text()) == (2 if wanted == "auto" else 1)


def test_update_notes_what_each_phase_held_and_needed(folder, tmp_path):
    made, _ = updated(folder, Store(str(tmp_path / "run")))
    (rank,) = made.provenance["memory"]
    assert set(rank) == {"start", "read", "old_logprobs", "steps", "digest"}
    for found in rank.values():
        assert found["peak_bytes"] >= found["held_bytes"] > 50 << 20


def test_room_of_a_rank_in_a_plan_names_the_mildest_remedy(folder, monkeypatch):
    from flows import memory_rows
    from flows.config import make_config

    config = make_config(
        {
            "model": folder,
            "iterations": 1,
            "data": {"path": "x.jsonl"},
            "score": {"rewards": [{"fn": "length"}]},
            "update": {"max_tokens_per_rank": 65536, "activation_checkpointing": False},
        },
        [],
        "test",
    )

    def said(total):
        monkeypatch.setattr(
            memory_rows.psutil, "virtual_memory", lambda: SimpleNamespace(total=int(total))
        )
        (needs, has) = memory_rows.memory_rows(config, 64)
        return f"{needs[2]} {has[2]}"

    spec = TrainerSpec(folder, config.update, "", 1.0, 0, "", 64)
    whole = memory.estimate_of(spec, 1, checkpoints=False).total / 0.9
    thrifty = memory.estimate_of(spec, 1, checkpoints=True).total / 0.9
    assert "too little" not in said(1.01 * whole)
    assert "set update.activation_checkpointing=true" in said(0.99 * whole)
    assert "set update.max_tokens_per_rank=32768" in said(0.99 * thrifty)
    assert "take a larger update.sp, shorter samples, or a smaller model" in said(1000)
