"""Rewards that need no code of the user's, by the short names that ``fn:`` takes.

Each is an ordinary reward function, written as a user would write it (``docs/rewards.md``), and
enters keys by its source as a user's does. A module may hold ``check_<function>(**options)``,
called once before anything is scored, which raises ValueError where the options can't work.
"""

_PACKAGE = "stages.score.builtin"

BUILTINS = {
    "code_tests": f"{_PACKAGE}.code:code_tests",
    "exact_match": f"{_PACKAGE}.matching:exact_match",
    "format": f"{_PACKAGE}.matching:format_match",
    "json_schema": f"{_PACKAGE}.structure:json_schema",
    "keyword_tokens": f"{_PACKAGE}.keywords:keyword_tokens",
    "keywords": f"{_PACKAGE}.keywords:keywords",
    "language": f"{_PACKAGE}.language:language",
    "length": f"{_PACKAGE}.length:length",
    "math": f"{_PACKAGE}.math_answer:math_answer",
    "normalized_match": f"{_PACKAGE}.matching:normalized_match",
    "repetition": f"{_PACKAGE}.repetition:repetition",
    "soft_overlong": f"{_PACKAGE}.length:soft_overlong",
}
