"""Which rows an iteration takes: a pure function, so a resumed run loses and repeats none."""

from stages.rollout.prompts import select
from stages.rollout.run import sample_seed


def test_select_over_two_epochs_takes_each_row_once_an_epoch():
    whole = select(6, seed=5, start=0, count=12, shuffle=True)
    for epoch in (0, 1):
        assert sorted(s.row for s in whole if s.epoch == epoch) == list(range(6))
    assert [s.row for s in whole[:6]] != [s.row for s in whole[6:]]


def test_select_from_the_exact_end_of_an_epoch_goes_on_with_the_next():
    whole = select(6, seed=5, start=0, count=12, shuffle=True)
    pieces = [s for start in range(0, 12, 2) for s in select(6, 5, start, 2, True)]
    assert pieces == whole
    assert select(6, 5, 6, 2, True)[0].epoch == 1


def test_select_of_more_than_the_data_goes_round():
    chosen = select(3, seed=0, start=2, count=5, shuffle=False)
    assert [(s.epoch, s.row) for s in chosen] == [(0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_sample_seed_differs_for_every_sample():
    seeds = {sample_seed(s, p, k) for s in range(3) for p in range(20) for k in range(8)}
    assert len(seeds) == 480
    assert all(0 <= seed < 2**62 for seed in seeds)
