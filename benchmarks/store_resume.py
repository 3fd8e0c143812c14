"""Seconds that a resume spends asking the store what a run of many iterations has committed.

    python benchmarks/store_resume.py --iterations 1000

The run is made by hand, with the keys that a session looks for and two small files a stage, on
local disk and on the tests' S3 server. Timed is what a resume of the finished run does: whether
anything is left (every iteration recalled), then each stage of each iteration, found. Requests
are those that leave the S3 client.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[1:1] = [str(TESTS), str(TESTS / "flows")]

from artifacts.store import Store  # noqa: E402
from flows.record import open_run  # noqa: E402
from flows.session import Session  # noqa: E402
from s3_server import BUCKET, running_s3_server  # noqa: E402  (after the path)
from small_run import finished_run, small_plan  # noqa: E402


def count_requests(store: Store) -> list[str]:
    """The paths that ``store``'s S3 client asks for from now on, one entry a request."""
    asked: list[str] = []
    if not store.is_local:
        store.fs.connect()
        store.fs.s3.meta.events.register(
            "before-send.s3", lambda request, **_: asked.append(request.url)
        )
    return asked


def resume(url: str, iterations: int) -> tuple[float, float, int]:
    """Seconds to recall every iteration, seconds to find each of its stages, requests."""
    session = Session(open_run(small_plan(url, iterations=iterations)))
    asked = count_requests(session.store)
    start = time.perf_counter()
    if session.recall_finished() != iterations:
        raise RuntimeError("the run is not what was made")
    session.history.clear()
    middle = time.perf_counter()
    for iteration in range(1, iterations + 1):
        session.rollout(iteration)
        session.score(iteration)
        session.update(iteration)
    return middle - start, time.perf_counter() - middle, len(asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, nargs="+", default=[10, 100, 1000])
    args = parser.parse_args()
    print("| store | iterations | recall s | stages found s | requests an iteration |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, running_s3_server(Path(folder)) as server:
        os.environ |= server.environment
        for iterations in args.iterations:
            made = f"{folder}/{iterations}"
            finished_run(small_plan(made, iterations=iterations))
            bucket = f"s3://{BUCKET}/{iterations}"
            Store(bucket).fs.put(made, bucket, recursive=True)
            for name, url in (("local", made), ("S3", bucket)):
                recall, found, requests = resume(url, iterations)
                each = f"{requests / iterations:.1f}" if requests else ""
                print(
                    f"| {name} | {iterations} | {recall:.2f} | {found:.2f} | {each} |", flush=True
                )
            shutil.rmtree(made)


if __name__ == "__main__":
    main()
