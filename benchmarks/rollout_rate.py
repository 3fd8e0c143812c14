"""Tokens a second of the whole rollout stage over those of bare vLLM, on the same requests.

    python benchmarks/rollout_rate.py --model examples/arithmetic/model --rounds 5

The stage is all of it: actor, per-sample seeds, log-probs, Arrow shards, digests, commit on a local
store. Bare is ``LLM.generate`` with the same settings, in a process of its own. The two take turns;
the number that counts is the ratio.
"""

import argparse
import random
import tempfile
import time
from statistics import median
from typing import Any

from flows.environment import set_defaults

set_defaults()

from artifacts.manifests import Ref  # noqa: E402
from artifacts.store import Store  # noqa: E402
from stages.contract import Committed, Work, find_or_make  # noqa: E402
from stages.ray_cluster import RayCluster  # noqa: E402
from stages.rollout import run as rollout_stage  # noqa: E402
from stages.rollout.config import DataConfig, RolloutConfig  # noqa: E402
from stages.rollout.engines import Engines  # noqa: E402
from stages.rollout.prompts import PromptSet, PromptWork  # noqa: E402
from stages.rollout.vllm_engine import VllmEngine  # noqa: E402
from stages.rollout.worker import PolicyName  # noqa: E402
from stages.workers import Placement  # noqa: E402

BASE = PolicyName(0, "base")


class BareEngine:
    """vLLM and nothing of ours around it."""

    def __init__(self, model: str, config: RolloutConfig, context: int) -> None:
        self._config = config
        self._engine = VllmEngine(model, config, context)

    def generate(self, requests: list[tuple[list[int], int]]) -> tuple[float, int]:
        """Seconds inside ``LLM.generate``, and tokens."""
        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        params = [self._engine._params(seed, self._config) for _, seed in requests]
        start = time.perf_counter()
        outputs = self._engine._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return seconds, sum(len(output.outputs[0].token_ids) for output in outputs)


def commit_prompts(store: Store, count: int, length: int) -> Committed:
    """Random prompts: what they say does not matter to the rate."""
    import pyarrow as pa

    from artifacts import schemas
    from artifacts.shards import write_shard
    from stages.contract import Product

    rng = random.Random(0)
    rows = [
        {
            "prompt_id": str(n),
            "source": "data",
            "row": n,
            "token_ids": [rng.randrange(100, 40000) for _ in range(length)],
            "text": "",
            "ground_truth": None,
            "extra": "{}",
        }
        for n in range(count)
    ]
    work = PromptWork("prompts", "prompts", 1, 0, {"count": count, "length": length}, {})
    table = pa.Table.from_pylist(rows, schema=schemas.PROMPTS)

    def make() -> Product:
        return Product([write_shard(store, work.folder, 0, table)], {"rows": [count]})

    return find_or_make(store, work, make)


def round_work(iteration: int, args: argparse.Namespace, prompts: Committed) -> Work:
    """Each round takes other prompts, so that nothing is found and no prefix is cached."""
    return rollout_stage.rollout_work(
        iteration,
        args.data,
        args.config,
        0,
        prompts.ref,
        Ref("model", "base"),
        [(iteration - 1) * args.prompts],
        range(args.prompts),
    )


def requests_of(work: Work, prompts: PromptSet) -> list[tuple[list[int], int]]:
    """The same requests as the stage's, for the bare engine."""
    rows = rollout_stage.selection_of(work, prompts).rows
    return [
        (list(sample["prompt_ids"]), int(sample["seed"]))
        for order in rollout_stage.shard_orders(work, prompts, rows)
        for sample in order.samples
    ]


def measure(args: argparse.Namespace, folder: str) -> list[tuple[float, float]]:
    """(stage, bare) tokens a second, a round."""
    store = Store(folder)
    cluster = RayCluster(None)
    committed = commit_prompts(store, args.prompts * (args.rounds + 1), args.length)
    prompts = PromptSet(store, committed)
    place = Placement(args.gpus, args.threads)
    engines = Engines(cluster, args.model, BASE, args.config, args.context, 1, place)
    (bare,) = cluster.start(
        "rollout_rate:BareEngine", [(args.model, args.config, args.context)], place
    )
    rates = []
    for iteration in range(1, args.rounds + 2):
        work = round_work(iteration, args, committed)
        start = time.perf_counter()
        made: Any = rollout_stage.run(store, work, prompts, BASE, lambda: engines, lambda **_: None)
        seconds = time.perf_counter() - start
        ours = made.manifest.metrics["rollout/response_tokens"] / seconds
        bare_seconds, tokens = bare.submit("generate", requests_of(work, prompts)).result()
        rates.append((ours, tokens / bare_seconds))
    cluster.shutdown()
    return rates[1:]  # the first round warms both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    args.context = args.length + args.new_tokens
    args.data = DataConfig(path="", batch_size=args.prompts, shuffle=False)
    args.config = RolloutConfig(
        samples_per_prompt=args.samples, max_new_tokens=args.new_tokens, dtype=args.dtype
    )
    with tempfile.TemporaryDirectory() as folder:
        rates = measure(args, folder)
    print("| round | stage tokens/s | bare tokens/s | ratio |\n|---|---|---|---|")
    for number, (ours, bare) in enumerate(rates, start=1):
        print(f"| {number} | {ours:,.0f} | {bare:,.0f} | {ours / bare:.3f} |")
    print(f"\nmedian of ratios: {median(a / b for a, b in rates):.3f}")


if __name__ == "__main__":
    main()
