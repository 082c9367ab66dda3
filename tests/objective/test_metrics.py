from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_moments import together

from helpers import tensor
from klamp.objective.metrics import (
    Metric,
    count_of,
    max_of,
    mean_of,
    merge,
    min_of,
    reduced,
    total_of,
)

NAN = float("nan")


def metrics_of(x, mask):
    return {
        "mean": mean_of(x, mask),
        "frac": mean_of(x > 0, mask),
        "count": count_of(mask),
        "total": total_of(torch.where(mask, x, 0.0).sum()),
        "max": max_of(x, mask),
        "min": min_of(x, mask),
    }


def test_each_kind_by_hand():
    x, mask = tensor([1.0, -2.0, 6.0, 99.0]), torch.tensor([[True, True, True, False]])
    assert reduced(metrics_of(x, mask)) == {
        "mean": pytest.approx(5 / 3),
        "frac": pytest.approx(2 / 3),
        "count": 3,
        "total": 5,
        "max": 6,
        "min": -2,
    }


def test_what_is_masked_is_not_seen():
    x = tensor([1.0, NAN, float("inf"), -float("inf")])
    found = reduced(metrics_of(x, torch.tensor([[True, False, False, False]])))
    assert found == {"mean": 1, "frac": 1, "count": 1, "total": 1, "max": 1, "min": 1}


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_nothing_counted_is_zero(shape):
    found = reduced(metrics_of(torch.ones(shape), torch.zeros(shape, dtype=torch.bool)))
    assert set(found.values()) == {0.0}


def test_a_mean_of_means_would_be_wrong():
    a = {"x": mean_of(tensor([1.0]), torch.ones(1, 1, dtype=torch.bool))}
    b = {"x": mean_of(tensor([4.0, 4.0]), torch.ones(1, 2, dtype=torch.bool))}
    assert reduced(merge(a, b)) == {"x": 3.0}  # (1 + 4 + 4) / 3, not (1 + 4) / 2


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(0, 2**20), st.lists(st.integers(0, 7), max_size=3))
def test_any_cut_reduces_to_the_same_numbers(seed, cuts):
    torch.manual_seed(seed)
    x, mask = torch.randn(7, 3) - 2, torch.rand(7, 3) < 0.5
    edges, merged = [0, *sorted(cuts), 7], {}
    for a, b in pairwise(edges):
        merged = merge(merged, metrics_of(x[a:b], mask[a:b]))
    assert reduced(merged) == pytest.approx(reduced(metrics_of(x, mask)), rel=1e-5, abs=1e-6)


def test_workers_reduce_to_the_same_numbers():
    x, mask = torch.randn(5, 3) - 5, torch.rand(5, 3) < 0.5  # all negative: max is not 0
    mask[:2] = torch.tensor([[True, False, True], [False, False, False]])
    cuts = (slice(0, 1), slice(1, 2), slice(2, 5))  # the second worker counts nothing
    found = together(*(lambda w, s=s: reduced(metrics_of(x[s], mask[s]), w) for s in cuts))
    whole = pytest.approx(reduced(metrics_of(x, mask)), rel=1e-5, abs=1e-6)
    assert found[0] == found[1] == found[2]
    assert found[0] == whole


def test_a_name_that_one_part_has_is_kept():
    one = {"a": count_of(torch.ones(2, dtype=torch.bool))}
    two = {"b": count_of(torch.ones(3, dtype=torch.bool))}
    assert reduced(merge(one, two)) == {"a": 2, "b": 3}
    assert reduced({}) == {}


def test_a_metric_is_a_number_and_carries_no_gradient():
    x = tensor([1.0, 3.0]).requires_grad_()
    mask = torch.ones(1, 2, dtype=torch.bool)
    for metric in metrics_of(x, mask).values():
        assert not metric.sum.requires_grad
    assert float(mean_of(x, mask)) == 2.0
    assert float(Metric(torch.tensor(6.0), torch.tensor(4))) == 1.5


def test_a_sum_does_not_lose_the_small_beside_the_large():
    x = tensor([1e8, 1.0, -1e8])  # in float32, 1e8 + 1 is 1e8
    assert float(mean_of(x, torch.ones(1, 3, dtype=torch.bool))) == pytest.approx(1 / 3)


def test_sums_and_maxima_of_a_device_are_packed_there():
    """Also where there is no maximum at all."""
    seen = []

    class Elsewhere:
        def sum(self, x):
            seen.append(x.device.type)
            return torch.zeros(len(x))

        max = sum

    total = torch.zeros((), device="meta")
    numbers = reduced({"a": Metric(total, total), "b": Metric(1.0, 1.0)}, Elsewhere())
    assert seen == ["meta", "meta"]
    assert numbers == {"a": 0.0, "b": 0.0}


def test_a_number_and_a_count_add_up_whatever_the_default_dtype_is():
    torch.set_default_dtype(torch.bfloat16)
    try:
        both = merge({"a": Metric(1.0, 900.0)}, {"a": Metric(torch.tensor(1.0), torch.tensor(23))})
    finally:
        torch.set_default_dtype(torch.float32)
    assert float(both["a"].count) == 923.0
