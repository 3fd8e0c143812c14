"""What of a run is published, as plain values: metrics, parameters, a description in words.

Knows what a tracking server takes (legal names, finite numbers, limits), never the server.
"""

import json
import math
import posixpath
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from artifacts.keys import sha256
from artifacts.manifests import Manifest
from artifacts.round_metrics import over_rounds
from flows.plan import Plan

_LEGAL = re.compile(r"[\w.\- :/]+")
_ILLEGAL = re.compile(r"[^\w.\- :/]")
_NAME_LIMIT = 250
_PARAM_LIMIT = 6000
_TAG_LIMIT = 8000

# A run page lists metrics as they came: what a person asks for first comes first.
_ORDER = ("reward", "update", "rollout", "score", "mismatch", "seconds", "memory")
_SHORT_DIGEST = 16

_DESCRIPTION = """\
**{algorithm}** on `{model}`: {iterations} iterations of {prompts} prompts × {samples} samples, \
rewarded by {rewards}.

The run lies at `{url}`. From a number to the samples behind it:

```
ratchet status  {quoted}
ratchet samples {quoted} --iteration 1 --sort "reward desc"
ratchet samples {quoted} --where "reward = 0 and finish_reason = 'length'"
ratchet export  {quoted} --to FOLDER
```

- **Model metrics**, a step an iteration: `reward/` what samples got, `rollout/` what was sampled, \
`score/` what scoring left out, `update/` the optimizer steps, `mismatch/` engine against trainer, \
`evaluate/` held-out data (a step a policy), `seconds/` where time went, \
`memory/` what ranks needed.
- **Artifacts**: `samples/` has a table an iteration, of samples without a reward first, then from \
worst to best; `manifests/` has what each stage committed: inputs, files and digests.
"""


def metrics_of(stages: Mapping[str, Sequence[Manifest]]) -> dict[str, float]:
    """An iteration's metrics: what stages committed, the seconds they took, their speed.

    Args:
        stages: each stage's manifests, one a round.
    """
    metrics: dict[str, float] = {}
    for stage, rounds in stages.items():
        metrics |= {name: v for name, v in over_rounds(rounds).items() if v is not None}
        seconds = sum(made.provenance["seconds"] for made in rounds)
        metrics[f"seconds/{stage}"] = seconds
        for made in rounds:
            for phase, value in made.provenance.get("phases", {}).items():
                name = f"seconds/{stage}_{phase}"
                metrics[name] = metrics.get(name, 0.0) + value
        metrics |= _peaks(stage, rounds)
        tokens = sum(num_tokens(made) or 0 for made in rounds)
        if tokens and seconds > 0:
            metrics[f"{stage}/tokens_per_second"] = tokens / seconds
    return dict(sorted(metrics.items(), key=lambda item: _rank(item[0])))


def _peaks(stage: str, rounds: Sequence[Manifest]) -> dict[str, float]:
    """The most memory that any rank needed in each phase, GiB."""
    peaks: dict[str, float] = {}
    for rank in (rank for made in rounds for rank in made.provenance.get("memory", [])):
        for phase, found in rank.items():
            name = f"memory/{stage}_{phase}_peak_gib"
            peaks[name] = max(peaks.get(name, 0.0), found["peak_bytes"] / 2**30)
    return peaks


def _rank(name: str) -> tuple[int, str]:
    prefix = name.partition("/")[0]
    return _ORDER.index(prefix) if prefix in _ORDER else len(_ORDER), name


def num_tokens(manifest: Manifest) -> int | None:
    """Tokens that a stage sampled or trained on; None where it does neither."""
    metrics = manifest.metrics
    tokens = metrics.get("rollout/response_tokens", metrics.get("update/trained_tokens"))
    return None if tokens is None else int(tokens)


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """``metrics`` with a NaN for an infinity, which SQL would give back as the largest float.

    Beside that NaN, ``<name>_infinite`` is 1 or -1.
    """
    values: dict[str, float] = {}
    for name, value in metrics.items():
        if math.isinf(value):
            values[f"{name}_infinite"] = math.copysign(1.0, value)
        values[name] = math.nan if math.isinf(value) else float(value)
    return values


def evaluation_points(version: int, made: Manifest) -> list[tuple[str, float, int, int]]:
    """Name, value, time in milliseconds and step of each metric that is known.

    The step is the policy's version, and the time that of the commit, so that publishing again
    gives the same points.
    """
    known = {name: value for name, value in made.metrics.items() if value is not None}
    milliseconds = int(1000 * made.provenance["end"])
    return [
        (legal_name(name), value, milliseconds, version) for name, value in finite(known).items()
    ]


def legal_name(name: str) -> str:
    """``name`` where MLflow takes it, else a like name that no other name gives.

    MLflow takes letters, digits and ``_ - . : /`` and blanks, in what reads as a relative path.
    """
    is_path = posixpath.normpath(name) == name != "." and not name.startswith(("/", ".."))
    if is_path and _LEGAL.fullmatch(name) and len(name) <= _NAME_LIMIT:
        return name
    like = "/".join(part for part in _ILLEGAL.sub("_", name).split("/") if part.strip("."))
    return f"{like[: _NAME_LIMIT - 50]}-{sha256(name.encode())[:8]}".lstrip("/")


def renamed(names: Iterable[str]) -> dict[str, str]:
    """Of the names that are not legal: the legal one, and what it stands for."""
    return {legal_name(name): name for name in names if legal_name(name) != name}


def params_of(plan: Plan) -> dict[str, str]:
    """The resolved configuration, flat; text where a parameter has to be."""
    flat = flatten(plan.config.model_dump(mode="json"))
    return {legal_name(name): _text(value)[:_PARAM_LIMIT] for name, value in flat.items()}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings, and lists of mappings, to one mapping with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def tags_of(plan: Plan, url: str) -> dict[str, str]:
    """What identifies the run, and its description."""
    rewards = {f"ratchet.reward.{name}": digest for name, digest in plan.functions.items()}
    digests = {
        "ratchet.model_digest": plan.model_digest,
        "ratchet.data_digest": plan.data_digest,
        **{legal_name(name): digest for name, digest in rewards.items()},
    }
    return {
        "mlflow.note.content": description(plan, url),
        "mlflow.source.name": "ratchet train",
        "mlflow.source.type": "LOCAL",
        "ratchet.url": url,
        # Whole, they push their own names off the page; run.json and manifests have them whole.
        **{name: digest[:_SHORT_DIGEST] for name, digest in digests.items()},
    }


def description(plan: Plan, url: str) -> str:
    """What the run is, and how to look at it, in Markdown."""
    config = plan.config
    rewards = [f"`{spec.column}` × {spec.weight:g}" for spec in config.score.rewards]
    return _DESCRIPTION.format(
        algorithm=config.update.algorithm.upper(),
        model=config.model,
        iterations=config.iterations,
        prompts=config.data.batch_size,
        samples=config.rollout.samples_per_prompt,
        rewards=", ".join(rewards) or "pairs of the data",
        url=url,
        quoted=shlex.quote(url),
    )


def table_tag(iteration: int, path: str) -> str:
    """The tag value that makes MLflow show sample files as tables: the newest that fit in it."""
    longest = len(json.dumps({"path": path.format(iteration), "type": "table"})) + len(", ")
    first = max(1, iteration + 1 - (_TAG_LIMIT - len("[]")) // longest)
    numbers = range(first, iteration + 1)
    return json.dumps([{"path": path.format(number), "type": "table"} for number in numbers])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
