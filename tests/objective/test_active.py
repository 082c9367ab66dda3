import pytest
import torch

from helpers import assert_close, prefix_mask, tensor
from klamp.objective.active import later, layout, place_on_last

HOLES = torch.tensor([[0, 1, 0, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]).bool()
MASKS = {
    "holes": HOLES,
    "in front": prefix_mask([3, 0, 5], 5),
    "full": torch.ones(2, 4, dtype=torch.bool),
    "empty": torch.zeros(2, 4, dtype=torch.bool),
    "one column": torch.tensor([[True], [False]]),
    "no column": torch.zeros(2, 0, dtype=torch.bool),
    "no row": torch.zeros(0, 3, dtype=torch.bool),
}
each_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def test_compacting_by_hand():
    x = torch.arange(20.0).view(4, 5)
    expected = tensor([1, 3, 4, 0, 0], [5, 6, 0, 0, 0], [0] * 5, [19, 0, 0, 0, 0])
    assert_close(layout(HOLES).compact(x), expected)


@each_mask
def test_expanding_undoes_compacting(mask):
    x = torch.randn(mask.shape)
    active = layout(mask)
    compact = active.compact(x)
    ranks = prefix_mask(mask.sum(dim=1).tolist(), mask.shape[1])
    assert torch.equal(compact != 0, ranks)
    assert_close(active.expand(compact), torch.where(mask, x, 0.0))


@pytest.mark.parametrize("width", [1, 2, 13, 14, 15, 16, 61, 62, 63, 64, 300])
def test_a_full_row_beside_one_with_holes(width):
    """The last token of the widest row has its place, and one ahead of it, at every width."""
    x, mask = torch.randn(3, width), torch.ones(3, width, dtype=torch.bool)
    mask[1] = torch.arange(width) % 2 == 1
    mask[2, : width // 2] = False
    active = layout(mask)
    assert_close(active.expand(active.compact(x)), torch.where(mask, x, 0.0))
    if active.column is not None:
        out = torch.empty(3, width)
        after = active.spread(active.packed(active.zeroed(x)), out, ahead=1)
        assert_close(after[0], torch.cat([x[0, 1:], torch.zeros(1)]))
        assert_close(active.compact(after)[1, : width // 2], active.compact(x)[1, 1:][: width // 2])


def test_packing_by_hand():
    x = torch.arange(20.0).view(4, 5)
    active = layout(HOLES)
    packed = active.packed(active.zeroed(x)).clone()
    expected = tensor([0, 1, 3, 4, 0, 0], [0, 5, 6, 0, 0, 0], [0] * 6, [0, 19, 0, 0, 0, 0])
    assert_close(packed[:, :6], expected)
    assert (packed[:, 6:] == 0).all()
    own, after = (active.spread(packed, torch.empty(4, 5), ahead=k) for k in (0, 1))
    assert own[HOLES].tolist() == [1, 3, 4, 5, 6, 19]
    assert after[HOLES].tolist() == [3, 4, 0, 6, 0, 0]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mask", [HOLES[0], torch.tensor([1, 1, 0, 0, 0]).bool()])
def test_what_was_compacted_stays(mask, rows):
    """A layout works in memory of its own, and hands out none of it."""
    active, x = layout(mask.expand(rows, 5)), torch.randn(rows, 5)
    first = active.compact(x)
    kept = first.clone()
    active.compact(x + 1)
    assert torch.equal(first, kept)


@each_mask
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_zeroing_holds_for_every_float_and_any_memory_layout(mask, dtype):
    x = torch.where(mask, torch.randn(mask.shape), float("nan")).to(dtype)
    expected = torch.where(mask, x, torch.zeros((), dtype=dtype))
    for given in (x, x.t().contiguous().t(), x.repeat_interleave(2, dim=1)[:, ::2]):
        assert torch.equal(layout(mask).zeroed(given), expected)
        assert torch.equal(layout(mask).zeroed(given, out=torch.empty_like(x)), expected)
    strided = mask.repeat_interleave(2, dim=1)[:, ::2]
    assert torch.equal(layout(strided).zeroed(x), expected)


@each_mask
def test_a_layout_knows_when_nothing_has_to_move(mask):
    active = layout(mask)
    in_front = torch.equal(mask, prefix_mask(mask.sum(1).tolist(), mask.shape[1]))
    assert (active.column is None) == in_front
    assert active.full == bool(mask.all())


@each_mask
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e30])
def test_what_is_masked_is_left_behind(mask, junk):
    x = torch.randn(mask.shape)
    dirty = torch.where(mask, x, junk)
    assert_close(layout(mask).compact(dirty), layout(mask).compact(x))
    assert_close(later(dirty, mask), later(x, mask))


def test_the_sum_of_what_is_still_to_come_by_hand():
    x = tensor([9, 1, 9, 2, 4], [1, 2, 9, 9, 9], [9] * 5, [9, 9, 9, 9, 5])
    found = torch.where(HOLES, later(x, HOLES), 0.0)
    assert_close(found, tensor([0, 6, 0, 4, 0], [2, 0, 0, 0, 0], [0] * 5, [0] * 5))


def test_what_is_to_come_does_not_see_the_token_itself():
    """Adding a huge own value and taking it off again would leave nothing of the others."""
    x = tensor([1e12, 0.5, 0.25], [0.5, 1e12, 0.25])
    found = later(x, torch.ones(2, 3, dtype=torch.bool))
    assert_close(found, tensor([0.75, 0.25, 0.0], [1e12, 0.25, 0.0]))


def test_a_score_lands_on_the_last_active_token():
    found = place_on_last(torch.tensor([2.0, 3.0, 4.0, 5.0]), HOLES)
    assert_close(found, tensor([0, 0, 0, 0, 2], [0, 3, 0, 0, 0], [0] * 5, [0, 0, 0, 0, 5]))


@each_mask
def test_every_row_with_a_token_gets_its_score_once(mask):
    scores = torch.rand(len(mask)) + 1
    found = place_on_last(scores, mask)
    assert_close(found.sum(dim=1), torch.where(mask.any(dim=1), scores, 0.0))
    assert (found[~mask] == 0).all()
