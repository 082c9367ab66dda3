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
