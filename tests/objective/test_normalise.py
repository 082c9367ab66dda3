import math
from fractions import Fraction
from itertools import product
from statistics import mean, pstdev, stdev

import pytest
import torch
from test_moments import together

from helpers import assert_close, make_batch
from klamp.errors import ConfigError, DataError
from klamp.objective.moments import Moments
from klamp.objective.normalise import LEVELS, NormaliseScores, ScaleScores

NAN = float("nan")
GROUPS = [5, 2, 5, 2, 5, 2]
BEFORE = [4.0, -2.0, 7.0]  # what the run has seen before the batch
SCORES = [1.0, 3.0, 2.0, 9.0, 6.0, 0.5]


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def batch_of(scores, groups=None, domains=None):
    groups = list(range(len(scores))) if groups is None else groups
    return make_batch(
        rows=len(scores),
        scores=torch.tensor(scores),
        groups=torch.tensor(groups),
        domains=None if domains is None else torch.tensor(domains),
    )


def run(stage, scores, groups=None, domains=None, memory=()):
    """The new scores and the new memory."""
    return stage(double(*scores), batch_of(scores, groups, domains), memory)[:2]


def values_of(level, row, scores, groups):
    """The scores that a row is compared with, spelled out."""
    known = [(s, g) for s, g in zip(scores, groups, strict=True) if not math.isnan(s)]
    if level == "running":
        return BEFORE + [s for s, _ in known]
    return [s for s, g in known if level == "batch" or g == groups[row]]


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("scores", [SCORES, [1.0, NAN, 2.0, 9.0, 6.0, 0.5]], ids=["all", "missing"])
@pytest.mark.parametrize(("of_mean", "of_std"), list(product(LEVELS, LEVELS)))
def test_every_pair_of_statistics_by_hand(of_mean, of_std, scores, ddof):
    stage = NormaliseScores(mean=of_mean, std=of_std, eps=0.5, ddof=ddof)
    _, memory = run(NormaliseScores(mean="running"), BEFORE, groups=[0, 0, 0])
    found, _ = run(stage, scores, GROUPS, memory=memory)
    deviation = stdev if ddof else pstdev
    expected = []
    for row, score in enumerate(scores):
        centre = mean(values_of(of_mean, row, scores, GROUPS)) if of_mean else 0.0
        scale = deviation(values_of(of_std, row, scores, GROUPS)) + 0.5 if of_std else 1.0
        expected.append((score - centre) / scale)
    assert found.isnan().tolist() == [math.isnan(s) for s in scores]
    assert_close(found, double(*expected), equal_nan=True)


def test_group_normalisation_by_hand():
    h = 0.5**0.5  # two values d apart: mean ± d/2, std d/√2, so ±1/√2 whatever d is
    found, _ = run(NormaliseScores(eps=0.0), [1.0, 10.0, 3.0, 10.5], [9, 7, 9, 7])
    assert_close(found, double(-h, -h, h, h))


@pytest.mark.parametrize(("level", "groups"), [("group", [0, 0, 1, 1]), ("batch", [0, 0, 0, 0])])
def test_a_group_without_spread_has_nothing_to_say(level, groups):
    scores = [0.1, 0.1, 0.1, 0.1]
    settings = {"mean": level, "std": level}
    assert run(NormaliseScores(**settings), scores, groups)[0].tolist() == [0, 0, 0, 0]
    bare = {"mean": None, "std": level, "eps": 0.5}
    assert run(NormaliseScores(**bare), scores, groups)[0].tolist() == [0, 0, 0, 0]
    raw, _ = run(NormaliseScores(**bare, no_spread="unscaled"), scores, groups)
    assert_close(raw, double(*scores))
    divided, _ = run(NormaliseScores(**bare, no_spread="divide"), scores, groups)
    assert_close(divided, double(0.2, 0.2, 0.2, 0.2))  # 0.1 / (0 + 0.5)


@pytest.mark.parametrize("level", ["batch", "group", "running"])
def test_equal_scores_are_worth_exactly_nothing(level):
    """Rounding in their mean must not become an advantage, least of all one divided by eps."""
    for value in (0.1, 0.3, 0.7, 1e8 + 0.1):
        for std in (None, level):
            stage = NormaliseScores(mean=level, std=std, eps=1e-300, no_spread="divide")
            assert run(stage, [value] * 7, [0] * 7)[0].tolist() == [0.0] * 7


def test_close_scores_far_from_zero_are_told_apart():
    """10,000 ± 0.01 in float32, where sums of raw squares leave nothing; to 1e-6 by fractions."""
    ids = torch.randint(0, 30, (300,)) * 10**6
    scores = (1e4 + 0.01 * torch.randn(300)).tolist()
    found, _ = run(NormaliseScores(), scores, ids.tolist())
    for score, group, z in zip(scores, ids.tolist(), found.tolist(), strict=True):
        others = [Fraction(s) for s, g in zip(scores, ids.tolist(), strict=True) if g == group]
        centre = sum(others) / len(others)
        spread = (sum((s - centre) ** 2 for s in others) / (len(others) - 1)) ** 0.5
        assert z == pytest.approx(float(score - centre) / (spread + 1e-6), abs=1e-6)


def test_only_the_flat_group_is_flat():
    found, _ = run(NormaliseScores(eps=0.0), [3.0, 1.0, 3.0, 2.0], [0, 1, 0, 1])
    h = 0.5**0.5
    assert_close(found, double(0.0, -h, 0.0, h))


def test_one_known_score_is_no_spread():
    found, _ = run(NormaliseScores(), [3.0, NAN, 1.0, 2.0], [0, 0, 1, 1])
    assert found[0] == 0
    assert found[1].isnan()


@pytest.mark.parametrize("no_spread", ["zero", "unscaled", "divide"])
@pytest.mark.parametrize(
    ("of_mean", "of_std"), [("group", None), ("batch", "group"), (None, "group")]
)
def test_a_lone_sample_has_no_baseline(of_mean, of_std, no_spread):
    scores, groups = [1.0, 5.0, 4.0], [0, 8, 0]
    stage = NormaliseScores(mean=of_mean, std=of_std)
    message = rf"NormaliseScores\(mean={of_mean!r}, std={of_std!r}\) .* group 8 \(row 1\) with 1"
    with pytest.raises(DataError, match=message):
        run(stage, scores, groups)
    zero = NormaliseScores(mean=of_mean, std=of_std, group_of_one="zero", no_spread=no_spread)
    found, _ = run(zero, scores, groups)
    assert found[1] == 0
    assert (found[[0, 2]] != 0).all()


def test_a_lone_sample_is_fine_where_no_group_is_asked_for():
    found, _ = run(NormaliseScores(mean="batch", std="batch", eps=0.0), [1.0, 3.0])
    assert_close(found, double(-(0.5**0.5), 0.5**0.5))


def test_running_moments_do_not_depend_on_how_the_stream_is_cut():
    stage, stream = NormaliseScores(mean="running", std="running"), torch.randn(12).tolist()
    domains = [0, 3, 1, 3, 0, 1, 1, 3, 0, 0, 3, 1]
    _, whole = run(stage, stream, domains=domains)
    memory = stage.init()
    for cut in (slice(0, 1), slice(1, 8), slice(8, 12)):
        last, memory = run(stage, stream[cut], domains=domains[cut], memory=memory)
    assert [d for d, _ in memory] == [0, 1, 3]
    for (_, a), (_, b) in zip(memory, whole, strict=True):
        assert a.count == b.count
        assert (a.mean, a.m2) == pytest.approx((b.mean, b.m2), rel=1e-9)
    assert_close(last, run(stage, stream, domains=domains)[0][8:])


def test_domains_do_not_mix():
    stage = NormaliseScores(mean="running", std=None)
    found, memory = run(stage, [1.0, 100.0, 3.0, 300.0], domains=[0, 2, 0, 2])
    assert_close(found, double(-1.0, -100.0, 1.0, 100.0))
    assert memory == ((0, Moments(2, 2, 2)), (2, Moments(2, 200, 20_000)))


def test_a_domain_of_missing_scores_only_is_not_remembered():
    stage = NormaliseScores(mean="running", std="running")
    found, memory = run(stage, [1.0, 2.0, NAN, NAN], domains=[0, 0, 1, 4])
    assert [d for d, _ in memory] == [0]
    assert found.isnan().tolist() == [False, False, True, True]


def test_statistics_remember_only_what_is_asked_for():
    assert run(NormaliseScores(mean="batch", std="group"), SCORES, GROUPS)[1] == ()


def test_domains_may_have_any_number():
    """A hash of a name is a fine id; what is remembered is by id, not by position."""
    stage = NormaliseScores(mean="running", std=None)
    ids = [-7, 2**40, -7, 2**40]
    found, memory = run(stage, [1.0, 10.0, 3.0, 30.0], [0, 0, 0, 0], domains=ids)[:2]
    assert_close(found, torch.tensor([-1.0, -10.0, 1.0, 10.0], dtype=torch.float64))
    assert [domain for domain, _ in memory] == [-7, 2**40]


@pytest.mark.parametrize("level", ["batch", "running"])
def test_two_workers_normalise_as_one_would(level):
    stage = NormaliseScores(mean=level, std=level)
    batch = batch_of(SCORES, domains=[0, 1, 0, 1, 2, 2])
    whole = stage(batch.scores.double(), batch, ())
    a, b = batch.select(slice(0, 4)), batch.select(slice(4, 6))
    first, second = together(
        lambda w: stage(a.scores.double(), a, (), w), lambda w: stage(b.scores.double(), b, (), w)
    )
    assert_close(torch.cat([first.scores, second.scores]), whole.scores)
    assert first.memory == second.memory
    assert [d for d, _ in first.memory] == [d for d, _ in whole.memory]


def test_scaling_by_the_run_by_hand():
    stage = ScaleScores(by="running")
    first, memory = run(stage, [1.0, 3.0])  # std √2
    assert_close(first, double(1.0, 3.0) / 2**0.5)
    second, memory = run(stage, [5.0, NAN], memory=memory)  # 1, 3, 5: std 2
    assert_close(second, double(2.5, NAN), equal_nan=True)
    assert memory == ((0, Moments(3, 3, 8)),)


def test_scaling_by_the_first_batch_by_hand():
    stage = ScaleScores(by="reference")
    first, memory = run(stage, [1.0, 3.0])
    second, later = run(stage, [50.0, 100.0], memory=memory)
    assert_close(first, double(1.0, 3.0) / 2**0.5)
    assert_close(second, double(50.0, 100.0) / 2**0.5)
    assert later == memory


def test_scaling_by_a_given_reference():
    found, memory = run(ScaleScores(by="reference", std=4.0), [1.0, 3.0])
    assert_close(found, double(0.25, 0.75))
    assert memory == ()


@pytest.mark.parametrize("by", ["running", "reference"])
@pytest.mark.parametrize("flat", [[2.0, 2.0], [NAN, NAN]])
def test_without_spread_there_is_no_scale_yet(by, flat):
    """The scores pass as they are, and the first batch with spread gives the scale."""
    stage = ScaleScores(by=by)
    found, memory = run(stage, flat)
    assert_close(found, double(*flat), equal_nan=True)
    found, _ = run(stage, [1.0, 3.0], memory=memory)
    scale = stdev([s for s in flat if by == "running" and not math.isnan(s)] + [1.0, 3.0])
    assert_close(found, double(1.0, 3.0) / scale)


def test_scores_of_1e30_stay_finite():
    for level in ("batch", "group", "running"):
        found, _ = run(
            NormaliseScores(mean=level, std=level), [1e30, -1e30, 1.0, 0.0], [0, 0, 1, 1]
        )
        assert found.isfinite().all()
        assert found.abs().max() < 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: NormaliseScores(mean="domain"),
            r"NormaliseScores\.mean must be one of batch, group, running, None, got 'domain'",
        ),
        (lambda: NormaliseScores(std="token"), r"NormaliseScores\.std must be one of"),
        (lambda: NormaliseScores(ddof=2), r"NormaliseScores\.ddof must be one of 0, 1, got 2"),
        (lambda: NormaliseScores(eps=-1e-6), r"NormaliseScores\.eps .* >= 0, got -1e-06"),
        (lambda: NormaliseScores(no_spread="nan"), r"NormaliseScores\.no_spread must be one of"),
        (lambda: NormaliseScores(group_of_one="raw"), r"group_of_one must be one of refuse, zero"),
        (
            lambda: NormaliseScores(eps=0.0, no_spread="divide"),
            r"NormaliseScores\(no_spread='divide'\) needs eps > 0, got 0",
        ),
        (lambda: ScaleScores(by="group"), r"ScaleScores\.by must be one of running, reference"),
        (lambda: ScaleScores(by="reference", std=0.0), r"ScaleScores\.std .* > 0, got 0\.0"),
        (lambda: ScaleScores(std=2.0), r"ScaleScores\.std goes with by='reference', got std=2\.0"),
    ],
)
def test_a_wrong_setting_is_refused_when_built(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
