"""Which rows an iteration takes: a pure function, so a resumed run loses and repeats none."""

from collections import Counter

import pytest

from stages.rollout.run import sample_seed
from stages.rollout.selection import select


def one(num_rows, seed=5, start=0, count=12, shuffle=True):
    """Of a single source."""
    return select([num_rows], [1.0], seed, [start], count, shuffle)


def test_select_over_two_epochs_takes_each_row_once_an_epoch():
    whole = one(6).rows
    for epoch in (0, 1):
        assert sorted(s.row for s in whole if s.epoch == epoch) == list(range(6))
    assert [s.row for s in whole[:6]] != [s.row for s in whole[6:]]


def test_select_from_the_exact_end_of_an_epoch_goes_on_with_the_next():
    pieces = [s for start in range(0, 12, 2) for s in one(6, start=start, count=2).rows]
    assert pieces == one(6).rows
    assert one(6, start=6, count=2).rows[0].epoch == 1


def test_select_of_more_than_the_data_goes_round():
    chosen = one(3, seed=0, start=2, count=5, shuffle=False)
    assert [(s.epoch, s.row) for s in chosen.rows] == [(0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert chosen.next_positions == [7]


def test_select_in_pieces_of_any_size_is_what_it_is_in_one():
    num_rows, weights = [5, 3, 7], [1.0, 2.0, 0.5]
    whole = select(num_rows, weights, 9, [0, 0, 0], 60, True)
    start, rows = [0, 0, 0], []
    for count in (1, 7, 0, 20, 32):  # as an iteration that draws more or less than another
        piece = select(num_rows, weights, 9, start, count, True)
        rows += piece.rows
        start = piece.next_positions
    assert rows == whole.rows
    assert start == whole.next_positions
    assert sum(start) == 60


def test_select_of_several_sources_keeps_their_weights_and_each_ones_epochs():
    num_rows, weights = [50, 20], [3.0, 1.0]
    chosen = select(num_rows, weights, 1, [0, 0], 4000, True).rows
    counts = Counter(s.source for s in chosen)
    # Within four standard deviations of 3000, which are those of 4000 draws at 3/4.
    assert abs(counts[0] - 3000) < 4 * (4000 * 0.75 * 0.25) ** 0.5
    for source in (0, 1):
        rows = Counter((s.epoch, s.row) for s in chosen if s.source == source)
        assert set(rows.values()) == {1}
        whole_epochs = counts[source] // num_rows[source]
        for epoch in range(whole_epochs):
            assert sum(e == epoch for e, _ in rows) == num_rows[source]


def test_select_from_a_source_without_rows_is_refused():
    with pytest.raises(ValueError, match="data source 1 has no rows"):
        select([3, 0], [1.0, 1.0], 0, [0, 0], 1, True)


def test_sample_seed_differs_for_every_sample():
    seeds = {sample_seed(s, p, k) for s in range(3) for p in range(20) for k in range(8)}
    assert len(seeds) == 480
    assert all(0 <= seed < 2**62 for seed in seeds)
