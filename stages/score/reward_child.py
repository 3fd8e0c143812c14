"""What runs in a reward's own process: one function, rows in by a pipe, outcomes out by another.

    python -m stages.score.reward_child READ_FD WRITE_FD

Lines of JSON, so that nothing that user code writes is ever executed by its reader:

    in    {"spec": …, "path": […]}              once: what to load, where modules lie
          {"rows": […]}                          again and again: samples to score
    out   ["ready", is_async]                    once: it is loaded
          [index] · [index, outcome]             a call began · ended
          ["end"]                                all rows are done
          ["refused", message]                   it can't be loaded, or gave what is of no use
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO

from stages.contract import StageError
from stages.score.calls import Pace, call_reward
from stages.score.config import RewardSpec
from stages.score.outcomes import Outcome, to_json
from stages.score.rewards import Reward, load_reward

_PR_SET_PDEATHSIG = 1


def main(read_fd: int, write_fd: int) -> None:
    """Serve until the pipe ends."""
    _die_with_parent()
    # What a reward prints is no protocol.
    os.dup2(2, 1)
    for fd in (read_fd, write_fd):
        os.set_inheritable(fd, False)
    requests = os.fdopen(read_fd, "r", encoding="utf-8")
    answers = os.fdopen(write_fd, "w", buffering=1, encoding="utf-8")
    reward = _load(json.loads(requests.readline()), answers)
    pace = Pace(reward.spec.calls_per_second)
    for line in requests:
        _serve(reward, json.loads(line)["rows"], answers, pace)


def _load(order: dict[str, Any], answers: TextIO) -> Reward:
    sys.path[:] = order["path"]
    try:
        reward = load_reward(RewardSpec.model_validate(order["spec"]))
    except ValueError as error:
        _say(answers, "refused", str(error))
        sys.exit(1)
    _say(answers, "ready", reward.is_async)
    return reward


def _serve(reward: Reward, rows: list[dict[str, Any]], answers: TextIO, pace: Pace) -> None:
    try:
        call_reward(reward, rows, _reporter(answers), pace)
    except StageError as error:
        _say(answers, "refused", str(error))
    else:
        _say(answers, "end")


def _reporter(answers: TextIO) -> Callable[[int, Outcome | None], None]:
    def report(index: int, outcome: Outcome | None) -> None:
        # Every line leaves at once: what a call that never ends held back would be lost.
        if outcome is None:
            answers.write(f"[{index}]\n")
        else:
            _say(answers, index, to_json(outcome))

    return report


def _say(answers: TextIO, *words: Any) -> None:
    answers.write(json.dumps(words) + "\n")


def _die_with_parent() -> None:
    """Have the kernel end this process when its parent ends, in the middle of a call too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
