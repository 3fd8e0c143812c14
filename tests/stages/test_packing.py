"""Packing shares samples out and loses none, whatever the budget and the ranks."""

from hypothesis import given
from hypothesis import strategies as st

from stages.packing import plan_microbatches

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@given(LENGTHS, st.integers(1, 100), st.integers(1, 4))
def test_plan_holds_every_sample_once_within_the_budget_on_equal_rounds(lengths, budget, ranks):
    plan = plan_microbatches(lengths, budget, ranks)
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    placed = sorted(i for rank in plan for microbatch in rank for i in microbatch)
    assert placed == list(range(len(lengths)))
    for rank in plan:
        for microbatch in rank:
            total = sum(lengths[i] for i in microbatch)
            assert total <= budget or len(microbatch) == 1


def test_plan_of_even_samples_is_even():
    plan = plan_microbatches([10] * 16, 40, 2)
    assert [[len(m) for m in rank] for rank in plan] == [[4, 4], [4, 4]]


def test_plan_of_samples_beyond_the_budget_gives_each_a_micro_batch_and_none_to_nobody():
    plan = plan_microbatches([50, 60, 70], 10, 2)
    assert sorted(len(m) for rank in plan for m in rank) == [0, 1, 1, 1]
