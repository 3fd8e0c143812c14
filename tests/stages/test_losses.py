"""Losses in value and in gradient, against numbers worked out by enumeration."""

import torch

from stages.update.losses import clipped_surrogate, k3

F64 = torch.float64


def test_k3_of_one_token_has_the_ratio_the_right_way_up():
    value = k3(torch.tensor([-1.0], dtype=F64), torch.tensor([-2.0], dtype=F64))
    torch.testing.assert_close(value, torch.tensor([0.3678794], dtype=F64), atol=1e-6, rtol=0)


def test_k3_over_all_actions_has_the_exact_kl_and_the_documented_gradient():
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=F64)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=F64).log()
    logits = policy.log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    expected = (policy * k3(logprobs, reference)).sum()
    torch.testing.assert_close(
        expected.detach(), torch.tensor(0.223805, dtype=F64), atol=1e-6, rtol=0
    )
    expected.backward()
    gradient = torch.tensor([0.3, -0.2, -0.1], dtype=F64)
    torch.testing.assert_close(logits.grad, gradient, atol=1e-6, rtol=0)


def test_clipped_surrogate_stops_the_gradient_only_where_clipping_lowers_the_objective():
    old = torch.zeros(4, dtype=F64)
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5], dtype=F64)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=F64)
    logprobs = ratio.log().requires_grad_()
    loss, clipped = clipped_surrogate(logprobs, old, advantages, 0.2, 0.3)
    torch.testing.assert_close(loss.detach(), torch.tensor([-1.3, -0.5, 1.5, 0.8], dtype=F64))
    assert clipped.tolist() == [True, False, False, True]
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -0.5, 1.5, 0.0], dtype=F64))
