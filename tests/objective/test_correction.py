import math

import pytest
import torch
from test_moments import together

from helpers import assert_close, make_batch, prefix_mask, tensor
from klamp.errors import ConfigError
from klamp.objective.correction import Correction, effective_sample_size, mismatch
from klamp.objective.prepare import correct_tokens, filter_rows
from klamp.types import ALONE

NAN = float("nan")
W = tensor([0.5, 1.0, 4.0, 9.0], [4.0, 4.0, 16.0, 9.0])  # the last column is masked
GEOMETRIC = 2 ** (1 / 3), 256 ** (1 / 3)  # ∛(½ · 1 · 4) = 1.26, ∛(4 · 4 · 16) = 6.35


def batch_of(w, mask=None, **changes):
    mask = prefix_mask([3] * len(w), w.shape[1]) if mask is None else mask
    fields = {name: torch.zeros(w.shape) for name in ("ref_logprobs", "values")}
    fields |= {"mask": mask, "old_logprobs": w.log(), "sampler_logprobs": torch.zeros(w.shape)}
    return make_batch(rows=len(w), group=len(w), **(fields | changes))


def numbers(metrics):
    return {name: float(m) for name, m in metrics.items()}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"level": "token", "action": "truncate"}, [[0.6, 1.0, 3.0], [3.0, 3.0, 3.0]]),
        ({"level": "token", "action": "mask"}, [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
        ({"level": "sequence", "action": "truncate"}, [[GEOMETRIC[0]] * 3, [3.0] * 3]),
        ({"level": "sequence", "action": "mask"}, [[0.6, 1.0, 3.0], [0.0, 0.0, 0.0]]),
        ({"level": "sequence", "action": "mask", "cap": 2.0}, [[0.6, 1.0, 2.0], [0.0] * 3]),
        (
            {"level": "sequence", "action": "mask", "floor": 0.0, "cap": 1e6},
            [[0.5, 1.0, 4.0], [0.0] * 3],
        ),
        (
            {"level": "sequence", "action": "mask", "weight": "sequence"},
            [[GEOMETRIC[0]] * 3, [0.0] * 3],
        ),
    ],
)
def test_the_four_forms_by_hand(settings, expected):
    found = Correction(low=0.6, high=3.0, **settings)(batch_of(W))
    assert_close(found.weights[:, :3], tensor(*expected))


def test_a_weight_at_the_bound_is_kept():
    batch = batch_of(tensor([1.0, 2.0, 0.5]))
    found = Correction(action="mask", low=0.5 - 1e-6, high=2.0 + 1e-6)(batch)
    assert_close(found.weights, tensor([1.0, 2.0, 0.5]))


@pytest.mark.parametrize(
    ("level", "kept"), [("token", [[0, 1, 0], [0, 0, 0]]), ("sequence", [[1, 1, 1], [0, 0, 0]])]
)
def test_a_masked_token_leaves_the_mask_only_when_the_denominator_shrinks(level, kept):
    batch = batch_of(W)
    rows = filter_rows(None, batch.scores.double(), batch, ALONE)
    settings = {"level": level, "action": "mask", "low": 0.6, "high": 3.0}
    fixed = correct_tokens(Correction(**settings), rows, batch, ALONE)
    shrunk = correct_tokens(Correction(**settings, denominator="shrink"), rows, batch, ALONE)
    assert torch.equal(fixed.mask, batch.mask)
    assert shrunk.mask[:, :3].tolist() == torch.tensor(kept).bool().tolist()
    assert not shrunk.mask[:, 3].any()
    assert_close(fixed.corrections, shrunk.corrections)
    assert float(fixed.metrics["signal/tokens_removed_by_correction"]) == 6 - sum(map(sum, kept))


def test_truncating_masks_nothing():
    found = Correction(low=0.6, high=3.0)(batch_of(W))
    assert found.keep.all()
    assert numbers(found.metrics)["signal/tokens_removed_by_correction"] == 0


def test_what_is_watched_by_hand():
    found = numbers(Correction(low=0.6, high=3.0)(batch_of(W[:1])).metrics)
    # w − 1 − log w of ½, 1 and 4: (−½ + log 2) + 0 + (3 − log 4), over 3
    assert found["actor/sampler_kl"] == pytest.approx((2.5 - math.log(2)) / 3, rel=1e-5)
    assert found["actor/sampler_ratio_max"] == pytest.approx(4.0, rel=1e-5)
    assert found["actor/sampler_truncated_frac"] == pytest.approx(2 / 3)
    # (½ + 1 + 4)² / (3 · (¼ + 1 + 16)) = 30.25 / 51.75
    assert found["actor/sampler_ess"] == pytest.approx(30.25 / 51.75, rel=1e-5)
    masked = numbers(Correction(action="mask", low=0.6, high=3.0)(batch_of(W[:1])).metrics)
    assert masked["actor/sampler_masked_frac"] == pytest.approx(2 / 3)


def test_a_mismatch_is_measured_before_any_filter_and_without_one():
    batch = batch_of(W)
    bare = numbers(mismatch(batch))
    filtered = numbers(Correction(action="mask", low=0.6, high=3.0)(batch).metrics)
    assert bare == {name: filtered[name] for name in bare}
    assert set(bare) == {"actor/sampler_kl", "actor/sampler_ratio_max", "actor/sampler_ess"}
    assert mismatch(batch_of(W, sampler_logprobs=None)) == {}


def test_effective_sample_size_by_hand():
    mask = torch.tensor([[True, True, False]])
    # (1 + 3)² / (2 · (1 + 9)) = 16 / 20
    assert float(effective_sample_size(tensor([1.0, 3.0, 99.0]), mask)) == pytest.approx(0.8)
    assert float(effective_sample_size(tensor([7.0, 7.0, NAN]), mask)) == pytest.approx(1.0)
    assert float(effective_sample_size(tensor([7.0, 7.0, 7.0]), mask & False)) == 0.0


def test_two_workers_have_one_effective_sample_size():
    w, mask = torch.rand(5, 4), torch.rand(5, 4) < 0.7
    halves = (slice(0, 1), slice(1, 5))
    parts = together(*(lambda k, s=s: effective_sample_size(w[s], mask[s], k) for s in halves))
    whole = float(effective_sample_size(w, mask))
    assert [float(p) for p in parts] == pytest.approx([whole, whole])


def test_without_sampler_log_probs_every_weight_is_one():
    for setting in (Correction(), Correction(level="sequence", action="mask", low=0.9)):
        found = setting(batch_of(W, sampler_logprobs=None))
        assert_close(found.weights, torch.ones(2, 4))
        assert found.keep.all()
        assert found.metrics == {}


@pytest.mark.parametrize("junk", [NAN, float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_junk_at_masked_positions_reaches_no_weight_and_no_metric(level, junk):
    setting = Correction(level=level, action="mask", low=0.6, high=3.0)
    clean, mask = setting(batch_of(W)), batch_of(W).mask
    dirty = setting(batch_of(W, sampler_logprobs=torch.where(mask, 0.0, junk)))
    assert_close(dirty.weights[mask], clean.weights[mask])
    assert numbers(dirty.metrics) == numbers(clean.metrics)
    assert dirty.weights.isfinite().all()


def test_a_mismatch_of_any_size_gives_finite_weights():
    for setting in (Correction(high=1e9), Correction(level="sequence", action="mask", high=1e9)):
        far = torch.full((2, 4), 1e4)
        found = setting(batch_of(W, old_logprobs=far, sampler_logprobs=-far))
        assert found.weights.isfinite().all()
        assert all(map(math.isfinite, numbers(found.metrics).values()))


def test_an_empty_row_is_no_sequence_outside_the_bounds():
    batch = batch_of(W, mask=prefix_mask([3, 0], 4))
    found = Correction(level="sequence", action="mask", low=0.5, high=2.0)(batch)
    assert numbers(found.metrics)["actor/sampler_masked_frac"] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level": "group"}, r"Correction\.level must be one of token, sequence, got 'group'"),
        ({"action": "clip"}, r"Correction\.action must be one of truncate, mask, got 'clip'"),
        ({"denominator": "none"}, r"Correction\.denominator must be one of fixed, shrink"),
        ({"low": -1.0}, r"Correction\.low .* >= 0, got -1\.0"),
        ({"high": 0.0}, r"Correction\.high .* > 0, got 0\.0"),
        ({"cap": -1.0}, r"Correction\.cap .* >= 0, got -1\.0; None turns it off"),
        ({"cap": 2.0}, r"action='truncate'\) clamps to \[low, high\].*cap=2.0.*use action='mask'"),
        ({"clamp_log_ratio": 30.0}, r"Correction\.clamp_log_ratio .* <= 20, got 30"),
        ({"low": 3.0}, r"Correction needs low < high, got low=3\.0 high=2\.0"),
        (
            {"denominator": "shrink"},
            r"removes nothing, .*denominator='shrink'; .* use action='mask'",
        ),
    ],
)
def test_a_wrong_setting_is_refused_when_built(settings, message):
    with pytest.raises(ConfigError, match=message):
        Correction(**settings)
