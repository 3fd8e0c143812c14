"""Whether a sample depends on what is sampled beside it, and what independence costs.

    python benchmarks/batch_invariance.py [--tiny]

Samples the same requests together, and some of them alone, with and without
``rollout.deterministic``; each in a process of its own, as vLLM reads the setting when imported.
Exits 1 where ``rollout.deterministic: true`` gives a sample that differs.
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

TOGETHER, ALONE, PROMPT, NEW = 256, 16, 48, 128


def sample_both_ways(model: str, is_deterministic: bool, is_tiny: bool) -> dict[str, Any]:
    """Sample all requests at once, then some one by one."""
    from stages.rollout.config import RolloutConfig
    from stages.rollout.engine import Request, make_engine

    config = RolloutConfig(
        max_new_tokens=16 if is_tiny else NEW,
        deterministic=is_deterministic,
        dtype="float32" if is_tiny else "bfloat16",
        gpu_memory=0.5,
    )
    count = 32 if is_tiny else TOGETHER
    engine = make_engine(model, config, PROMPT + config.max_new_tokens)
    requests = [
        Request([4 + (7 * n + k) % 36 for k in range(PROMPT - n % 9)], n) for n in range(count)
    ]
    dict(engine.sample(requests))  # warms up
    start = time.perf_counter()
    together = dict(engine.sample(requests))
    seconds = time.perf_counter() - start
    equal = close = 0
    for index in range(ALONE):
        ((_, alone),) = engine.sample([requests[index]])
        equal += alone.response_ids == together[index].response_ids
        close += alone.logprobs.tobytes() == together[index].logprobs.tobytes()
    tokens = sum(len(sample.response_ids) for sample in together.values())
    return {
        "deterministic": is_deterministic,
        "alone": ALONE,
        "same_tokens": equal,
        "same_bits": close,
        "tokens_per_second": round(tokens / seconds),
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
                [*command, *(["--tiny"] if args.tiny else [])], stdout=subprocess.PIPE, text=True
            )
            print(done.stdout.splitlines()[-1] if done.stdout else f"failed: {done.returncode}")
            found.append(json.loads(done.stdout.splitlines()[-1]))
    ratio = found[1]["tokens_per_second"] / found[0]["tokens_per_second"]
    print(f"tokens/s with deterministic over without: {ratio:.2f}")
    sys.exit(found[1]["same_bits"] != ALONE)


if __name__ == "__main__":
    main()
