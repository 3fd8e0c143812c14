"""Keep rules choose the versions that their words say."""

import math

import pytest

from artifacts.keep_rules import RuleError, parse_rule

# Reward, and a loss that one version has not.
VERSIONS = {
    v: {"reward/mean": reward, "update/loss": 1.0 / v if v != 9 else None}
    for v, reward in {1: 0.1, 2: 0.9, 4: 0.5, 6: 0.9, 9: math.nan, 12: 0.2}.items()
}


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("all", {1, 2, 4, 6, 9, 12}),
        ("last=1", {12}),
        ("last=2", {9, 12}),
        ("last=99", {1, 2, 4, 6, 9, 12}),
        ("every=1", {1, 2, 4, 6, 9, 12}),
        ("every=4", {4, 12}),
        ("every=5", set()),
        ("version=4", {4}),
        ("best=reward/mean", {6}),  # of two equal ones, the later
        ("best=reward/mean:3", {2, 6, 4}),
        ("best=reward/mean:99", {1, 2, 4, 6, 12}),  # a NaN is no value
        ("best=update/loss:2", {1, 2}),
    ],
)
def test_keep_rule_over_known_versions_chooses_these(text, chosen):
    assert parse_rule(text).choose(VERSIONS) == chosen


@pytest.mark.parametrize("text", ["last=2", "every=1", "all"])
def test_keep_rule_over_no_versions_chooses_none(text):
    assert parse_rule(text).choose({}) == set()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("newest=3", "'newest=3' is no rule: say last=N, every=K"),
        ("last", "'' where a number from 1 on is due"),
        ("last=0", "'0' where a number"),
        ("every=-2", "'-2' where a number"),
        ("version=two", "'two' where a number"),
        ("last=²", "'²' where a number"),
        ("best=reward/mean:0", "'0' where a number"),
        ("best=", "is no rule"),
    ],
)
def test_keep_rule_that_says_nothing_is_refused_in_a_sentence(text, words):
    with pytest.raises(RuleError) as refused:
        parse_rule(text)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("version=3", "no such policy is within reach; there are 1, 2, 4, 6, 9, 12"),
        ("best=reward", "no such metric; there are reward/mean, update/loss"),
    ],
)
def test_keep_rule_that_asks_for_what_there_is_not_names_what_there_is(text, words):
    with pytest.raises(RuleError) as refused:
        parse_rule(text).choose(VERSIONS)
    assert words in str(refused.value)
