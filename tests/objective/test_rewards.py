import pytest
import torch

from helpers import assert_close, make_batch, prefix_mask
from klamp.errors import ConfigError, DataError
from klamp.objective.rewards import (
    ClipScores,
    CombineScores,
    NormaliseScores,
    PenaliseOverlong,
    PenaliseTruncated,
    ScaleScores,
    SubtractOthersMean,
)

NAN = float("nan")
STAGES = [
    ClipScores(low=-1.0, high=1.0),
    SubtractOthersMean(),
    PenaliseOverlong(max_length=6, buffer=2),
    PenaliseTruncated(coef=0.5),
    CombineScores(weights=(1.0, 2.0)),
    NormaliseScores(),
    NormaliseScores(mean="running", std="running"),
    ScaleScores(),
]


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def batch_of(scores, groups=None, **changes):
    groups = torch.arange(len(scores)) // 2 if groups is None else torch.tensor(groups)
    return make_batch(rows=len(scores), scores=torch.tensor(scores), groups=groups, **changes)


def run(stage, scores, groups=None, **changes):
    return stage(double(*scores), batch_of(scores, groups, **changes), stage.init())


def test_clipping_by_hand():
    found, _, metrics = run(ClipScores(low=-1.0, high=2.0), [-5.0, -1.0, 2.0, 7.0, NAN])
    assert_close(found, double(-1.0, -1.0, 2.0, 2.0, NAN), equal_nan=True)
    assert float(metrics["critic/reward_clip_frac"]) == 0.5  # 2 of 4 known scores


def test_others_mean_by_hand():
    # 1 − (2 + 6)/2, 2 − (1 + 6)/2, 6 − (1 + 2)/2; and ±(10 − 4)
    found = run(SubtractOthersMean(), [1.0, 10.0, 2.0, 6.0, 4.0], [3, 1, 3, 3, 1]).scores
    assert_close(found, double(-3.0, 6.0, -1.5, 4.5, -6.0))


def test_a_missing_sibling_is_not_compared_with():
    found = run(SubtractOthersMean(), [1.0, NAN, 3.0, 5.0, NAN], [0, 0, 0, 1, 1]).scores
    assert_close(found, double(-2.0, NAN, 2.0, 0.0, NAN), equal_nan=True)


def test_equal_siblings_are_worth_exactly_nothing():
    assert run(SubtractOthersMean(), [0.1] * 7, [0] * 7).scores.tolist() == [0.0] * 7


def test_a_lone_sample_has_nobody_to_be_compared_with():
    with pytest.raises(DataError, match=r"SubtractOthersMean needs .* group 4 \(row 2\) with 1"):
        run(SubtractOthersMean(), [1.0, 2.0, 3.0], [0, 0, 4])
    found = run(SubtractOthersMean(group_of_one="zero"), [1.0, 2.0, 3.0], [0, 0, 4]).scores
    assert_close(found, double(-1.0, 1.0, 0.0))


def test_the_overlong_penalty_by_hand():
    # max 6, buffer 4: from length 2 on, a quarter of the factor a token, and no more than all.
    stage = PenaliseOverlong(max_length=6, buffer=4, factor=2.0)
    mask = prefix_mask([1, 2, 3, 6, 8], 8)
    found, _, metrics = run(stage, [1.0] * 5, mask=mask, **no_tokens(5, 8))
    assert_close(found, double(1.0, 1.0, 0.5, -1.0, -1.0))
    assert float(metrics["critic/overlong_frac"]) == pytest.approx(3 / 5)


def test_length_is_counted_in_active_tokens():
    mask = prefix_mask([8], 8) & (torch.arange(8) % 2 == 0)  # 4 of 8
    found = run(PenaliseOverlong(max_length=6, buffer=4), [1.0], mask=mask, **no_tokens(1, 8))
    assert_close(found.scores, double(0.5))


def no_tokens(rows, width):
    """Per-token tensors of another width than the helper's."""
    names = ("old_logprobs", "ref_logprobs", "sampler_logprobs", "values")
    return {name: torch.zeros(rows, width) for name in names}


@pytest.mark.parametrize(
    ("coef", "expected"),
    [(0.5, [1.0, -2.0, NAN, 6.0]), (0.0, [0.0, 0.0, NAN, 6.0]), (-3.0, [-3.0, -3.0, NAN, 6.0])],
)
def test_the_truncation_penalty_by_hand(coef, expected):
    truncated = torch.tensor([True, True, True, False])
    found, _, metrics = run(
        PenaliseTruncated(coef=coef), [2.0, -4.0, NAN, 6.0], truncated=truncated
    )
    assert_close(found, double(*expected), equal_nan=True)
    assert float(metrics["critic/truncated_frac"]) == 0.75


def test_a_penalty_for_truncation_needs_to_know_what_was_truncated():
    with pytest.raises(DataError, match=r"PenaliseTruncated needs Batch\.truncated, got None"):
        run(PenaliseTruncated(coef=0.5), [1.0, 2.0])


def test_combining_by_hand():
    components = torch.tensor([[1.0, 10.0], [NAN, 20.0], [NAN, NAN], [4.0, NAN]])
    found = run(CombineScores(weights=(2.0, 0.5)), [9.0] * 4, components=components).scores
    # 2·1 + ½·10, ½·20, nothing known, 2·4
    assert_close(found, double(7.0, 10.0, NAN, 8.0), equal_nan=True)


def test_components_normalised_first_weigh_the_same_whatever_their_scale():
    """GDPO: a component with a hundred times the spread does not drown the other."""
    h = 0.5**0.5
    components = torch.tensor([[0.0, 100.0], [1.0, 0.0]])
    norm = NormaliseScores(eps=0.0)
    first = run(
        CombineScores(weights=(1.0, 1.0), normalise=norm), [0.0, 0.0], components=components
    )
    assert_close(first.scores, double(0.0, 0.0))  # −h + h, h − h
    batch = batch_of([0.0, 0.0], components=components)
    summed = CombineScores(weights=(1.0, 1.0))(double(0.0, 0.0), batch, (None, None))
    after = norm(summed.scores, batch, ())
    assert_close(after.scores, double(h, -h))  # 100 against 1: the large one decides


def test_each_component_has_its_own_memory():
    stage = CombineScores(weights=(1.0, 1.0), normalise=NormaliseScores(mean="running", std=None))
    components = torch.tensor([[0.0, 10.0], [2.0, 30.0]])
    _, memory, _ = run(stage, [0.0, 0.0], components=components)
    assert [m[0][1].mean for m in memory] == [1.0, 20.0]


def test_the_components_must_match_the_weights():
    stage = CombineScores(weights=(1.0, 2.0))
    with pytest.raises(DataError, match=r"has 2 weights but Batch\.components is None"):
        run(stage, [1.0, 2.0])
    with pytest.raises(DataError, match=r"has 2 weights but .* is \[2, 3\]; give one column"):
        run(stage, [1.0, 2.0], components=torch.zeros(2, 3))


def test_clip_then_normalise_differs_from_normalise_then_clip():
    clip, norm = ClipScores(low=-1.0, high=1.0), NormaliseScores(mean="batch", std=None)
    batch = batch_of([0.0, 30.0, 0.0, 0.0])
    raw = double(0.0, 30.0, 0.0, 0.0)
    clip_first = norm(clip(raw, batch).scores, batch, ()).scores
    norm_first = clip(norm(raw, batch, ()).scores, batch).scores
    assert_close(clip_first, double(-0.25, 0.75, -0.25, -0.25))  # of 0, 1, 0, 0
    assert_close(norm_first, double(-1.0, 1.0, -1.0, -1.0))  # −7.5 and 22.5, both clipped


@pytest.mark.parametrize("stage", STAGES, ids=lambda s: type(s).__name__)
def test_a_missing_score_stays_missing_and_no_stage_edits_its_input(stage):
    scores = [1.0, 5.0, NAN, 2.0]
    components = torch.tensor([[1.0, 1.0], [2.0, 5.0], [NAN, NAN], [3.0, 3.0]])
    batch = batch_of(scores, components=components, truncated=torch.tensor([True] * 4))
    raw = double(*scores)
    found = stage(raw, batch, stage.init())
    assert found.scores.isnan().tolist() == [False, False, True, False]
    assert_close(raw, double(*scores), equal_nan=True)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ClipScores(low=1.0, high=1.0), r"ClipScores needs low < high, got low=1\.0"),
        (lambda: ClipScores(low=NAN, high=1.0), r"ClipScores\.low must be .* got nan"),
        (lambda: ClipScores(low=0.0, high=float("inf")), r"ClipScores\.high must be .* got inf"),
        (lambda: SubtractOthersMean(group_of_one="raw"), r"SubtractOthersMean\.group_of_one must"),
        (
            lambda: PenaliseOverlong(max_length=4, buffer=5),
            r"PenaliseOverlong needs 0 < buffer <= max_length, got buffer=5 max_length=4",
        ),
        (lambda: PenaliseOverlong(max_length=4, buffer=0), r"0 < buffer"),
        (lambda: PenaliseOverlong(max_length=4, buffer=2, factor=-1.0), r"factor .* >= 0, got -1"),
        (lambda: PenaliseTruncated(coef=1.5), r"PenaliseTruncated\.coef .* <= 1, got 1\.5; 0 to 1"),
        (lambda: CombineScores(weights=()), r"CombineScores\.weights must be finite .* got \(\)"),
        (lambda: CombineScores(weights=(1.0, NAN)), r"CombineScores\.weights must be finite"),
    ],
)
def test_a_wrong_setting_is_refused_when_built(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
