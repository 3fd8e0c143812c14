"""Weights old / sampler, by hand."""

import math

import pytest

from made_inputs import inputs_of, tensor
from stages.update.config import UpdateConfig
from stages.update.correction import correction_weights


def weights(log_weights, sequences, mask=None, **config):
    old = tensor([-1.0] * len(log_weights))
    inputs = inputs_of(
        [1.0] * len(log_weights),
        [1.0] * len(log_weights),
        sequences,
        mask,
        sampler_N=old - tensor(log_weights),
    )
    found, was_bounded = correction_weights(inputs, UpdateConfig(**config))
    assert not found.requires_grad
    return found.tolist(), was_bounded.tolist()


LOGS = [math.log(3), math.log(0.5), math.log(0.1)]


def test_tis_caps_single_tokens():
    found = weights(LOGS, [0, 0, 1], correction="tis", correction_cap=2.0)
    assert found == (pytest.approx([2, 0.5, 0.1]), [True, False, False])


def test_tis_of_sequences_caps_their_products():
    found = weights(
        LOGS, [0, 0, 1], correction="tis", correction_level="sequence", correction_cap=1.2
    )
    assert found == (pytest.approx([1.2, 1.2, 0.1]), [True, True, False])


def test_mis_masks_single_tokens_beyond_either_bound():
    found = weights(LOGS, [0, 0, 1], correction="mis", correction_cap=2, correction_floor=0.2)
    assert found == (pytest.approx([0, 0.5, 0]), [True, False, True])


def test_mis_of_sequences_masks_whole_ones():
    found = weights(
        LOGS,
        [0, 0, 1],
        correction="mis",
        correction_level="sequence",
        correction_cap=2,
        correction_floor=0.2,
    )
    assert found == (pytest.approx([1.5, 1.5, 0]), [False, False, True])


def test_weight_of_a_sequence_leaves_out_what_the_policy_did_not_choose():
    found, _ = weights(
        LOGS, [0, 0, 0], mask=[1, 1, 0], correction="tis", correction_level="sequence"
    )
    assert found[:2] == pytest.approx([1.5, 1.5])


@pytest.mark.parametrize("correction", ["tis", "mis"])
def test_weight_too_large_for_a_number_is_bounded_all_the_same(correction):
    found, _ = weights([600.0, 600.0], [0, 0], correction=correction, correction_level="sequence")
    assert found == [2.0, 2.0] if correction == "tis" else [0.0, 0.0]
    assert all(map(math.isfinite, found))


def test_no_correction_weighs_all_the_same():
    assert weights(LOGS, [0, 0, 1]) == ([1, 1, 1], [False, False, False])
