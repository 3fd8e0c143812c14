"""The columns of every shard, with a sentence of meaning each.

Only nullable columns are ever added; a reader takes the columns it knows by name.
"""

from collections.abc import Sequence

import pyarrow as pa

ROWS_VERSION = 1
FINISH_REASONS = ("stop", "length", "given")
_INTS = pa.list_(pa.int32())
_FLOATS = pa.list_(pa.float32())
_DOUBLES = pa.list_(pa.float64())


Columns = list[tuple[str, pa.DataType, str]]


def _schema(kind: str, columns: Columns) -> pa.Schema:
    fields = [pa.field(name, type_, metadata={"doc": doc}) for name, type_, doc in columns]
    return pa.schema(fields, metadata={"ratchet.kind": kind, "ratchet.version": str(ROWS_VERSION)})


_PROMPT: Columns = [
    ("prompt_id", pa.string(), "digest of the data row: its bytes, wherever it lies"),
    ("source", pa.string(), "name of the data source"),
    ("row", pa.int64(), "row number in its source, from 0"),
    ("token_ids", _INTS, "the prompt as the engine gets it; never tokenised again"),
    ("text", pa.string(), "the prompt as rendered, for people"),
    ("ground_truth", pa.string(), "what the reward compares with; null where there is none"),
    ("extra", pa.string(), "the data row's other columns, as JSON"),
    ("messages", pa.string(), "what a chat template rendered, as JSON; null: plain text"),
]
PROMPTS = _schema("prompts", _PROMPT)

# Of data that holds the responses too, two a prompt.
PAIRS = _schema(
    "prompts",
    [
        *_PROMPT,
        ("chosen_ids", _INTS, "the better response's tokens, as they go on from the prompt's"),
        ("rejected_ids", _INTS, "the worse one's"),
        ("chosen_text", pa.string(), "the better response as it stands in the data, for people"),
        ("rejected_text", pa.string(), "the worse one"),
    ],
)

ROLLOUTS = _schema(
    "rollouts",
    [
        ("sample_id", pa.string(), "unique in the run: <group_id>-<sample_index>"),
        ("group_id", pa.string(), "the samples of one prompt row: <iteration>-<group index>"),
        ("prompt_id", pa.string(), "digest of the data row"),
        ("source", pa.string(), "name of the data source"),
        ("row", pa.int64(), "row number in its source"),
        ("epoch", pa.int64(), "how often its source had been gone through before, from 0"),
        ("sample_index", pa.int32(), "place in the group, from 0"),
        ("seed", pa.int64(), "the sampler's own seed for this sample; null: nothing was sampled"),
        ("prompt_ids", _INTS, "the prompt's tokens"),
        ("response_ids", _INTS, "exactly what was sampled, or given, end token included"),
        (
            "logprobs",
            _FLOATS,
            "natural log, of the distribution sampled from, a token; or null",
        ),
        ("loss_mask", pa.list_(pa.int8()), "1 where the policy chose the token, 0 elsewhere"),
        (
            "finish_reason",
            pa.string(),
            "stop (an end token or string), length (cut) or given",
        ),
        ("text", pa.string(), "the response as text, for rewards and people"),
        ("prompt_text", pa.string(), "the prompt as text"),
        ("ground_truth", pa.string(), "copied from the prompt"),
        ("extra", pa.string(), "copied from the prompt"),
        ("messages", pa.string(), "copied from the prompt"),
        (
            "policy_version",
            pa.int64(),
            "updates behind the weights that sampled; null: given",
        ),
        (
            "policy_digest",
            pa.string(),
            "digest of those weights, as the engine has it; null: given",
        ),
    ],
)

ADVANTAGES = _schema(
    "advantages",
    [
        ("sample_id", pa.string(), "the sample"),
        ("advantage", pa.float64(), "mean of its sampled tokens; null where it was left out"),
        ("weight", pa.float64(), "1 where the sample entered the step's counts, else 0"),
        ("step", pa.int64(), "the optimizer step that had it, from 1 over the run; null for none"),
        ("token_advantages", _DOUBLES, "one a response token where they differ, else null"),
        ("token_returns", _DOUBLES, "what the critic learns, one a response token, else null"),
    ],
)

STEPS = _schema(
    "steps",
    [
        ("step", pa.int64(), "optimizer step, from 1 over the whole run"),
        ("name", pa.string(), "metric"),
        ("value", pa.float64(), "its value over all tokens and ranks of the step"),
    ],
)

TENSORS = _schema(
    "tensors",
    [
        ("name", pa.string(), "a parameter by its Hugging Face name; critic.<name>: the critic's"),
        ("dtype", pa.string(), "of the master weights"),
        ("shape", pa.list_(pa.int64()), "its lengths"),
        ("digest", pa.string(), "sha256 of its bytes, row by row"),
        ("norm", pa.float64(), "square root of the sum of its squares"),
    ],
)

EVALUATION = _schema(
    "evaluation",
    [
        ("source", pa.string(), "name of the data source"),
        ("mode", pa.string(), "how it was answered: sampled or greedy"),
        ("group_id", pa.string(), "the prompt's samples"),
        ("prompt_id", pa.string(), "digest of the data row"),
        ("samples", pa.int64(), "how many there are"),
        ("known", pa.int64(), "those that have a reward"),
        ("right", pa.int64(), "those whose whole reward reaches the verdict's threshold"),
        ("reward", pa.float64(), "mean of the whole rewards that are known; null: none is"),
    ],
)

LEDGER = _schema(
    "ledger",
    [
        ("unit", pa.string(), "the unit of work, such as shard-00003 or rank-0"),
        ("worker", pa.string(), "who did it"),
        ("attempt", pa.int32(), "from 1; above, workers died at it before; null: not counted"),
        ("start", pa.float64(), "Unix time, seconds"),
        ("seconds", pa.float64(), "wall time"),
        ("rows", pa.int64(), "samples"),
        ("tokens", pa.int64(), "tokens generated, read or trained on"),
        ("bytes", pa.int64(), "bytes written"),
    ],
)


_USED = "tokens that the judge's endpoint counted for the sample, else null"
_COMPONENT = "one component, unweighted; of one given per token, the sum"


_USAGE = ("input_tokens.", "output_tokens.")


def usage_columns(judge: str) -> list[str]:
    """What the answers of a judge took, in and out."""
    return [f"{prefix}{judge}" for prefix in _USAGE]


def is_usage(column: str) -> bool:
    """Whether a column of scores is one of :func:`usage_columns`."""
    return column.startswith(_USAGE)


def scores_schema(rewards: list[str], judges: Sequence[str] = ()) -> pa.Schema:
    """One row a sample; a column ``reward.<name>`` for each reward component.

    Of those that are ``judges``, two more: tokens of requests and of answers.
    """
    columns = [
        ("sample_id", pa.string(), "the sample"),
        ("group_id", pa.string(), "its group"),
        *[(f"reward.{name}", pa.float64(), _COMPONENT) for name in rewards],
        ("reward", pa.float64(), "weighted sum of components of whole samples; null: none known"),
        ("error", pa.string(), "JSON list: what reward functions raised, else null"),
        ("reference_logprobs", _FLOATS, "log-probs under the reference model, else null"),
        ("token_rewards", _DOUBLES, "per token, weighted, beside `reward` and not in it, or null"),
        ("values", _FLOATS, "the critic's value of the state before each token, else null"),
        *[(name, pa.int64(), _USED) for judge in judges for name in usage_columns(judge)],
    ]
    return _schema("scores", columns)
