from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_moments import together

from helpers import assert_close, tensor
from klamp.objective.reduce import REDUCTIONS, shares, weighted_sum

NAN, INF = float("nan"), float("inf")
LOSS = tensor([1.0, 1.0, 1.0, 1.0], [5.0, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0])
MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()  # the last is no sequence

each_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


def share(mask, reduction, *args, weights=None):
    constant = 10.0 if reduction == "constant_mean" else None
    return shares(mask, weights, *args, reduction=reduction, constant=constant)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", 9 / 5),  # (4·1 + 5) / 5 tokens
        ("sequence_mean", 3.0),  # (1 + 5) / 2 sequences
        ("sequence_sum", 4.5),  # (4 + 5) / 2
        ("constant_mean", 0.45),  # (4 + 5) / (10 · 2)
    ],
)
def test_the_four_reductions_by_hand(reduction, expected):
    assert_close(weighted_sum(LOSS, share(MASK, reduction)), torch.tensor(expected))


@each_reduction
def test_a_weight_is_a_factor_of_the_rows_share(reduction):
    weights = torch.tensor([0.5, 3.0, 7.0], dtype=torch.float64)
    plain = share(MASK, reduction)
    assert_close(share(MASK, reduction, weights=weights), plain * tensor([0.5], [3.0], [7.0]))


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_shares_of_a_mean_add_up_to_one(reduction):
    assert_close(share(MASK, reduction).sum(), torch.tensor(1.0))


@each_reduction
def test_a_sequence_without_tokens_is_not_a_sequence(reduction):
    found = share(MASK, reduction)
    assert_close(found[:2], share(MASK[:2], reduction))
    assert (found[2] == 0).all()


@each_reduction
def test_a_row_of_weight_zero_keeps_its_place_in_the_average(reduction):
    found = share(MASK, reduction, weights=torch.tensor([1.0, 0.0, 1.0]))
    assert_close(found[0], share(MASK, reduction)[0])
    assert (found[1] == 0).all()


@each_reduction
@pytest.mark.parametrize("junk", [1e9, 1e30, INF, -INF, NAN])
def test_padding_reaches_neither_loss_nor_gradient(reduction, junk):
    x = torch.where(MASK, LOSS, junk).requires_grad_()
    loss = weighted_sum(x, share(MASK, reduction))
    assert_close(loss.detach(), weighted_sum(LOSS, share(MASK, reduction)))
    assert_close(torch.autograd.grad(loss, x)[0], share(MASK, reduction))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**20),
    st.sampled_from(list(REDUCTIONS)),
    st.lists(st.integers(1, 5), max_size=3),
)
def test_parts_add_up_to_the_whole(seed, reduction, cuts):
    torch.manual_seed(seed)
    x, mask, weights = torch.randn(5, 4), torch.rand(5, 4) < 0.5, torch.rand(5)
    found = share(mask, reduction, weights=weights)
    edges = [0, *sorted(cuts), 5]
    parts = sum(weighted_sum(x[a:b], found[a:b]) for a, b in pairwise(edges))
    assert_close(parts, weighted_sum(x, found))


@each_reduction
def test_two_workers_share_as_one_would(reduction):
    parts = together(
        lambda w: share(MASK[:1], reduction, w), lambda w: share(MASK[1:], reduction, w)
    )
    assert_close(torch.cat(parts), share(MASK, reduction))


@each_reduction
def test_the_width_of_the_padding_does_not_matter(reduction):
    wide = torch.cat([MASK, torch.zeros(3, 5, dtype=torch.bool)], dim=1)
    assert_close(share(wide, reduction)[:, :4], share(MASK, reduction))


@each_reduction
def test_an_empty_step_has_zero_shares_and_a_zero_loss_with_its_graph(reduction):
    found = share(MASK & False, reduction)
    assert (found == 0).all()
    x = torch.full((3, 4), NAN, requires_grad=True)
    loss = weighted_sum(x, found)
    loss.backward()
    assert loss.item() == 0
    assert (x.grad == 0).all()
