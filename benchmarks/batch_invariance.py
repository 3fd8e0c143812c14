"""Whether a shard depends on what is sampled beside it, and what independence costs.

    python benchmarks/batch_invariance.py [--tiny]

Makes the same shards together and then some of them alone, with and without
``rollout.deterministic``, each in a process of its own. Exits 1 where ``rollout.deterministic:
true`` gives a shard that differs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])])

from gpu_inputs import QWEN, TINY, make_model  # noqa: E402  (after the path)

SHARDS, PROMPTS, SAMPLES, LENGTH, NEW = 8, 32, 4, 48, 128
ALONE = (5, 2)


def make_orders(shards: int, prompts: int) -> list[Any]:
    """Orders of shards whose prompts are of several lengths."""
    from stages.rollout.worker import ShardOrder

    def sample(shard: int, prompt: int, k: int) -> dict[str, Any]:
        number = shard * prompts + prompt
        ids = [4 + (7 * number + n) % 36 for n in range(LENGTH - number % 9)]
        names = {"sample_id": f"{number}-{k}", "group_id": str(number), "prompt_id": str(number)}
        place = {"source": "data", "row": number, "epoch": 0, "sample_index": k}
        texts = {"prompt_text": "", "ground_truth": None, "extra": "{}"}
        return {**names, **place, "seed": 1000 * number + k, "prompt_ids": ids, **texts}

    return [
        ShardOrder(s, [sample(s, p, k) for p in range(prompts) for k in range(SAMPLES)])
        for s in range(shards)
    ]


def sample_both_ways(model: str, is_deterministic: bool, is_tiny: bool) -> dict[str, Any]:
    """Make all shards in one call, then some alone."""
    from artifacts.store import Store
    from stages.rollout.config import RolloutConfig
    from stages.rollout.worker import Finished, PolicyName, RolloutWorker

    prompts = 4 if is_tiny else PROMPTS
    config = RolloutConfig(
        max_new_tokens=16 if is_tiny else NEW,
        samples_per_prompt=SAMPLES,
        prompts_per_shard=prompts,
        max_sequences=1024,
        deterministic=is_deterministic,
        dtype="bfloat16",
        gpu_memory=0.5,
    )
    policy = PolicyName(0, "base")
    worker = RolloutWorker("engine-0", model, policy, config, LENGTH + config.max_new_tokens)
    orders = make_orders(SHARDS, prompts)

    def digests(folder: str, wanted: list[Any]) -> dict[int, str]:
        with tempfile.TemporaryDirectory() as where:
            events = worker.generate(Store(where), folder, policy, wanted)
            return {e.index: e.shard.digest for e in events if isinstance(e, Finished)}

    digests("warm", orders)
    start = time.perf_counter()
    every = digests("all", orders)
    seconds = time.perf_counter() - start
    again = digests("again", orders)
    alone = [digests("alone", [orders[index]])[index] == every[index] for index in ALONE]
    samples = SHARDS * prompts * SAMPLES
    return {
        "deterministic": is_deterministic,
        "shards": SHARDS,
        "equal_when_made_again": sum(again[i] == every[i] for i in every),
        "made_alone": len(ALONE),
        "equal_when_alone": sum(alone),
        "samples_per_second": round(samples / seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        model, flag = args.child.rsplit(",", 1)
        print(json.dumps(sample_both_ways(model, flag == "1", args.tiny)))
        return
    found = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), TINY if args.tiny else QWEN)
        for flag in ("0", "1"):
            command = [sys.executable, __file__, "--child", f"{folder},{flag}"]
            done = subprocess.run(
                [*command, *(["--tiny"] if args.tiny else [])], capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(done.stderr[-3000:])
            print(line := done.stdout.splitlines()[-1], flush=True)
            found.append(json.loads(line))
    ratio = found[1]["samples_per_second"] / found[0]["samples_per_second"]
    print(f"samples/s with deterministic over without: {ratio:.2f}")
    sys.exit(found[1]["equal_when_alone"] != len(ALONE))


if __name__ == "__main__":
    main()
