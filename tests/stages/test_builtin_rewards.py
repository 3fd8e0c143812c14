"""Built-in rewards on answers worked out by hand."""

import json
from itertools import product

import pytest

from stages.score.builtin import BUILTINS
from stages.score.builtin.keywords import keyword_tokens, keywords
from stages.score.builtin.language import language
from stages.score.builtin.length import length, soft_overlong
from stages.score.builtin.matching import exact_match, format_match, normalized_match
from stages.score.builtin.math_answer import extracted, last_boxed, math_answer
from stages.score.builtin.repetition import repetition
from stages.score.builtin.structure import json_schema
from stages.score.config import RewardSpec
from stages.score.rewards import load_reward, reward_digests

OPTIONS = {
    "format": {"pattern": "a"},
    "json_schema": {"schema": {"type": "object"}},
    "keywords": {"words": {"a": 1.0}},
    "keyword_tokens": {"words": {"a": 1.0}},
    "language": {"script": "latin"},
    "length": {"maximum": 5},
    "soft_overlong": {"max_tokens": 10, "buffer_tokens": 4},
}


def spec(name: str, **options) -> RewardSpec:
    return RewardSpec(fn=name, options=options, per_token=name == "keyword_tokens")


def test_every_builtin_loads_by_its_name_and_has_a_source_digest() -> None:
    digests = reward_digests([spec(name, **OPTIONS.get(name, {})) for name in BUILTINS])
    assert list(digests) == list(BUILTINS)
    assert len(set(digests.values())) == len(BUILTINS)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("format", {}, "needs options"),
        ("format", {"pattern": "("}, "pattern '(' is wrong"),
        ("json_schema", {"schema": {"type": "objct"}}, "the schema is wrong"),
        ("json_schema", {}, "needs options"),
        ("keywords", {"words": {}}, "give options"),
        ("keywords", {"words": {"a": "b"}}, "give options"),
        ("keyword_tokens", {"words": {"": 1.0}}, "give options"),
        ("language", {"script": "klingon"}, "one of arabic, chinese"),
        ("length", {"minimum": 3, "maximum": 2}, "0 <= minimum <= maximum"),
        ("length", {}, "maximum None"),
        ("math", {"extract": "first"}, "take auto, boxed or last_number"),
        ("repetition", {"ngram": 0}, "take 1 or more"),
        ("soft_overlong", {"max_tokens": 3, "buffer_tokens": 4}, "0 < buffer_tokens"),
        ("code_tests", {"isolation": "some"}, "take required or none"),
        ("code_tests", {"memory_mb": 8}, "64 MB or more"),
        ("exact_match", {"stripp": True}, "has no option 'stripp'; it has strip"),
    ],
)
def test_builtin_with_options_that_cannot_work_is_refused(name, options, said) -> None:
    with pytest.raises(ValueError, match="reward") as caught:
        load_reward(spec(name, **options))
    assert said in str(caught.value)


@pytest.mark.parametrize(("name", "per_token"), [("keyword_tokens", False), ("keywords", True)])
def test_builtin_of_the_other_shape_is_refused(name, per_token) -> None:
    with pytest.raises(ValueError, match=f"works with per_token: {str(not per_token).lower()}"):
        load_reward(RewardSpec(fn=name, options=OPTIONS[name], per_token=per_token))


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{1} and no, \boxed{2}", "2", 1.0),
        (r"\boxed{1} and no, \boxed{2}", "1", 0.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        (r"\boxed{2\sqrt{3}}", r"$\sqrt{12}$", 1.0),
        (r"\boxed{(1, 2)}", "(2, 1)", 0.0),
        ("12 apples, then 1,200.", "#### 1200", 1.0),
        ("the answer is 42", r"\boxed{42}", 1.0),
        ("-3", "3", 0.0),
        ("3/4", "0.75", 1.0),
        ("0.1", "0.10000001", 0.0),
        ("I do not know", "7", 0.0),
        ("I do not know", r"\frac{1}{x}", 0.0),
        ("7", None, None),
        ("7", "", None),
        ("7", "?!", None),
    ],
)
def test_math_compares_as_mathematics(text, truth, expected) -> None:
    assert math_answer(text, truth) == expected


NUMBERS = [
    r"\sqrt{8}",
    r"2\sqrt{2}",
    r"\sqrt{2}+\sqrt{3}",
    r"\sqrt{5+2\sqrt{6}}",
    r"\frac{1}{3}",
    "0.333333",
    r"50\%",
    r"\frac12",
    "50",
    r"10^{40}+1",
    r"10^{40}",
    r"\sqrt{-9}",
    "3i",
    r"\log_2 8",
    r"\infty",
    r"\{1,2\}",
    "x",
]


def test_math_says_what_math_verify_says_of_every_pair_of_numbers() -> None:
    from math_verify import parse, verify

    read = [parse(rf"\boxed{{{number}}}", parsing_timeout=None) for number in NUMBERS]
    for (truth, gold), (text, found) in product(zip(NUMBERS, read, strict=True), repeat=2):
        said = math_answer(rf"\boxed{{{text}}}", truth)
        assert said == verify(gold, found, timeout_seconds=None), (truth, text)


@pytest.mark.parametrize(
    ("text", "extract", "expected"),
    [
        (r"3, \boxed{4}, 5", "auto", "4"),
        (r"3, \boxed{4}, 5", "last_number", "5"),
        ("3, 4", "boxed", None),
        ("no number", "auto", None),
        ("version v2 of 1.5.", "last_number", "1.5"),
    ],
)
def test_math_answer_is_found_where_it_was_asked_for(text, extract, expected) -> None:
    assert extracted(text, extract) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{a{b}c}", "a{b}c"),
        (r"\boxed{a} \boxed{cut", "a"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\fbox {x}", "x"),
        ("none", None),
    ],
)
def test_last_boxed_is_the_last_that_is_closed(text, expected) -> None:
    assert last_boxed(text) == expected


def test_matches_are_exact_or_normalized_and_abstain_without_a_truth() -> None:
    assert exact_match(" a \n", "a") == 1.0
    assert exact_match(" a \n", "a", strip=False) == 0.0
    assert exact_match("A", "a") == 0.0
    assert exact_match("a", None) is None
    assert normalized_match("The  cat, sat.", "cat sat") == 1.0
    assert normalized_match("the caten", "cat en") == 0.0
    assert normalized_match("ﬁne", "FINE") == 1.0
    assert normalized_match("a", None) is None


def test_format_matches_the_whole_or_a_part() -> None:
    pattern = "<think>.*</think>\\s*<answer>.*</answer>"
    assert format_match("<think>a\nb</think>\n<answer>1</answer>\n", pattern) == 1.0
    assert format_match("x <think></think><answer></answer>", pattern) == 0.0
    assert format_match("x <think></think><answer></answer>", pattern, whole=False) == 1.0


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0.5), (2, 1.0), (6, 1.0), (7, 0.75), (10, 0.0), (99, 0.0)]
)
def test_length_falls_evenly_outside_its_range(num_tokens, expected) -> None:
    assert length(num_tokens, maximum=6, minimum=2, slope_tokens=4) == expected
    assert length(num_tokens, maximum=6, minimum=2) == float(2 <= num_tokens <= 6)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0.0), (6, 0.0), (7, -0.25), (9, -0.75), (10, -1.0), (12, -1.0)]
)
def test_soft_overlong_is_that_of_dapo(num_tokens, expected) -> None:
    assert soft_overlong(num_tokens, max_tokens=10, buffer_tokens=4) == expected


def test_keywords_are_summed_and_stand_at_the_token_that_ends_them() -> None:
    words = {"wait": 0.5, "so": -1.0}
    assert keywords("Wait, so so... awaiting", words) == 0.5 - 2.0 + 0.5
    assert keywords("Wait, so", words, ignore_case=False) == -1.0
    tokens = ["Wa", "it", "", ", s", "o", " await"]
    assert keyword_tokens(tokens, words) == [0.0, 0.5, 0.0, 0.0, -1.0, 0.5]
    # A letter that is two in lower case shifts nothing.
    assert keyword_tokens(["İ", "so"], words) == [0.0, -1.0]
    assert keyword_tokens([], words) == []


def test_json_is_judged_by_its_schema() -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    assert json_schema('{"a": 1}', schema) == 1.0
    assert json_schema('{"a": "1"}', schema) == 0.0
    assert json_schema('{"a": 1', schema) == 0.0
    assert json_schema("[" * 100_000, schema) == 0.0
    assert json_schema("NaN", {"type": "number"}) == 0.0
    fenced = 'first\n```json\n{}\n```\nthen\n```\n{"a": 2}\n```'
    assert json_schema(fenced, schema, fenced=True) == 1.0
    assert json_schema('{"a": 1}', schema, fenced=True) == 0.0


def test_json_schema_that_points_to_the_network_fetches_nothing() -> None:
    with pytest.raises(Exception, match=r"(?i)unresolvable"):
        json_schema(json.dumps({}), {"$ref": "http://127.0.0.1:9/schema.json"})


def test_language_is_a_share_of_letters() -> None:
    assert language("abc 123 !", "latin") == 1.0
    assert language("да yes", "cyrillic") == 2 / 5
    assert language("漢字かなカナ", "japanese") == 1.0
    assert language("漢字かな", "chinese") == 0.5
    assert language("한국어", "korean") == 1.0
    assert language("123 !", "latin") is None


def test_repetition_counts_the_words_that_were_said_before() -> None:
    # a b, b a, a b: two of three are distinct.
    assert repetition("a b A b", ngram=2) == pytest.approx(-1 / 3)
    assert repetition("x x x x", ngram=1) == -0.75
    assert repetition("a b", ngram=3) == 0.0
    assert repetition("one two three four") == 0.0
