"""The noise of each gradient form at T = 512, measured on a Markov policy.

Per-sample noise to signal: √(trace of the covariance) / |mean| of ∑ₜ cₜ ∇log πₜ over independent
samples, for the coefficients of the token form, of the naive sum of log-ratios to come (what KL in
the reward amounts to), and of ours.
"""

from dataclasses import replace

import pytest
import torch

from klamp.objective.active import later
from klamp.objective.kl import KLTerm
from klamp.types import Batch

VOCABULARY, LENGTH, SAMPLES, GROUP = 16, 512, 512, 8
DRIFT = 0.1  # about 2 nats per response: where a controller holds a run


@pytest.fixture(scope="module")
def samples():
    """Sampled sequences: token before, token, log π and log ref of each."""
    torch.manual_seed(0)
    policy = torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64).log_softmax(-1)
    ref = (policy + DRIFT * torch.randn_like(policy)).log_softmax(-1)
    state, before, tokens = torch.zeros(SAMPLES, dtype=torch.long), [], []
    for _ in range(LENGTH):
        before.append(state)
        state = torch.multinomial(policy[state].exp(), 1).squeeze(1)
        tokens.append(state)
    before, tokens = torch.stack(before, 1), torch.stack(tokens, 1)
    return policy, before, tokens, policy[before, tokens], ref[before, tokens]


def coefficients(form, logp, ref):
    """cₜ of each token, read off the gradient of the term."""
    batch = Batch(
        mask=torch.ones_like(logp, dtype=torch.bool),
        scores=torch.zeros(len(logp)),
        groups=torch.arange(len(logp)) // GROUP,
        old_logprobs=logp,
        ref_logprobs=ref,
    )
    if form == "naive":
        d = logp - ref
        return d + later(d, batch.mask)
    term = KLTerm(gradient=form)
    leaf = logp.clone().requires_grad_()
    to_come = term.to_come(batch)
    return torch.autograd.grad(term(leaf, batch, batch.mask, to_come=to_come).term.sum(), leaf)[0]


def gradients(coef, policy, before, tokens):
    """∑ₜ cₜ ∇log πₜ of each sample, by the logits of the Markov table."""
    onehot = torch.nn.functional.one_hot(tokens, VOCABULARY).double()
    score = coef[..., None] * (onehot - policy.exp()[before])
    table = torch.zeros(len(coef), VOCABULARY, VOCABULARY, dtype=torch.float64)
    rows = torch.arange(len(coef))[:, None].expand_as(before)
    return table.index_put((rows, before), score, accumulate=True).flatten(1)


def noise_to_signal(grads, signal):
    return ((grads - grads.mean(0)).square().sum(1).mean().sqrt() / signal).item()


def test_ours_is_far_quieter_than_the_naive_sum_and_close_to_the_token_form(samples):
    policy, before, tokens, logp, ref = samples
    grads = {
        form: gradients(coefficients(form, logp, ref), policy, before, tokens)
        for form in ("token", "naive", "sequence")
    }
    signal = grads["sequence"].mean(0).norm()  # the quietest unbiased estimate of what is sought
    noise = {form: noise_to_signal(g, signal) for form, g in grads.items()}
    print(f"noise to signal per sample at T = {LENGTH}: {noise}")
    assert noise["naive"] > 8 * noise["sequence"]
    assert noise["sequence"] < 2 * noise["token"]


def test_the_baseline_is_what_makes_it_quiet(samples):
    policy, before, tokens, logp, ref = samples
    with_baseline = coefficients("sequence", logp, ref)
    term = KLTerm(gradient="sequence")
    mask = torch.ones_like(logp, dtype=torch.bool)
    batch = Batch(
        mask=mask,
        scores=torch.zeros(len(logp)),
        groups=torch.arange(len(logp)),
        old_logprobs=logp,
        ref_logprobs=ref,
    )
    leaf = logp.clone().requires_grad_()
    without = torch.autograd.grad(term(leaf, batch, mask, to_come=None).term.sum(), leaf)[0]
    noise = [
        noise_to_signal(gradients(c, policy, before, tokens), 1.0) for c in (without, with_baseline)
    ]
    assert noise[0] > 1.5 * noise[1]


def test_sums_are_aligned_by_the_rank_of_the_active_token():
    """Inserting masked tokens moves columns, not ranks: the sums to come move with the tokens."""
    logp, ref = -torch.rand(2, 4, 6)
    whole = Batch(
        mask=torch.ones(4, 6, dtype=torch.bool),
        scores=torch.zeros(4),
        groups=torch.zeros(4, dtype=torch.long),
        old_logprobs=logp,
        ref_logprobs=ref,
    )
    term = KLTerm(gradient="sequence")
    holes = torch.tensor([True, False, True, True, False, True, True, False, True])
    spread = [torch.full((4, 9), 7.0).masked_scatter(holes.expand(4, 9), x) for x in (logp, ref)]
    holed = replace(
        whole, mask=holes.expand(4, 9).clone(), old_logprobs=spread[0], ref_logprobs=spread[1]
    )
    found = term.to_come(holed)
    torch.testing.assert_close(found[:, holes], term.to_come(whole))
    assert (found[:, ~holes] == 0).all()
