"""Losses in value and in gradient, against numbers worked out by hand.

Every loss against the plain loops of its paper, through a model: test_invariance.py.
"""

import math

import pytest

from made_inputs import inputs_of, solved, tensor
from stages.update.config import LOSSES as NAMES
from stages.update.losses import LOSSES, value_loss


def test_losses_that_a_configuration_may_name_are_those_there_are():
    assert tuple(LOSSES) == NAMES


def test_clip_stops_the_gradient_only_where_clipping_lowers_the_objective():
    inputs = inputs_of([1.5, 0.5, 1.5, 0.5], [1, 1, -1, -1])
    loss, gradient, metrics = solved(inputs, clip_low=0.2, clip_high=0.3)
    assert loss == pytest.approx([-1.3, -0.5, 1.5, 0.8])
    assert gradient == pytest.approx([0, -0.5, 1.5, 0])
    assert metrics["clipped_share"].tolist() == [True, False, False, True]


def test_clip_with_a_dual_bound_stops_what_a_negative_advantage_costs():
    inputs = inputs_of([5, 2, 5], [-2, -2, 2])
    loss, gradient, metrics = solved(inputs, clip_dual=3, clip_high=0.2)
    # 3 x 2 where the ratio of 5 would cost 10; a positive advantage has no such bound.
    assert loss == pytest.approx([6, 4, -2.4])
    assert gradient == pytest.approx([0, 4, 0])
    assert metrics["clipped_share"].tolist() == [True, False, True]


def test_gspo_weighs_all_tokens_of_a_sequence_by_its_one_ratio():
    # Sequences (2, 0.5) and (4): their ratios are 1 and 4, and the second is clipped.
    inputs = inputs_of([2, 0.5, 4], [1, 1, 1], sequences=[0, 0, 1])
    loss, gradient, _ = solved(inputs, loss="gspo", clip_low=0.1, clip_high=0.1)
    assert loss == pytest.approx([-1, -1, -1.1])
    assert gradient == pytest.approx([-1, -1, 0])


def test_gspo_with_advantages_a_token_gives_each_token_its_own():
    inputs = inputs_of([2, 0.5], [3, 1])
    loss, gradient, _ = solved(inputs, loss="gspo")
    assert loss == pytest.approx([-3, -1])
    assert gradient == pytest.approx([-3, -1])


def test_gspo_leaves_out_of_its_ratio_what_the_policy_did_not_choose():
    inputs = inputs_of([2, 9, 0.5], [1, 0, 1], mask=[1, 0, 1])
    loss, gradient, _ = solved(inputs, loss="gspo")
    assert [loss[0], loss[2]] == pytest.approx([-1, -1])
    assert gradient == pytest.approx([-1, 0, -1])


def test_gmpo_takes_the_geometric_mean_of_clipped_ratios():
    # min(4, e^0.4) and 1 give e^0.2; with A < 0 the floor e^-0.4 holds and the ceiling does not.
    bounds = {"clip_low": 1 - math.exp(-0.4), "clip_high": math.exp(0.4) - 1}
    inputs = inputs_of([4, 1, 4, 0.1], [2, 2, -1, -1], sequences=[0, 0, 1, 1])
    loss, gradient, metrics = solved(inputs, loss="gmpo", **bounds)
    mean = math.sqrt(4 * math.exp(-0.4))
    assert loss == pytest.approx([-2 * math.exp(0.2)] * 2 + [mean] * 2)
    # Of the loss of one sequence a token's share is A G / 2; both tokens carry it.
    assert gradient == pytest.approx([0, -2 * math.exp(0.2), mean, 0])
    assert metrics["clipped_share"].tolist() == [True, False, False, True]


def test_gmpo_without_a_lower_bound_lets_any_ratio_fall():
    inputs = inputs_of([1e-3], [-1])
    assert solved(inputs, loss="gmpo", clip_low=1)[0] == pytest.approx([1e-3])


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    inputs = inputs_of([3, 0.5, 1], [1, -1, 2])
    loss, gradient, metrics = solved(inputs, loss="cispo", clip_low=1, clip_high=1)
    logprobs = inputs.logprobs_N.tolist()
    assert gradient == pytest.approx([-2, 0.5, -2])
    assert loss == pytest.approx([-2 * logprobs[0], 0.5 * logprobs[1], -2 * logprobs[2]])
    assert metrics["clipped_share"].tolist() == [True, False, False]


def test_sapo_on_policy_has_the_gradient_of_ppo_and_falls_off_on_either_side():
    inputs = inputs_of([1, 3, 1, 3], [2, 2, -2, -2])
    loss, gradient, metrics = solved(inputs, loss="sapo", sapo_tau_pos=1.0, sapo_tau_neg=2.0)
    p, q = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-4))
    assert loss == pytest.approx([-4, -8 * p, 2, 4 * q])
    gates = [1, 4 * p * (1 - p), 1, 4 * q * (1 - q)]
    assert gradient == pytest.approx([-2, -2 * 3 * gates[1], 2, 2 * 3 * gates[3]])
    assert metrics["gate"].tolist() == pytest.approx(gates)


def test_reinforce_has_no_ratio():
    loss, gradient, _ = solved(inputs_of([1, 7], [2, -3]), loss="reinforce")
    assert gradient == pytest.approx([-2, 3])
    assert loss == pytest.approx([2 * 1, 3 * (math.log(7) - 1)])


def test_value_loss_takes_the_worse_of_free_and_clipped():
    values, returns = tensor([2.0, 0.1, 1.0]).requires_grad_(), tensor([3.0, 1.0, 0.0])
    loss, was_clipped = value_loss(values, tensor([0.0, 0.0, 1.0]), returns, 0.5)
    # Moved 2 towards a return of 3, of which 0.5 counts: (0.5 - 3)² / 2.
    assert loss.tolist() == pytest.approx([3.125, 0.405, 0.5])
    assert was_clipped.tolist() == [True, False, False]
    loss.sum().backward()
    assert values.grad.tolist() == pytest.approx([0, -0.9, 1])


def test_loss_by_import_path_is_the_users_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from stages.update.loss_inputs import TokenLoss\n"
        "def twice(inputs, config):\n"
        "    return TokenLoss(-2 * inputs.advantages_N * inputs.logprobs_N)\n"
    )
    _, gradient, _ = solved(inputs_of([1, 7], [2, -3]), loss=f"{path}:twice")
    assert gradient == pytest.approx([-4, 6])
