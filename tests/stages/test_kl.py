"""KL estimators by what they give in expectation, over all actions of a policy of three."""

from itertools import pairwise

import pytest
import torch

from stages.update.config import UpdateConfig
from stages.update.kl import k1, k2, k3, k3_weighted
from stages.update.loss_inputs import LossInputs, TokenLoss
from stages.update.microbatch import MicroBatch, microbatch_loss
from stages.update.step_sums import StepSums

F64 = torch.float64
POLICY = torch.tensor([0.5, 0.3, 0.2], dtype=F64)
REFERENCE = torch.tensor([0.2, 0.5, 0.3], dtype=F64)
OLD = torch.tensor([0.4, 0.4, 0.2], dtype=F64)
EXACT_KL = 0.223805
EXACT_GRADIENT = [0.346243, -0.220389, -0.125854]


def expected(estimator, sampled_by, *more):
    """(value, gradient on the policy's logits) of an estimate, over all actions."""
    logits = POLICY.log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    value = (sampled_by * estimator(logprobs, REFERENCE.log(), *more)).sum()
    value.backward()
    return value.item(), logits.grad.tolist()


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        (k1, EXACT_KL, [0, 0, 0]),
        (k2, 0.265479, EXACT_GRADIENT),
        (k3, EXACT_KL, [0.3, -0.2, -0.1]),
    ],
)
def test_estimator_on_policy_has_the_documented_value_and_gradient(estimator, value, gradient):
    got, got_gradient = expected(estimator, POLICY)
    assert got == pytest.approx(value, abs=1e-6)
    assert got_gradient == pytest.approx(gradient, abs=1e-6)


def test_k3_weighted_on_samples_of_another_policy_has_the_exact_value_and_gradient():
    value, gradient = expected(k3_weighted, OLD, OLD.log())
    assert value == pytest.approx(EXACT_KL, abs=1e-6)
    assert gradient == pytest.approx(EXACT_GRADIENT, abs=1e-6)
    # Without the weight both are off.
    assert expected(k3, OLD)[0] != pytest.approx(EXACT_KL, abs=0.01)


@pytest.mark.parametrize(("estimator", "value"), [(k1, 1), (k2, 0.5), (k3, 0.3678794)])
def test_estimator_of_one_token_has_the_ratio_the_right_way_up(estimator, value):
    got = estimator(torch.tensor([-1.0], dtype=F64), torch.tensor([-2.0], dtype=F64))
    assert got.item() == pytest.approx(value, abs=1e-6)


def test_k3_of_policies_all_but_equal_does_not_drown_in_rounding():
    # q²/2 of 1e-3, in float32, where exp(q) - q - 1 is off by a tenth.
    got = k3(torch.tensor([-1.0]), torch.tensor([-1.001]))
    q = (torch.tensor([-1.001]) - torch.tensor([-1.0])).double()
    assert got.item() == pytest.approx((torch.expm1(q) - q).item(), rel=1e-3)


def step(logits, config):
    """The loss of a micro-batch with every action once, as the trainer takes it, weighed by the
    policy's own probabilities."""
    logprobs = logits.log_softmax(-1)
    zeros, ones = torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64)
    weights = logprobs.detach().exp()
    sequence = torch.arange(3)
    batch = MicroBatch(None, weights, ones, zeros, zeros, None, None, sequence, 3)
    now = logprobs.detach()
    inputs = LossInputs(logprobs, zeros, now, now, REFERENCE.log(), zeros, ones, sequence, 3)

    def free(inputs, config):
        return TokenLoss(torch.zeros_like(inputs.logprobs_N))

    return microbatch_loss(free, batch, inputs, config, StepSums(torch.device("cpu")))


def test_kl_raises_the_minimised_loss_by_coefficient_times_estimate():
    config = UpdateConfig(kl_coef=0.1, kl_estimator="k3")
    logprobs = torch.tensor([-1.0], dtype=F64)
    one = torch.ones(1, dtype=F64)
    sequence = torch.zeros(1, dtype=torch.long)
    inputs = LossInputs(logprobs, 0 * one, logprobs, logprobs, -2 * one, 0 * one, one, sequence, 1)
    batch = MicroBatch(None, one, one, 0 * one, logprobs, None, None, sequence, 1)
    loss = microbatch_loss(
        lambda inputs, config: TokenLoss(0 * inputs.logprobs_N),
        batch,
        inputs,
        config,
        StepSums(torch.device("cpu")),
    )
    assert loss.item() == pytest.approx(0.0367879, abs=1e-7)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_weighted"])
def test_steps_on_the_kl_alone_bring_the_policy_to_the_reference(estimator):
    config = UpdateConfig(kl_coef=1.0, kl_estimator=estimator)
    logits = POLICY.log().requires_grad_()
    distances = []
    for _ in range(200):
        with torch.no_grad():
            gaps = logits.log_softmax(-1) - REFERENCE.log()
            distances.append((logits.softmax(-1) * gaps).sum().item())
        (gradient,) = torch.autograd.grad(step(logits, config), logits)
        logits = (logits - 0.3 * gradient).detach().requires_grad_()
    falls = [b < a for a, b in pairwise(distances)]
    assert all(falls[:20])
    assert distances[-1] < 1e-3
