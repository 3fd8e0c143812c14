"""What has to hold of the runs that ``gpu_flow.py`` makes, whatever their speed."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What bfloat16 leaves of a log-prob between two implementations of one model.
MISMATCH_LIMIT = 0.05


def check_attention() -> dict[str, Any]:
    """Packed attention on this device against one SDPA call a segment, in float32."""
    import torch

    from stages import packed

    lengths = [5, 1, 64, 130, 17, 300]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    batch = packed.pack([([1] * n, [1]) for n in lengths], torch.device(device))
    draw = torch.Generator(device).manual_seed(0)
    shapes = [(1, heads, sum(lengths), 64) for heads in (14, 2, 2)]
    inputs = [torch.randn(shape, generator=draw, device=device).to(dtype) for shape in shapes]
    upstream = torch.randn(1, sum(lengths), 14, 64, generator=draw, device=device).to(dtype)

    def with_gradients(attend: Callable[..., Any], dtype: Any) -> list[Any]:
        leaves = [x.to(dtype).clone().requires_grad_() for x in inputs]
        with packed.segments_of(batch):
            out = attend(*leaves)
            out.backward(upstream.to(dtype))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    ours = with_gradients(lambda *qkv: packed._attention(torch.nn.Module(), *qkv, None)[0], dtype)
    plain = with_gradients(lambda *qkv: attend_by_segment(*qkv, lengths), torch.float32)
    gaps = {
        name: float((a.float() - b).norm() / b.norm())
        for name, a, b in zip(("out", "dq", "dk", "dv"), ours, plain, strict=True)
    }
    return {"passed": max(gaps.values()) < 0.01, "relative_gaps": gaps, "dtype": str(dtype)}


def attend_by_segment(q: Any, k: Any, v: Any, lengths: list[int]) -> Any:
    """Causal attention inside each segment, the plain way: (1, H, T, D) to (1, T, H, D)."""
    import torch

    cuts = (x.split(lengths, dim=2) for x in (q, k, v))
    outs = [
        torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
        for qkv in zip(*cuts, strict=True)
    ]
    return torch.cat(outs, dim=2).transpose(1, 2)


def check_mismatch(rows: list[dict[str, Any]], config: Any) -> dict[str, Any]:
    """Engine against trainer, iteration by iteration, and against the base model as the control.

    The samples of iteration 2 are the first updated policy's, so the base model is what an engine
    that missed one update would have sampled with.
    """
    told = [row["mismatch"] for row in rows]
    stale = [gap_to_base(config, row["iteration"]) for row in rows]
    is_telling = len(rows) < 2 or stale[1] > 2 * told[1]
    return {
        "passed": max(told) < MISMATCH_LIMIT and is_telling,
        "logprob_abs_mean": told,
        "logprob_abs_mean_to_base": stale,
    }


def gap_to_base(config: Any, iteration: int, count: int = 32) -> float:
    """Mean distance of an iteration's sampled log-probs to those of the model it all began with."""
    import numpy as np
    import torch

    from artifacts.runs import committed
    from artifacts.store import Store
    from stages.logprobs import LogprobModel
    from stages.models import device_of_this_process, load_causal_lm
    from stages.packed import pack
    from stages.update.samples import read_samples

    store, device = Store(config.url), device_of_this_process()
    _, update = committed(store, iteration, "update")[-1]
    samples = read_samples(store, update.inputs, config.update, config.score.on_null)
    model = load_causal_lm(config.model, getattr(torch, config.update.dtype)).to(device)
    with torch.no_grad():
        batch = pack(samples.sequences[:count], device)
        logprobs, _ = LogprobModel(model)(batch, config.rollout.temperature)
    sampler = np.concatenate(samples.sampler_logprobs[:count])
    return float(np.abs(sampler - logprobs.cpu().numpy()).mean())


def check_digests(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Every iteration left other weights."""
    digests = [row["weights"] for row in rows]
    return {"passed": len(set(digests)) == len(digests), "digests": digests}


def check_replay(config: Any) -> dict[str, Any]:
    """All updates made again from their committed inputs, as after a crash between snapshots."""
    from artifacts.errors import IntegrityError
    from flows.plan import make_plan
    from flows.record import open_run
    from flows.report import Report
    from flows.session import Session

    copy = config.model_copy(update={"run": f"{config.run}-replay"})
    shutil.copytree(config.url, copy.url)
    shutil.rmtree(Path(copy.url) / "policy")
    session = Session(open_run(make_plan(copy)), Report())
    session.recall_all(before=config.iterations + 1)
    start = time.time()
    try:
        replayed = session.pools.trainers.bring_to(session.store, session.history)
    except IntegrityError as error:
        return {"passed": False, "error": str(error)}
    finally:
        session.pools.close()
    return {
        "passed": replayed == config.iterations,
        "replayed": replayed,
        "seconds": round(time.time() - start, 1),
    }
