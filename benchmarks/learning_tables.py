"""What ``learning.py`` writes of its runs: CSV files, a Markdown table and a plot."""

import csv
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from typing import Any

LAST = 5  # iterations whose mean reward is the end of a run
MARGIN = 0.2  # that reward and accuracy have to rise by, both of them shares from 0 to 1
COLUMNS = 4  # panels in a row of the plot


@dataclass(frozen=True)
class Result:
    """A finished run: held-out accuracy before and after, and one number an iteration."""

    algorithm: str
    seed: int
    start_accuracy: float
    end_accuracy: float
    rewards: list[float]
    iteration_seconds: list[float]
    wall_seconds: float

    @property
    def last_reward(self) -> float:
        """Mean over the last iterations."""
        return mean(self.rewards[-LAST:])

    @property
    def gain(self) -> float:
        """What the mean reward of training has risen by."""
        return self.last_reward - self.rewards[0]

    @property
    def has_learned(self) -> bool:
        """Whether reward and held-out accuracy have both risen clearly."""
        return min(self.gain, self.end_accuracy - self.start_accuracy) >= MARGIN

    def __str__(self) -> str:
        accuracies = f"{self.start_accuracy:.3f} → {self.end_accuracy:.3f}"
        return (
            f"accuracy {accuracies}, reward {self.rewards[0]:.3f} → {self.last_reward:.3f}, "
            f"{self.wall_seconds:.0f} s"
        )


def not_learned(results: Iterable[Result]) -> list[str]:
    """A line for each run that has not clearly raised reward."""
    return [
        f"{result.algorithm}-seed-{result.seed} has not risen by {MARGIN}: {result}"
        for result in results
        if not result.has_learned
    ]


def write_tables(out: Path, results: Sequence[Result]) -> str:
    """Write all there is to write into ``out``. Returns the Markdown table."""
    _write_csv(out / "learning.csv", iteration_rows(results))
    _write_csv(out / "learning-summary.csv", summary_rows(results))
    text = markdown(results)
    (out / "learning.md").write_text(text)
    if importlib.util.find_spec("matplotlib"):
        draw_plot(out)
    else:
        print(f"there is no matplotlib here: draw later with --plot-only {out}")
    return text


def iteration_rows(results: Iterable[Result]) -> list[dict[str, Any]]:
    """One row an iteration of a run."""
    return [
        {
            "algorithm": result.algorithm,
            "seed": result.seed,
            "iteration": iteration,
            "mean_reward": f"{reward:.6f}",
            "seconds": f"{seconds:.3f}",
        }
        for result in results
        for iteration, (reward, seconds) in enumerate(
            zip(result.rewards, result.iteration_seconds, strict=True), start=1
        )
    ]


def summary_rows(results: Iterable[Result]) -> list[dict[str, Any]]:
    """One row a run."""
    return [
        {
            "algorithm": result.algorithm,
            "seed": result.seed,
            "start_accuracy": f"{result.start_accuracy:.4f}",
            "end_accuracy": f"{result.end_accuracy:.4f}",
            "first_reward": f"{result.rewards[0]:.4f}",
            "last_reward": f"{result.last_reward:.4f}",
            "wall_seconds": f"{result.wall_seconds:.1f}",
            "has_learned": result.has_learned,
        }
        for result in results
    ]


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def markdown(results: Sequence[Result]) -> str:
    """One row an algorithm, its seeds side by side."""
    lines = [
        "| algorithm | held-out greedy accuracy by seed | gain in reward | median wall s |",
        "|---|---|---|---|",
    ]
    for algorithm, group in groupby(results, key=lambda result: result.algorithm):
        runs = list(group)
        accuracies = "; ".join(
            f"{run.seed}: {run.start_accuracy:.3f} → {run.end_accuracy:.3f}" for run in runs
        )
        gains = sorted(run.gain for run in runs)
        seconds = median(run.wall_seconds for run in runs)
        spread = f"{gains[0]:+.3f} to {gains[-1]:+.3f}"
        lines.append(f"| `{algorithm}` | {accuracies} | {spread} | {seconds:.0f} |")
    return "\n".join(lines) + "\n"


def draw_plot(folder: Path) -> None:
    """``learning.png`` of the folder's ``learning.csv``: a panel an algorithm, a line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with (folder / "learning.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    height = -(-len(algorithms) // COLUMNS)
    figure, grid = pyplot.subplots(
        height,
        COLUMNS,
        figsize=(3 * COLUMNS, 2.2 * height),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, algorithm in zip(grid.flat, algorithms, strict=False):
        _draw_panel(panel, algorithm, [row for row in rows if row["algorithm"] == algorithm])
    for panel in grid.flat[len(algorithms) :]:
        panel.set_axis_off()
    figure.supxlabel("iteration")
    figure.supylabel("mean reward")
    figure.savefig(folder / "learning.png", dpi=110)
    pyplot.close(figure)


def _draw_panel(panel: Any, algorithm: str, rows: Iterable[dict[str, str]]) -> None:
    panel.set_title(algorithm, fontsize=10)
    panel.set_ylim(0, 1)
    panel.grid(alpha=0.3)
    for seed, line in groupby(rows, key=lambda row: row["seed"]):
        points = [(int(row["iteration"]), float(row["mean_reward"])) for row in line]
        panel.plot(*zip(*points, strict=True), linewidth=1, label=f"seed {seed}")
    panel.legend(fontsize=6, loc="lower right")
