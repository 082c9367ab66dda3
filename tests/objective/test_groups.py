from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from test_moments import together

from helpers import assert_close, make_batch, prefix_mask, tensor
from klamp.errors import ConfigError, DataError
from klamp.objective.groups import (
    Difficulty,
    centred_in_groups,
    group_moments,
    grouped,
    leave_one_out_by_rank,
    length_weights,
    refuse_groups_of_one,
    signal_report,
)
from klamp.objective.moments import Moments, wide
from klamp.objective.prepare import filter_rows
from klamp.types import ALONE

NAN = float("nan")
ALL = Difficulty(low=None, high=None)


def numbers(metrics):
    return {name.removeprefix("signal/"): float(m) for name, m in metrics.items()}


def filtered(setting, scores, groups, **changes):
    batch = make_batch(rows=len(scores), scores=torch.tensor(scores), groups=torch.tensor(groups))
    return setting(wide(batch.scores), replace(batch, **changes))


def test_ids_are_arbitrary_and_groups_ragged():
    groups = grouped(torch.tensor([900, -4, 900, 7, 900, -4]))
    assert groups.of_row.tolist() == [2, 0, 2, 1, 2, 0]
    assert groups.sizes.tolist() == [2, 1, 3]


LAST = torch.iinfo(torch.int64).max
IDS = {
    "dense": [3, 0, 2, 2, 1, 0],
    "dense, not from 0": [103, 100, 102, 102, 101, 100],
    "with gaps": [9, 0, 5, 5, 2, 9],
    "one too far apart to count": [24, 0, 5, 5, 2, 9],
    "the last that is counted": [23, 0, 5, 5, 2, 9],
    "negative": [-1, -3, 0, -3, 2, -1],
    "huge": [10**15, 7, 10**15, -(10**15), 7, 8],
    "at both ends": [LAST, -LAST - 1, 0, LAST, -LAST - 1, -1],
    "at the upper end": [LAST, LAST - 2, LAST - 1, LAST, LAST - 2, LAST - 5],
    "at the lower end": [-LAST - 1, -LAST, -LAST - 1, 5 - LAST, -LAST, -LAST],
    "one group": [-8] * 6,
    "one row": [LAST],
    "none": [],
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_groups_are_numbered_in_the_order_of_their_ids(ids):
    """By counting or by sorting: what unique gives."""
    fitting = max(map(abs, ids), default=0) < 2**31
    for dtype in (torch.int64, torch.int32) if fitting else (torch.int64,):
        given = torch.tensor(ids, dtype=dtype)
        _, of_row, sizes = given.unique(return_inverse=True, return_counts=True)
        found = grouped(given)
        assert torch.equal(found.of_row, of_row)
        assert torch.equal(found.sizes, sizes)
        assert found.of_row.dtype == found.sizes.dtype == torch.int64
        assert given.tolist() == ids


@pytest.mark.parametrize("spread", [1, 3, 5, 10**12])
def test_many_groups_are_numbered_like_few(spread):
    ids = spread * torch.randint(-300, 300, (1000,))
    _, of_row, sizes = ids.unique(return_inverse=True, return_counts=True)
    assert torch.equal(grouped(ids).of_row, of_row)
    assert torch.equal(grouped(ids).sizes, sizes)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e6, 1e9])
@pytest.mark.parametrize("missing", [False, True])
def test_groups_are_exact_however_far_from_zero_they_are(offset, missing):
    """To 1e-6 of what exact fractions give; float32 sums of raw squares are off by all of it."""
    ids = torch.randint(0, 40, (400,))
    scores = (offset * (1 + ids % 3) + 0.01 * torch.randn(400, dtype=torch.float64)).float()
    scores[::7] = NAN if missing else scores[::7]
    m, centred = centred_in_groups(scores, grouped(ids))
    known = [[Fraction(s) for s in scores[ids == i].tolist() if s == s] for i in ids.unique()]
    for group, count, mean, m2 in zip(known, m.count, m.mean, m.m2, strict=True):
        centre = sum(group) / len(group)
        assert count == len(group)
        assert abs(Fraction(mean.item()) - centre) <= 1e-15 * abs(centre) + 1e-15
        assert m2.item() == pytest.approx(float(sum((x - centre) ** 2 for x in group)), rel=1e-6)
    for score, i, found in zip(scores.tolist(), grouped(ids).of_row, centred, strict=True):
        wanted = score - float(sum(known[i]) / len(known[i]))
        assert found.item() == pytest.approx(wanted, rel=1e-6, abs=1e-7, nan_ok=True)


def test_infinite_scores_stay_in_their_group():
    scores = torch.tensor([1.0, 3.0, float("inf"), 2.0], dtype=torch.float64)
    m = group_moments(scores, grouped(torch.tensor([0, 0, 1, 1])))
    assert (m.count.tolist(), m.mean.tolist(), m.m2[0]) == ([2, 2], [2, float("inf")], 2)


def test_group_moments_by_hand():
    scores = torch.tensor([1.0, 10.0, 3.0, NAN, 5.0])
    groups = grouped(torch.tensor([9, 4, 9, 4, 9]))
    assert group_moments(scores, groups).each() == [Moments(1, 10, 0), Moments(3, 3, 8)]


def test_siblings_by_hand():
    x = tensor([1.0, 2.0], [9.0, 9.0], [3.0, 4.0], [5.0, 0.0])
    found = leave_one_out_by_rank(x, torch.tensor([7, 1, 7, 7]))
    expected = tensor(
        [4.0, 2.0],  # (3 + 5) / 2, (4 + 0) / 2
        [3.0, 2.0],  # alone: everyone else, (1 + 3 + 5) / 3, (2 + 4 + 0) / 3
        [3.0, 1.0],  # (1 + 5) / 2, (2 + 0) / 2
        [2.0, 3.0],  # (1 + 3) / 2, (2 + 4) / 2
    )
    assert_close(found, expected)


def test_a_row_without_anyone_else_has_no_baseline():
    assert_close(leave_one_out_by_rank(tensor([3.0, 4.0]), torch.tensor([0])), tensor([0.0, 0.0]))


def test_the_order_of_rows_does_not_matter():
    x, groups = torch.randn(9, 4), torch.tensor([3, 3, 3, 1, 1, 8, 8, 8, 5])
    order = torch.randperm(9)
    shuffled = leave_one_out_by_rank(x[order], groups[order])
    assert_close(shuffled, leave_one_out_by_rank(x, groups)[order])


def test_a_lone_row_is_compared_with_the_rows_of_all_workers():
    x, groups = torch.randn(5, 4), torch.tensor([0, 0, 1, 2, 2])
    # The second worker's responses are shorter: its tensors are narrower.
    x[3:, 2:] = 0.0
    whole = leave_one_out_by_rank(x, groups)
    parts = together(
        lambda w: leave_one_out_by_rank(x[:3], groups[:3], w),
        lambda w: leave_one_out_by_rank(x[3:, :2], groups[3:], w),
    )
    assert_close(parts[0], whole[:3])
    assert_close(parts[1], whole[3:, :2])


def test_a_group_of_one_is_refused_by_group_and_row():
    refuse_groups_of_one(torch.tensor([3, 5, 5, 3]), "Stage")
    message = r"Stage needs at least 2 .* got group 8 \(row 2\) with 1: .* group_of_one=\"zero\""
    with pytest.raises(DataError, match=message):
        refuse_groups_of_one(torch.tensor([3, 3, 8]), "Stage")
    ids = torch.tensor([3, 3, 8])
    with pytest.raises(DataError, match=message):
        refuse_groups_of_one(ids, "Stage", grouped(ids))


def test_difficulty_keeps_means_strictly_between_its_bounds():
    scores = [0.0, 0.5, 0.25, 0.75, 1.0, 0.5, 0.5, 0.625]
    groups = [1, 1, 2, 2, 3, 3, 4, 4]  # means 0.25, 0.5, 0.75, 0.5625
    found = filtered(Difficulty(low=0.25, high=0.75), scores, groups)
    assert found.keep.tolist() == [False, False, True, True, False, False, True, True]
    assert numbers(found.metrics)["removed_by_difficulty"] == 4


def test_one_bound_may_be_off():
    scores, groups = [0.0, 0.0, 1.0, 1.0], [0, 0, 1, 1]
    assert filtered(Difficulty(low=None), scores, groups).keep.tolist() == [
        True,
        True,
        False,
        False,
    ]
    assert filtered(Difficulty(high=None), scores, groups).keep.tolist() == [
        False,
        False,
        True,
        True,
    ]
    assert filtered(ALL, scores, groups).keep.all()


@pytest.mark.parametrize("score", [0.1, 0.95])
def test_a_float32_score_at_the_bound_is_at_the_bound(score):
    """0.1 as float32 is 0.1000000015 as float64, which is not what anyone means by > 0.1."""
    assert not filtered(Difficulty(), [score, score], [0, 0]).keep.any()


def test_a_group_of_one_is_kept():
    assert filtered(Difficulty(), [0.0, 1.0, 0.0, 0.0], [0, 1, 2, 2]).keep.tolist() == [
        *(True, True),
        *(False, False),
    ]


def test_missing_scores_do_not_count_in_the_mean_of_their_group():
    # [0, NaN] has mean 0: removed. [NaN, NaN] has none: nobody knows, so it is kept.
    found = filtered(Difficulty(), [0.0, NAN, NAN, NAN], [0, 0, 1, 1])
    assert found.keep.tolist() == [False, False, True, True]


def test_difficulty_weights_by_hand():
    # Means 0.75 and 0.25: 0.5 + 1.5 · (0.25 | 0.75) = 0.875 | 1.625, over their mean of 1.25
    found = filtered(replace(ALL, weigh_difficulty=True), [0.5, 1.0, 0.0, 0.5], [0, 0, 1, 1])
    assert_close(found.weights, torch.tensor([0.7, 0.7, 1.3, 1.3], dtype=torch.float64))


def test_a_given_difficulty_takes_the_place_of_the_mean():
    # 0.5 + 1.5 · (0 | 1 | 1 (of 3, bounded) | unknown: weighs 1): 0.5, 2, 2, 1, over 5.5 / 4
    given = torch.tensor([0.0, 1.0, 3.0, NAN])
    setting = replace(ALL, weigh_difficulty=True)
    found = filtered(setting, [0.5, 1.0, 0.0, 0.5], [0, 0, 1, 1], difficulty=given)
    expected = torch.tensor([0.5, 2.0, 2.0, 1.0], dtype=torch.float64) * 4 / 5.5
    assert_close(found.weights, expected)


def test_length_weights_by_hand():
    # Lengths 1 (shortest), 3, 5 (longest): 1.5 − 0/4, 1.5 − 2/4, 1.5 − 4/4
    weights = length_weights(prefix_mask([1, 3, 5], 6))
    assert_close(weights, torch.tensor([1.5, 1.0, 0.5], dtype=torch.float64))
    assert_close(length_weights(prefix_mask([4, 4], 6)), torch.full((2,), 1.5, dtype=torch.float64))


def test_weights_multiply_and_have_mean_one_before_anything_is_filtered():
    batch = make_batch(difficulty=torch.rand(8))
    setting = Difficulty(low=0.4, high=0.6, weigh_difficulty=True, weigh_length=True)
    found = setting(wide(batch.scores), batch)
    by_hand = (0.5 + 1.5 * wide(batch.difficulty)) * length_weights(batch.mask)
    assert_close(found.weights, by_hand / by_hand.mean())
    assert_close(found.weights.mean(), torch.tensor(1.0, dtype=torch.float64))


def test_two_workers_weigh_as_one_would():
    batch = make_batch(difficulty=torch.rand(8))
    setting = Difficulty(weigh_difficulty=True, weigh_length=True)
    whole = setting(wide(batch.scores), batch).weights
    a, b = batch.select(slice(0, 4)), batch.select(slice(4, 8))
    parts = together(
        lambda w: setting(wide(a.scores), a, w).weights,
        lambda w: setting(wide(b.scores), b, w).weights,
    )
    assert_close(torch.cat(parts), whole)


def test_a_worker_without_rows_takes_part():
    batch = make_batch()
    setting = Difficulty(weigh_difficulty=True, weigh_length=True)
    none = batch.select(slice(0, 0))
    parts = together(
        lambda w: setting(wide(batch.scores), batch, w).weights,
        lambda w: setting(wide(none.scores), none, w).weights,
    )
    assert_close(parts[0], setting(wide(batch.scores), batch).weights)
    assert len(parts[1]) == 0


def test_truncated_responses_can_be_dropped():
    truncated = torch.tensor([True, False, False, True])
    scores, groups = [0.0, 0.0, 0.5, 0.5], [0, 0, 1, 1]
    kept = filtered(Difficulty(), scores, groups, truncated=truncated)
    assert kept.keep.tolist() == [False, False, True, True]
    found = filtered(Difficulty(drop_truncated=True), scores, groups, truncated=truncated)
    assert found.keep.tolist() == [False, False, True, False]
    assert numbers(found.metrics)["removed_as_truncated"] == 2
    with pytest.raises(DataError, match=r"drop_truncated needs Batch\.truncated, got None"):
        filtered(Difficulty(drop_truncated=True), scores, groups)


@pytest.mark.parametrize("weights_on", ["loss", "policy"])
@pytest.mark.parametrize("denominator", ["fixed", "shrink"])
def test_a_filtered_row_leaves_the_mask_only_when_the_denominator_shrinks(denominator, weights_on):
    batch = make_batch(rows=4, scores=tensor(0.5, 1.0, 1.0, 1.0), groups=torch.arange(4) // 2)
    setting = Difficulty(weigh_difficulty=True, denominator=denominator, weights_on=weights_on)
    rows = filter_rows(setting, wide(batch.scores), batch, ALONE)
    keep = torch.tensor([True, True, False, False])
    assert torch.equal(
        rows.mask, batch.mask & keep[:, None] if denominator == "shrink" else batch.mask
    )
    # Means 0.75 and 1: 0.5 + 1.5 · (0.25 | 0) = 0.875 | 0.5, over their mean of 0.6875
    weight, ones = 0.875 / 0.6875, tensor(1.0, 1.0, 0.0, 0.0)
    on_loss = ones if weights_on == "policy" else weight * ones
    assert_close(rows.weights, on_loss)
    on_policy = tensor(weight, weight, 2 - weight, 2 - weight)
    assert_close(rows.policy_weights, on_policy if weights_on == "policy" else torch.ones(4))


def test_the_signal_report_counts():
    scores = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 1.0, NAN, 0.5], dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    keep = torch.tensor([True, False, True, True, False, False, True, True])
    # 0 has spread and a kept row; 1 is flat; 2 has spread but no kept row; 3 has one score.
    assert numbers(signal_report(scores, groups, keep)) == {
        "groups": 4,
        "groups_effective": 1,
        "groups_effective_frac": 0.25,
        "groups_without_spread": 2,
        "samples": 8,
        "missing_scores": 1,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low": 0.9, "high": 0.1}, r"Difficulty needs low < high, got low=0\.9 high=0\.1"),
        ({"low": 0.5, "high": 0.5}, r"Difficulty needs low < high"),
        ({"low": NAN}, r"Difficulty\.low must be a finite number.* got nan"),
        ({"high": float("inf")}, r"Difficulty\.high must be a finite number.* got inf"),
        ({"weights_on": "value"}, r"Difficulty\.weights_on must be one of loss, policy, got 'va"),
        ({"denominator": "free"}, r"Difficulty\.denominator must be one of fixed, shrink, got"),
    ],
)
def test_a_wrong_setting_is_refused_when_built(settings, message):
    with pytest.raises(ConfigError, match=message):
        Difficulty(**settings)
