from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import assert_close
from klamp.objective.moments import (
    Moments,
    centred_moments,
    moments,
    plain,
    segment_moments,
    wide,
)

NAN = float("nan")


class Worker:
    """One of several threads that meet at every sum and every maximum."""

    def __init__(self, rank, slots, barrier):
        self.rank, self.slots, self.barrier = rank, slots, barrier

    def sum(self, x):
        return self._meet(x).sum(dim=0)

    def max(self, x):
        return self._meet(x).amax(dim=0)

    def _meet(self, x):
        self.slots[self.rank] = x
        self.barrier.wait()
        every = torch.stack(self.slots)
        self.barrier.wait()
        return every


def together(*works):
    """What each of several functions of a Workers returns when they run as one step."""
    slots, barrier = [None] * len(works), Barrier(len(works), timeout=20)
    with ThreadPoolExecutor(len(works)) as pool:
        runs = [pool.submit(w, Worker(i, slots, barrier)) for i, w in enumerate(works)]
        return [run.result() for run in runs]


def of(*values):
    x = torch.tensor(values, dtype=torch.float64)
    return plain(moments(x, ~x.isnan()))


def test_moments_by_hand():
    # 1, 2, 6: mean 3, deviations −2, −1, 3, squares 4 + 1 + 9 = 14
    assert of(1.0, 2.0, 6.0) == Moments(count=3, mean=3, m2=14)
    assert of(1.0, 2.0, 6.0).std(ddof=1) == pytest.approx(7**0.5)  # 14 / 2
    assert of(1.0, 2.0, 6.0).std(ddof=0) == pytest.approx((14 / 3) ** 0.5)


def test_what_is_not_valid_is_not_there():
    assert of(1.0, NAN, 2.0, NAN, 6.0) == of(1.0, 2.0, 6.0)


def test_too_few_values_have_no_spread():
    assert of(5.0).std(ddof=1) == 0
    assert of().std(ddof=0) == 0
    assert Moments().std(ddof=1) == 0
    assert of(5.0).std(ddof=0) == 0


floats = st.floats(-1e3, 1e3)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(floats, min_size=1, max_size=20), st.lists(st.integers(0, 20), max_size=3))
def test_merging_any_cut_gives_the_whole(values, cuts):
    whole, merged, start = of(*values), Moments(), 0
    for end in [*sorted(cuts), len(values)]:
        merged = merged.merged(of(*values[start:end]))
        start = max(start, min(end, len(values)))
    assert merged.count == whole.count
    assert merged.mean == pytest.approx(whole.mean, abs=1e-9)
    assert merged.m2 == pytest.approx(whole.m2, abs=1e-6)


def test_merging_nothing_changes_nothing():
    some = of(1.0, 2.0, 6.0)
    assert some.merged(Moments()) == some
    assert Moments().merged(some) == some
    assert Moments().merged(Moments()) == Moments()


def test_a_large_mean_does_not_swallow_the_spread():
    """Raw squares of 1e8 ± 1 are 1e16 ± 2e8: float64 has no digits left for a variance of 1."""
    values = [1e8 - 1, 1e8, 1e8 + 1]
    assert of(*values).std() == pytest.approx(1.0, rel=1e-9)
    merged = of(*values[:1]).merged(of(*values[1:]))
    assert merged.std() == pytest.approx(1.0, rel=1e-9)


def test_scores_of_1e30_have_finite_moments():
    m = of(1e30, -1e30)
    assert m.mean == 0
    assert m.std() == pytest.approx(2**0.5 * 1e30)


def test_merging_values_whose_square_overflows_is_no_crash():
    merged = of(1e200).merged(of(-1e200))
    assert merged.count == 2
    assert merged.mean == 0


def test_segments_are_independent_and_may_be_empty():
    x = torch.tensor([1.0, 10.0, 3.0, NAN, 30.0])
    segment = torch.tensor([0, 2, 0, 2, 2])
    m = segment_moments(x, ~x.isnan(), segment, 3)
    assert m.each() == [Moments(2, 2, 2), Moments(0, 0, 0), Moments(2, 20, 200)]
    assert_close(m.std(), torch.tensor([2**0.5, 0.0, 200**0.5], dtype=torch.float64))


def test_each_value_less_the_mean_of_its_segment():
    x = torch.tensor([1.0, 10.0, 3.0, NAN, 30.0])
    segment = torch.tensor([0, 2, 0, 2, 2])
    m, centred = centred_moments(x, ~x.isnan(), segment, 3)
    assert m.each() == segment_moments(x, ~x.isnan(), segment, 3).each()
    expected = torch.tensor([-1.0, -10.0, 1.0, NAN, 10.0], dtype=torch.float64)
    assert_close(centred, expected, equal_nan=True)


@pytest.mark.parametrize("junk", [NAN, float("inf"), -1e300])
def test_what_is_not_valid_reaches_no_segment(junk):
    x, segment = torch.randn(9, dtype=torch.float64), torch.arange(9) % 3
    valid = torch.arange(9) != 8  # in the last segment, next to where it is put aside
    found = segment_moments(x.where(valid, junk), valid, segment, 3)
    assert found.each() == segment_moments(x[:8], valid[:8], segment[:8], 3).each()
    none = segment_moments(x[:2] * junk, torch.zeros(2).bool(), segment[:2], 3)
    assert none.each() == [Moments()] * 3


def test_known_sizes_are_what_is_counted_where_all_is_valid():
    x, segment, sizes = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([1, 0, 1]), torch.tensor([1, 2])
    m, _ = centred_moments(x, None, segment, 2, sizes=sizes)
    assert m.each() == [Moments(1, 3, 0), Moments(2, 3, 8)]
    m, _ = centred_moments(x, torch.tensor([True, True, False]), segment, 2, sizes=sizes)
    assert m.each() == [Moments(1, 3, 0), Moments(1, 1, 0)]
    assert centred_moments(x, None, segment, 2)[0].each() == [Moments(1, 3, 0), Moments(2, 3, 8)]


def test_workers_meet_twice():
    """Counts and sums in one message, squares in another, each as long as the segments are many."""

    class Counting:
        shapes = ()

        def sum(self, x):
            self.shapes += (tuple(x.shape),)
            assert not x.isnan().any()
            return x

        max = sum

    workers, x = Counting(), torch.tensor([1.0, NAN, 3.0])
    segment_moments(x, ~x.isnan(), torch.tensor([0, 1, 3]), 4, workers)
    assert workers.shapes == ((2, 4), (4,))


def test_equal_values_are_flat_whatever_rounding_makes_of_their_mean():
    x = torch.tensor([0.1] * 7 + [1e8] * 7 + [1.0, 1.0 + 1e-6], dtype=torch.float64)
    segment = torch.tensor([0] * 7 + [1] * 7 + [2] * 2)
    flat = segment_moments(x, torch.ones(16, dtype=torch.bool), segment, 4).flat()
    assert flat.tolist() == [True, True, False, True]


def test_two_workers_see_what_one_would():
    x = 1e6 + torch.randn(9, dtype=torch.float64)
    valid, segment = torch.arange(9) != 4, torch.arange(9) % 3
    a, b = slice(0, 7), slice(7, 9)  # uneven

    def on(rows):
        return lambda w: (
            plain(moments(x[rows], valid[rows], w)),
            segment_moments(x[rows], valid[rows], segment[rows], 3, w).each(),
        )

    first, second = together(on(a), on(b))
    whole = plain(moments(x, valid))
    by_segment = segment_moments(x, valid, segment, 3).each()
    assert first == second
    for got, wanted in zip([first[0], *first[1]], [whole, *by_segment], strict=True):
        assert (got.count, got.mean) == pytest.approx((wanted.count, wanted.mean), rel=1e-12)
        assert got.m2 == pytest.approx(wanted.m2, rel=1e-9)


def test_statistics_are_float64_and_carry_no_gradient():
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    assert wide(x).dtype == torch.float64
    assert not wide(x).requires_grad
    assert moments(x, torch.ones(2, dtype=torch.bool)).mean.dtype == torch.float64
