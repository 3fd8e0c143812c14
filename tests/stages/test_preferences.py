"""Preference pairs and the losses that compare their members, by hand."""

import math

import numpy as np
import pytest

from made_inputs import inputs_of, solved, tensor
from stages.update.preferences import preference_pairs

IDS = ["a0", "a1", "a2", "b0", "b1", "c0", "c1", "c2"]
GROUPS = ["a", "a", "a", "b", "b", "c", "c", "c"]
REWARDS = np.array([0, 2, 1, 5, 5, 1, 0, 0], dtype=float)


def test_pairs_are_the_best_and_worst_of_groups_with_any_spread():
    assert preference_pairs(IDS, GROUPS, REWARDS, range(8)) == [(1, 0), (5, 6)]


def test_pairs_of_any_order_of_samples_are_the_same():
    order = [7, 2, 6, 4, 1, 5, 3, 0]
    found = preference_pairs(
        [IDS[i] for i in order], [GROUPS[i] for i in order], REWARDS[order], range(8)
    )
    assert [(order[a], order[b]) for a, b in found] == [(1, 0), (5, 6)]


def test_pairs_are_made_of_candidates_alone():
    assert preference_pairs(IDS, GROUPS, REWARDS, [0, 2, 3, 6, 7]) == [(2, 0)]


def pair(moved, **config):
    """A pair whose chosen answer (2 tokens) and rejected one moved so far from the reference."""
    first, second, rejected = moved
    ones = tensor([-1.0, -1.0, -1.0])
    reference = ones - tensor([first, second, rejected])
    inputs = inputs_of([1, 1, 1], [0, 0, 0], [0, 0, 1], reference_N=reference)
    return solved(inputs, **config)


def test_dpo_gives_each_token_its_pairs_loss_and_pushes_members_apart():
    loss, gradient, metrics = pair([0.5, 1.0, -0.5], loss="dpo", dpo_beta=0.5)
    # h = 1.5 + 0.5; three tokens carry it, so their sum is three times its gradient.
    cost = math.log(1 + math.exp(-1.0))
    pull = 0.5 / (1 + math.exp(1.0))
    assert loss == pytest.approx([cost] * 3)
    assert gradient == pytest.approx([-3 * pull, -3 * pull, 3 * pull])
    assert metrics["preference_margin"].tolist() == pytest.approx([1.0] * 3)
    assert metrics["preference_accuracy"].tolist() == [1, 1, 1]


def test_dpo_at_the_reference_costs_the_log_of_two():
    assert pair([0, 0, 0], loss="dpo")[0] == pytest.approx([math.log(2)] * 3)


def test_dpo_with_smoothing_stops_where_the_labels_are_as_sure():
    # log-odds of 0.8 against 0.2.
    moved = [math.log(4), 0, 0]
    _, gradient, _ = pair(moved, loss="dpo", dpo_beta=1.0, dpo_label_smoothing=0.2)
    assert gradient == pytest.approx([0, 0, 0], abs=1e-12)


def test_ipo_stops_at_its_margin():
    loss, gradient, _ = pair([1.0, 1.0, -3.0], loss="ipo", dpo_beta=0.1)
    assert loss == pytest.approx([0, 0, 0], abs=1e-12)
    assert gradient == pytest.approx([0, 0, 0], abs=1e-12)
    assert pair([0, 0, 0], loss="ipo", dpo_beta=0.1)[0] == pytest.approx([25.0] * 3)


def test_dpo_without_a_reference_is_refused():
    inputs = inputs_of([1, 1], [0, 0], [0, 1])
    with pytest.raises(ValueError, match="reference"):
        solved(inputs, loss="dpo")
