from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_moments import together

from helpers import assert_close, prefix_mask, tensor
from klamp.errors import ConfigError, DataError
from klamp.objective.advantages import GAE, Advantage, Returns, Whiten, gae, returns_to_go

HOLES = torch.tensor([[0, 1, 0, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]).bool()
ON = torch.ones(1, 3, dtype=torch.bool)


def by_loop(rewards, values, mask, gamma, lam):
    """GAE and returns-to-go as the papers write them, token by token."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for b in range(len(mask)):
        ahead, next_value, total = 0.0, 0.0, 0.0
        for t in reversed(mask[b].nonzero().flatten().tolist()):
            delta = rewards[b, t] + gamma * next_value - values[b, t]
            ahead = delta + gamma * lam * ahead
            total = rewards[b, t] + gamma * total
            next_value = values[b, t]
            advantages[b, t], returns[b, t] = ahead, total
    return advantages, returns


def insert(mask, x, fill):
    """x on the active positions of a wider mask, something else between them."""
    return torch.full(mask.shape, fill).masked_scatter(mask, x)


def test_returns_by_hand():
    # 4, 2 + ½·4, 1 + ½·4
    assert_close(returns_to_go(tensor([1, 2, 4]), ON, gamma=0.5), tensor([3.0, 4.0, 4.0]))


def test_gae_by_hand():
    # γ = λ = ½: δ₂ = 4 − 2 = 2, δ₁ = 2 + ½·2 − 4 = −1, δ₀ = 1 + ½·4 − 1 = 2
    # A₂ = 2, A₁ = −1 + ¼·2 = −½, A₀ = 2 + ¼·(−½) = 1.875; returns A + V
    rewards, values = tensor([1, 2, 4]), tensor([1, 4, 2])
    advantages, returns = gae(rewards, values, ON, gamma=0.5, lam=0.5)
    assert_close(advantages, tensor([1.875, -0.5, 2.0]))
    assert_close(returns, tensor([2.875, 3.5, 4.0]))


@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.9, 0.0), (0, 1)]
)
@pytest.mark.parametrize("width", [5, 32, 70])
def test_both_equal_the_loop_on_active_tokens_with_holes(width, gamma, lam):
    rewards, values = torch.randn(2, 6, width, dtype=torch.float64)
    for mask in (torch.rand(6, width) < 0.6, prefix_mask([0, 1, 2, 3, 4, 5], width)):
        expected, totals = by_loop(rewards, values, mask, gamma, lam)
        advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
        assert_close(advantages, expected)
        assert_close(torch.where(mask, returns - values, 0.0), expected)
        assert (returns[~mask] == 0).all()
        assert_close(returns_to_go(rewards, mask, gamma=gamma), totals)


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_inserting_masked_tokens_changes_nothing(junk):
    rewards, values = torch.randn(2, 4, 3)
    wide = torch.tensor([0, 1, 0, 0, 1, 1, 0], dtype=torch.bool).expand(4, 7)
    inserted = [insert(wide, x, junk) for x in (rewards, values)]
    on = torch.ones(4, 3, dtype=torch.bool)
    for plain, spread in (
        (gae(rewards, values, on), gae(*inserted, wide)),
        ((returns_to_go(rewards, on),), (returns_to_go(inserted[0], wide),)),
        (
            Advantage(clip=1.0)(rewards, None, on)[:2],
            Advantage(clip=1.0)(inserted[0], None, wide)[:2],
        ),
    ):
        for a, b in zip(plain, spread, strict=True):
            assert_close(b[wide].view(4, 3), a)
            assert (b[~wide] == 0).all()


def test_rows_are_cut_into_chunks_without_a_seam(monkeypatch):
    rewards, values, mask = *torch.randn(2, 9, 40), torch.rand(9, 40) < 0.7
    mask[:3] = True
    whole = (*gae(rewards, values, mask), returns_to_go(rewards, mask))
    monkeypatch.setattr("klamp.objective.scan.CHUNK_TOKENS", 80)
    for a, b in zip(
        (*gae(rewards, values, mask), returns_to_go(rewards, mask)), whole, strict=True
    ):
        assert_close(a, b)


def test_the_memory_layout_does_not_matter():
    rewards, values = (x.t() for x in torch.randn(2, 64, 4))
    mask = torch.ones(4, 64, dtype=torch.bool)
    expected = gae(rewards.contiguous(), values.contiguous(), mask)
    assert_close(gae(rewards, values, mask), expected)
    assert_close(returns_to_go(rewards, mask), returns_to_go(rewards.contiguous(), mask))


def test_mixed_dtypes_are_computed_in_the_widest():
    advantages, returns = gae(torch.randn(2, 3), torch.randn(2, 3).double(), ON.expand(2, 3))
    assert advantages.dtype == returns.dtype == torch.float64


def test_inputs_are_not_edited():
    rewards, values, mask = *torch.randn(2, 4, 33), torch.ones(4, 33, dtype=torch.bool)
    copies = rewards.clone(), values.clone()
    gae(rewards, values, mask)
    returns_to_go(rewards, mask)
    assert torch.equal(rewards, copies[0])
    assert torch.equal(values, copies[1])


def test_values_that_carry_a_gradient_are_data():
    rewards, values = torch.randn(2, 4, 3)
    mask = torch.ones(4, 3, dtype=torch.bool)
    found = gae(rewards, values.clone().requires_grad_(), mask)
    assert_close(found, gae(rewards, values, mask))
    assert not found[0].requires_grad


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**20), st.sampled_from([0, 1]))
def test_whitened_active_tokens_have_mean_zero_and_variance_one(seed, ddof):
    torch.manual_seed(seed)
    x, mask = 50 + 7 * torch.randn(4, 6, dtype=torch.float64), torch.rand(4, 6) < 0.6
    mask[0, :2] = True
    found = Whiten(ddof=ddof, eps=1e-12)(torch.where(mask, x, float("nan")), mask)
    assert_close(found[mask].mean(), torch.tensor(0.0, dtype=torch.float64))
    assert_close(found[mask].var(correction=ddof), torch.tensor(1.0, dtype=torch.float64))
    assert (found[~mask] == 0).all()


def test_whitening_by_hand():
    # 1, 3, 5: mean 3, variance 8/3 (ddof 0) or 4 (ddof 1)
    x = tensor([1, 3, 5])
    assert_close(Whiten(eps=1 / 3)(x, ON), tensor([-2, 0, 2]) / 3**0.5)
    assert_close(Whiten(ddof=1, eps=5.0)(x, ON), tensor([-2, 0, 2]) / 3.0)
    # floor: √max(var, eps), not √(var + eps)
    assert_close(Whiten(ddof=1, eps=0.1, floor=True)(x, ON), tensor([-1.0, 0.0, 1.0]))
    assert_close(Whiten(ddof=1, eps=16.0, floor=True)(x, ON), tensor([-0.5, 0.0, 0.5]))
    assert_close(Whiten(ddof=1, eps=5.0, centre=False)(x, ON), x / 3.0)
    assert_close(Whiten(scale=False)(x, ON), tensor([-2.0, 0.0, 2.0]))


def test_statistics_may_see_less_than_is_whitened():
    # Counted 1 and 3: mean 2, variance 1
    counted = torch.tensor([[True, True, False]])
    found = Whiten(eps=1e-12)(tensor([1, 3, 7]), ON, counted=counted)
    assert_close(found, tensor([-1.0, 1.0, 5.0]))


def test_one_value_or_none_whitens_to_zero():
    assert_close(Whiten(ddof=1)(tensor([7.0]), ON[:, :1]), tensor([0.0]))
    assert_close(Whiten()(tensor([7, 8, 9]), ~ON), tensor([0.0, 0.0, 0.0]))


def test_two_workers_whiten_as_one_would():
    x, mask = torch.randn(5, 4) + 3, torch.rand(5, 4) < 0.7
    halves = (slice(0, 1), slice(1, 5))
    parts = together(*(lambda w, s=s: Whiten(ddof=1)(x[s], mask[s], w) for s in halves))
    assert_close(torch.cat(parts), Whiten(ddof=1)(x, mask))


def test_clip_fractions_by_hand():
    # Rewards 3, −0.5, 2 | 9 (masked): 2 of 3 beyond ±1. Clipped to 1, −0.5, 1: returns 1.5, 0.5, 1.
    rewards, mask = tensor([3.0, -0.5, 2.0, 9.0]), prefix_mask([3], 4)
    found = Advantage(reward_clip=1.0, clip=0.75)(rewards, None, mask)
    assert float(found.metrics["critic/token_reward_clip_frac"]) == pytest.approx(2 / 3)
    assert float(found.metrics["critic/advantage_clip_frac"]) == pytest.approx(2 / 3)
    assert_close(found.advantages, tensor([0.75, 0.5, 0.75, 0.0]))
    assert_close(found.returns, tensor([1.5, 0.5, 1.0, 0.0]))


def test_a_value_at_the_bound_is_not_clipped():
    found = Advantage(reward_clip=1.0, clip=1.0)(tensor([0.0, 0.0, 1.0]), None, ON)
    assert float(found.metrics["critic/token_reward_clip_frac"]) == 0
    assert float(found.metrics["critic/advantage_clip_frac"]) == 0


def test_fractions_are_of_the_counted_tokens():
    counted = torch.tensor([[True, True, False]])
    found = Advantage(reward_clip=1.0)(tensor([3.0, 0.0, 3.0]), None, ON, counted=counted)
    assert float(found.metrics["critic/token_reward_clip_frac"]) == 0.5


def test_rewards_are_whitened_before_the_estimate_and_advantages_after():
    rewards, white = tensor([1, 2, 6]), Whiten(eps=1e-12)
    before = Advantage(whiten_rewards=white)(rewards, None, ON).advantages
    after = Advantage(whiten=white)(rewards, None, ON)
    assert_close(before, returns_to_go(white(rewards, ON), ON))
    assert_close(after.advantages, white(returns_to_go(rewards, ON), ON))
    assert_close(after.returns, returns_to_go(rewards, ON))  # a value function learns raw returns


@pytest.mark.parametrize("estimator", [Returns(), GAE(gamma=1.0, lam=1.0)])
@pytest.mark.parametrize("size", [1e30, 3e38])
def test_rewards_of_any_size_give_bounded_advantages(estimator, size):
    rewards = torch.full((2, 512), size)
    rewards[1] = -size
    values = rewards * (-1.0) ** torch.arange(512)  # one minus the next is twice the size
    mask = torch.ones(2, 512, dtype=torch.bool)
    plain = Advantage(estimator=estimator)
    for setting in (
        plain,
        replace(plain, whiten=Whiten()),
        replace(plain, whiten_rewards=Whiten()),
    ):
        found = setting(rewards, values, mask)
        assert found.returns.isfinite().all()
        assert found.advantages.abs().max() <= 1e20


def test_gae_needs_values():
    with pytest.raises(DataError, match=r"GAE needs Batch\.values, got None; .* use Returns"):
        GAE()(tensor([1, 2, 3]), None, ON)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Returns(gamma=1.1), r"Returns\.gamma .* >= 0 and <= 1, got 1\.1"),
        (lambda: GAE(lam=-0.1), r"GAE\.lam .* >= 0 and <= 1, got -0\.1"),
        (lambda: GAE(gamma=float("nan")), r"GAE\.gamma must be a finite number .* got nan"),
        (lambda: Whiten(ddof=2), r"Whiten\.ddof must be one of 0, 1, got 2"),
        (lambda: Whiten(eps=0.0), r"Whiten\.eps .* > 0, got 0\.0"),
        (lambda: Advantage(clip=0.0), r"Advantage\.clip .* > 0, got 0\.0; None turns it off"),
        (lambda: Advantage(reward_clip=-1.0), r"Advantage\.reward_clip .* > 0, got -1\.0; None"),
    ],
)
def test_a_wrong_setting_is_refused_when_built(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
