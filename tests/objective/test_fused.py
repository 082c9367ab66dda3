"""The one-pass forms give what the formulae give: values, gradients and every metric."""

import math
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import klamp
from klamp import arrays
from klamp.objective import fused
from klamp.objective.metrics import reduced
from klamp.objective.terms import token_wise, written_down
from klamp.objective.written import written_term
from klamp.types import Batch, Targets

KLS = {
    f"{estimator}-{gradient}-{clamp}": klamp.KLTerm(
        estimator=estimator,
        gradient=gradient,
        clamp_gradient=clamp,
        clamp_log_ratio=3.0,
        clamp_value=2.0,
        clamp_to_come=1.5,
        accept_length_bias=True,
    )
    for estimator in ("k1", "k2", "k3")
    for gradient in ("value", "token", "sequence")
    for clamp in ("zero", "pass")
}
SEQUENCE = [name for name in KLS if "sequence" in name]
SURROGATES = {
    "clip": klamp.ClippedSurrogate(low=0.2, high=0.3),
    "dual": klamp.ClippedSurrogate(low=0.2, high=0.3, dual=1.5),
    "clamp": klamp.ClippedSurrogate(clamp_log_ratio=0.7),
}


def unclamped(kl):
    return replace(kl, clamp_log_ratio=None, clamp_value=None, clamp_to_come=None)


def case(spread, rows=5, width=23, seed=0, dtype=torch.float32, reference=True, rubbish=True):
    """A batch with padding, holes, a row without shares and rubbish where nothing is active."""
    g = torch.Generator().manual_seed(seed)

    def noise():
        return torch.randn(rows, width, generator=g, dtype=dtype)

    mask = torch.rand(rows, width, generator=g) < 0.8
    mask[0] = True
    logprobs = -noise().abs()
    old, ref = logprobs + spread * noise(), logprobs + spread * noise()
    advantages, corrections, to_come = noise(), noise().abs(), spread * noise()
    if rubbish:
        worst = torch.tensor([math.nan, math.inf, -math.inf, 1e30], dtype=dtype)
        for i, x in enumerate((logprobs, old, ref, advantages, corrections, to_come)):
            x[~mask] = worst[(i + torch.arange(int((~mask).sum()))) % 4]
    corrections[mask & (torch.rand(rows, width, generator=g) < 0.2)] = 0.0
    weights = torch.rand(rows, generator=g, dtype=dtype)
    weights[-1] = 0.0
    batch = Batch(
        mask=mask,
        scores=torch.zeros(rows),
        groups=torch.arange(rows),
        old_logprobs=old,
        ref_logprobs=ref if reference else None,
    )
    targets = Targets(
        mask=mask & (torch.arange(width) != 3),
        weights=weights,
        advantages=advantages,
        corrections=corrections,
        kl_coef=0.3,
        kl_to_come=to_come,
    )
    return logprobs, batch, targets


def outcome(function, logprobs, *rest):
    """Loss, gradient and numbers."""
    x = logprobs.clone().requires_grad_()
    out = function(x, *rest)
    (2.5 * out.loss).backward()
    return out.loss.detach(), x.grad, reduced(out.metrics)


def by_written(objective):
    def loss(logprobs, batch, targets, shares):
        given = (objective.surrogate, objective.kl, logprobs, batch, targets, shares)
        return written_term(*given)

    return loss


def agree(objective, logprobs, batch, targets, form, tolerance=1e-5):
    shares = objective.shares(targets.mask, targets.weights)
    kl = objective.kl
    assert token_wise(objective.surrogate, kl, targets)
    assert written_down(objective.surrogate, kl, batch)
    assert fused.fits(logprobs, batch, targets)
    function = objective.loss if form == "fused" else by_written(objective)
    found = outcome(function, logprobs, batch, targets, shares)
    wanted = outcome(objective.plain_loss, logprobs, batch, targets, shares)
    torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=tolerance)
    scale = wanted[1].abs().max()
    torch.testing.assert_close(found[1], wanted[1], rtol=tolerance, atol=float(tolerance * scale))
    assert found[2].keys() == wanted[2].keys()
    for name, value in wanted[2].items():
        assert found[2][name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("form", ["fused", "written"])
@pytest.mark.parametrize("spread", [0.0, 1e-4, 0.02, 0.3, 2.0, 60.0])
@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("kl", [None, *KLS])
def test_one_pass_is_what_the_formulae_say(kl, surrogate, spread, form):
    objective = klamp.Objective(kl=KLS.get(kl), surrogate=SURROGATES[surrogate])
    agree(objective, *case(spread), form)


@pytest.fixture
def odd_blocks(monkeypatch):
    """How many blocks were not ordinary."""
    found, by_terms = [], fused._by_terms
    monkeypatch.setattr(fused, "_by_terms", lambda *given: found.append(1) or by_terms(*given))
    return found


@pytest.mark.parametrize("spread", [0.0, 1e-4, 0.02, 0.2])
@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("kl", [None, *KLS])
def test_ordinary_blocks_are_what_the_formulae_say(kl, surrogate, spread, odd_blocks):
    chosen = SURROGATES[surrogate]
    chosen = chosen if chosen.dual is None else replace(chosen, dual=3.0)  # which none reaches
    objective = klamp.Objective(kl=KLS.get(kl), surrogate=chosen)
    agree(objective, *case(spread, rubbish=False), "fused")
    assert not odd_blocks


@pytest.mark.parametrize("form", ["fused", "written"])
@pytest.mark.parametrize("rubbish", [False, True])
def test_a_share_without_the_mask_counts_for_nothing(form, rubbish):
    logprobs, batch, targets = case(0.1, rubbish=rubbish)
    objective = klamp.Objective(kl=klamp.KLTerm())
    function = objective.loss if form == "fused" else by_written(objective)
    shares = torch.full_like(logprobs, 0.01)
    found = outcome(function, logprobs, batch, targets, shares)
    wanted = outcome(function, logprobs, batch, targets, torch.where(targets.mask, shares, 0.0))
    assert found[2] == wanted[2]
    torch.testing.assert_close(found[1], wanted[1])


def test_wider_numbers_than_the_log_probs_go_by_the_formulae():
    logprobs, batch, targets = case(0.1)
    wide = replace(batch, old_logprobs=batch.old_logprobs.double())
    assert fused.fits(logprobs, batch, targets)
    assert not fused.fits(logprobs, wide, targets)
    assert fused.fits(logprobs.double(), wide, targets)


@pytest.mark.parametrize("shift", [-0.3, 0.3])
def test_an_extreme_is_one_of_an_active_token(shift, odd_blocks):
    """Where all ratios are on one side of 1, the 1 of a masked token is neither end."""
    logprobs, batch, targets = case(0.01, rubbish=False)
    batch = replace(batch, old_logprobs=batch.old_logprobs + shift)
    agree(klamp.Objective(kl=klamp.KLTerm()), logprobs, batch, targets, "fused")
    assert not odd_blocks


@pytest.mark.parametrize("name", ["advantages", "corrections", "kl_to_come"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_number_makes_a_block_odd(name, bad, odd_blocks):
    logprobs, batch, targets = case(0.1, rubbish=False)
    x = getattr(targets, name).clone()
    x[1:][~batch.mask[1:]] = bad
    objective = klamp.Objective(kl=klamp.KLTerm(gradient="sequence", estimator="k3"))
    agree(objective, logprobs, batch, replace(targets, **{name: x}), "fused")
    assert odd_blocks


@pytest.mark.parametrize("form", ["fused", "written"])
@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_without_clamps_and_in_float64_to_many_digits(spread, form):
    objective = klamp.Objective(kl=klamp.KLTerm(gradient="sequence", estimator="k3"))
    for rubbish in (False, True):
        given = case(spread, dtype=torch.float64, rubbish=rubbish)
        agree(objective, *given, form, tolerance=1e-6)


@pytest.mark.parametrize("form", ["fused", "written"])
def test_a_batch_without_reference_and_without_kl(form):
    for rubbish in (False, True):
        agree(klamp.Objective(), *case(0.3, reference=False, rubbish=rubbish), form)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.sampled_from([1e-3, 0.1, 1.0]))
def test_any_block_size_gives_the_same(seed, block, spread):
    objective = klamp.Objective(kl=klamp.KLTerm())
    logprobs, batch, targets = case(spread, seed=seed, rubbish=bool(seed % 2))
    shares = objective.shares(targets.mask, targets.weights)
    whole = outcome(objective.loss, logprobs, batch, targets, shares)
    usual = fused.BLOCK
    fused.BLOCK = block
    try:
        cut = outcome(objective.loss, logprobs, batch, targets, shares)
    finally:
        fused.BLOCK = usual
    torch.testing.assert_close(cut[0], whole[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-4, atol=1e-7)
    assert cut[2] == pytest.approx(whole[2], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("spread", [1e-4, 0.02, 0.3, 2.0])
def test_either_way_to_the_exponential_gives_the_same(vector, spread, monkeypatch):
    """What numpy has vector instructions for depends on the processor."""
    monkeypatch.setattr(arrays, "VECTOR_EXPM1", vector)
    agree(klamp.Objective(kl=klamp.KLTerm()), *case(spread, rubbish=False), "fused")


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_at_all_is_a_loss_of_zero(shape):
    empty, rows = torch.zeros(shape), torch.zeros(shape[0])
    batch = Batch(mask=empty > 0, scores=rows, groups=rows.long(), old_logprobs=empty)
    targets = Targets(
        mask=batch.mask, weights=rows, advantages=empty, corrections=empty, kl_coef=0.0
    )
    logprobs = empty.clone().requires_grad_()
    for function in (klamp.Objective().loss, klamp.Objective().compiled_loss):
        out = function(logprobs, batch, targets, empty)
        out.loss.backward()
        assert float(out.loss.detach()) == 0.0
        assert logprobs.grad.shape == shape
        assert set(reduced(out.metrics).values()) == {0.0}


def test_a_warning_of_numpy_about_what_is_masked_reaches_nobody():
    logprobs, batch, targets = case(0.1)
    objective = klamp.Objective(kl=klamp.KLTerm())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objective.loss(logprobs, batch, targets, objective.shares(targets.mask))


def test_what_requires_a_gradient_by_mistake_is_read_all_the_same():
    logprobs, batch, targets = case(0.1)
    objective = klamp.Objective(kl=klamp.KLTerm())
    shares = objective.shares(targets.mask)
    wanted = outcome(objective.loss, logprobs, batch, targets, shares)
    learning = replace(batch, ref_logprobs=batch.ref_logprobs.clone().requires_grad_())
    found = outcome(objective.loss, logprobs, learning, targets, shares)
    torch.testing.assert_close(found[1], wanted[1])


@pytest.mark.parametrize("vector", [False, True])
def test_small_divergences_keep_their_digits(vector, monkeypatch):
    """k3 of 1e-4 is 5e-9: far below the rounding of e⁻ᵈ, from which it must not be made."""
    monkeypatch.setattr(arrays, "VECTOR_EXPM1", vector)
    logprobs, batch, targets = case(0.0, rubbish=False)
    batch = replace(batch, ref_logprobs=batch.old_logprobs - 1e-4)
    objective = klamp.Objective(kl=klamp.KLTerm())
    shares = objective.shares(targets.mask)
    d = (logprobs - batch.ref_logprobs)[targets.mask].double()
    exact = float((torch.expm1(-d) + d).mean())
    found = reduced(objective.loss(logprobs, batch, targets, shares).metrics)
    assert found["actor/kl"] == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_active_number_that_is_not_finite_is_counted(bad):
    logprobs, batch, targets = case(0.1)
    logprobs[0, 0] = bad
    objective = klamp.Objective(kl=klamp.KLTerm())
    shares = objective.shares(targets.mask)
    fast = outcome(objective.loss, logprobs, batch, targets, shares)
    plain = outcome(objective.plain_loss, logprobs, batch, targets, shares)
    assert fast[2]["actor/nonfinite_tokens"] == plain[2]["actor/nonfinite_tokens"] == 1.0
    assert fast[2] == pytest.approx(plain[2], rel=1e-4, abs=1e-6, nan_ok=True)
    torch.testing.assert_close(fast[1], plain[1], equal_nan=True, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kl", [None, "k3-value-zero", "k3-value-pass", "k1-token-zero", *SEQUENCE])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1e16, 1e16])
@pytest.mark.parametrize("form", ["fused", "written"])
def test_a_log_prob_that_is_no_number_moves_nothing(form, bad, kl):
    logprobs, batch, targets = case(0.1)
    logprobs[0, 0] = bad
    for term in (KLS.get(kl), None if kl is None else unclamped(KLS[kl])):
        objective = klamp.Objective(kl=term)
        shares = objective.shares(targets.mask)
        function = objective.loss if form == "fused" else by_written(objective)
        found = outcome(function, logprobs, batch, targets, shares)
        wanted = outcome(objective.plain_loss, logprobs, batch, targets, shares)
        torch.testing.assert_close(found[1], wanted[1], equal_nan=True, rtol=1e-4, atol=1e-7)
        assert found[2] == pytest.approx(wanted[2], rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("form", ["fused", "written"])
@pytest.mark.parametrize("shift", [30.0, -30.0])
def test_a_wider_clamp_of_the_surrogate_is_not_one_of_what_is_watched(form, shift):
    logprobs, batch, targets = case(0.1, rubbish=False)
    batch = replace(batch, old_logprobs=batch.old_logprobs - shift)
    surrogate = klamp.ClippedSurrogate(clamp_log_ratio=80.0)
    agree(klamp.Objective(surrogate=surrogate), logprobs, batch, targets, form)


@pytest.mark.parametrize("form", ["fused", "written"])
def test_a_loss_beyond_its_range_is_infinite(form, monkeypatch):
    monkeypatch.setattr(fused, "BLOCK", 1)  # each of which is finite
    logprobs, batch, targets = case(0.0, rubbish=False)
    ones = torch.ones_like(logprobs)
    targets = replace(targets, advantages=1e38 * ones, corrections=ones)
    objective = klamp.Objective(reduction="sequence_sum")
    shares = ones
    function = objective.loss if form == "fused" else by_written(objective)
    assert float(function(logprobs, batch, targets, shares).loss) == -math.inf


@pytest.mark.parametrize("form", ["fused", "written"])
@pytest.mark.parametrize("coef", [math.inf, math.nan, 1e39])
def test_without_a_kl_its_coefficient_is_nothing(form, coef):
    logprobs, batch, targets = case(0.1, rubbish=False)
    agree(klamp.Objective(), logprobs, batch, replace(targets, kl_coef=coef), form)


@pytest.mark.parametrize("form", ["fused", "written"])
def test_a_clipped_token_has_no_gradient_however_large_its_gain(form):
    logprobs, batch, targets = case(0.0, rubbish=False)
    batch.old_logprobs[0, 0] -= 19.8
    targets.advantages[0, 0] = 1e30
    objective = klamp.Objective()
    shares = objective.shares(targets.mask)
    function = objective.loss if form == "fused" else by_written(objective)
    found = outcome(function, logprobs, batch, targets, shares)[1]
    wanted = outcome(objective.plain_loss, logprobs, batch, targets, shares)[1]
    assert found[0, 0] == 0.0
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("form", ["fused", "written"])
def test_the_default_dtype_has_no_say(form):
    logprobs, batch, targets = case(0.3)
    torch.set_default_dtype(torch.bfloat16)
    try:
        agree(klamp.Objective(kl=klamp.KLTerm()), logprobs, batch, targets, form)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("form", ["fused", "written"])
def test_weights_are_in_the_shares_alone(form):
    logprobs, batch, targets = case(0.1)
    objective = klamp.Objective()
    shares = objective.shares(targets.mask)
    function = objective.loss if form == "fused" else by_written(objective)
    wanted = outcome(function, logprobs, batch, targets, shares)[1]
    heavy = replace(targets, weights=torch.full_like(targets.weights, math.inf))
    torch.testing.assert_close(outcome(function, logprobs, batch, heavy, shares)[1], wanted)


def test_what_is_not_token_wise_goes_by_the_formulae():
    logprobs, batch, targets = case(0.1)
    batch = replace(batch, exact_kl=torch.zeros_like(logprobs))
    without = replace(targets, kl_to_come=None)
    sequence = klamp.ClippedSurrogate(ratio="sequence")
    assert not token_wise(sequence, None, targets)
    for kl in (
        klamp.KLTerm(weighting="importance"),
        klamp.KLTerm(estimator="abs"),
        klamp.KLTerm(estimator="exact"),
    ):
        assert not written_down(klamp.ClippedSurrogate(), kl, batch)
    kl = klamp.KLTerm(gradient="sequence")
    assert token_wise(klamp.ClippedSurrogate(), kl, targets)
    assert not token_wise(klamp.ClippedSurrogate(), kl, without)
    assert not written_down(klamp.ClippedSurrogate(), kl, replace(batch, ref_logprobs=None))


def test_half_precision_within_its_rounding():
    logprobs, batch, targets = case(0.2)
    objective = klamp.Objective(kl=klamp.KLTerm())
    shares = objective.shares(targets.mask)
    half = logprobs.bfloat16()
    batch = replace(batch, old_logprobs=half.float(), ref_logprobs=half.float() - 0.1)
    fast = outcome(objective.loss, half, batch, targets, shares)
    plain = outcome(objective.plain_loss, half, batch, targets, shares)
    assert fast[1].dtype == torch.bfloat16
    torch.testing.assert_close(fast[0], plain[0])
    torch.testing.assert_close(fast[1], plain[1], rtol=8e-3, atol=1e-6)


def test_the_gradient_can_be_asked_for_twice():
    logprobs, batch, targets = case(0.2)
    objective = klamp.Objective(kl=klamp.KLTerm())
    x = logprobs.clone().requires_grad_()
    out = objective.loss(x, batch, targets, objective.shares(targets.mask))
    out.loss.backward(retain_graph=True)
    once = x.grad.clone()
    (3.0 * out.loss).backward()
    torch.testing.assert_close(x.grad, 4.0 * once)


@pytest.mark.parametrize("around", [torch.inference_mode, lambda: torch.device("meta")])
def test_what_was_kept_from_elsewhere_does_not_harm_training(around):
    """Scratch that is first made in inference mode, or under another default device."""
    logprobs, batch, targets = case(0.2, rubbish=False)
    objective = klamp.Objective(kl=klamp.KLTerm())
    shares = objective.shares(targets.mask)
    wanted = outcome(objective.plain_loss, logprobs, batch, targets, shares)
    fused._KEPT.__dict__.clear()
    with around():
        seen = objective.loss(logprobs, batch, targets, shares).loss
    found = outcome(objective.loss, logprobs, batch, targets, shares)
    assert float(seen) == pytest.approx(float(wanted[0]), abs=1e-5)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=1e-6)


def test_without_numpy_the_formulae_are_used_as_they_stand():
    """In a process in which it cannot be imported, as where only torch and jaxtyping are."""
    script = """
import sys
sys.modules["numpy"] = None
import torch, klamp
from klamp.objective.metrics import reduced
torch.manual_seed(0)
old = -torch.rand(4, 6)
batch = klamp.Batch(mask=torch.ones(4, 6, dtype=torch.bool), scores=torch.rand(4),
                    groups=torch.tensor([0, 0, 1, 1]), old_logprobs=old, ref_logprobs=old - 0.1)
objective = klamp.Objective(kl=klamp.KLTerm())
targets, _ = objective.prepare(batch, objective.init())
logprobs = (old + 0.05).requires_grad_()
out = objective.loss(logprobs, batch, targets, objective.shares(targets.mask))
out.loss.backward()
print(float(out.loss.detach()), float(logprobs.grad.norm()), reduced(out.metrics)["actor/kl"])
"""
    found = []
    for code in (script, script.replace('sys.modules["numpy"] = None', "")):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found.append([float(x) for x in done.stdout.split()])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
