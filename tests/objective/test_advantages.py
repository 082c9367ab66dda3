from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_moments import together

from helpers import assert_close, prefix_mask, tensor
from klamp.errors import ConfigError, DataError
from klamp.objective.advantages import GAE, Advantage, Returns, Whiten, gae, returns_to_go

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


NAN = float("nan")
SETTINGS = [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.9, 0.0), (0, 1)]
WIDTHS = [1, 2, 5, 14, 15, 62, 63, 64, 70, 300]


def masks_of(width):
    """One of each kind: full, in front, and with holes beside a full and an empty row."""
    holes = torch.rand(6, width) < 0.6
    holes[0], holes[1] = True, False
    holes[2] = torch.arange(width) == width - 1
    lengths = torch.randint(0, width + 1, (6,)).tolist()
    return {
        "full": torch.ones(6, width, dtype=torch.bool),
        "in front": prefix_mask([0, *lengths[1:]], width),
        "holes": holes,
        "empty": torch.zeros(6, width, dtype=torch.bool),
    }


@pytest.mark.parametrize(("gamma", "lam"), SETTINGS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["full", "in front", "holes", "empty"])
def test_both_equal_the_loop_on_active_tokens(kind, width, gamma, lam):
    """Whatever stands at masked tokens, which get 0."""
    mask = masks_of(width)[kind]
    rewards, values = torch.randn(2, 6, width, dtype=torch.float64).where(mask, NAN)
    expected, totals = by_loop(rewards, values, mask, gamma, lam)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    assert_close(advantages, expected)
    assert_close(returns, torch.where(mask, expected + values, 0.0))
    assert_close(returns_to_go(rewards, mask, gamma=gamma), totals)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0, 0)])
def test_nothing_gives_nothing(shape):
    nothing, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for found in (*gae(nothing, nothing, mask), returns_to_go(nothing, mask)):
        assert found.shape == shape


@pytest.mark.parametrize("kind", ["full", "in front", "holes"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.01), (torch.float32, 1e-5)]
)
def test_every_float_comes_out_as_it_went_in(kind, dtype, tolerance):
    mask = masks_of(70)[kind]
    rewards, values = torch.randn(2, 6, 70).to(dtype)
    dirty = [x.where(mask, NAN) for x in (rewards, values)]
    expected, totals = by_loop(rewards.double(), values.double(), mask, 0.9, 0.9)
    advantages, returns = gae(*dirty, mask, gamma=0.9, lam=0.9)
    assert advantages.dtype == returns.dtype == dtype
    assert (advantages.double() - expected).abs().max() < tolerance
    difference = returns_to_go(dirty[0], mask, gamma=0.9).double() - totals
    assert difference.abs().max() < tolerance


@pytest.mark.parametrize("kind", ["full", "in front", "holes"])
def test_a_row_of_any_size_leaves_the_others_alone(kind):
    """To the last bit: rows share blocks of memory, never a sum."""
    mask = masks_of(70)[kind]
    rewards, values = torch.randn(2, 6, 70)
    quiet = gae(rewards, values, mask, lam=0.9)
    rewards[0], values[0] = 1e30, -1e30
    loud = gae(rewards, values, mask, lam=0.9)
    for a, b in zip(quiet, loud, strict=True):
        assert torch.equal(a[1:], b[1:])


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
    """Chunks of two rows, the last of one; each has its own kind of mask, in any order."""
    rewards, values = torch.randn(2, 11, 40)
    mask = torch.rand(11, 40) < 0.7
    mask[:2], mask[4:6] = True, prefix_mask([3, 40], 40)
    mask[8:10] = False
    rewards, values = (x.where(mask, NAN) for x in (rewards, values))
    whole = (*gae(rewards, values, mask), returns_to_go(rewards, mask))
    monkeypatch.setattr("klamp.objective.scan.CHUNK_TOKENS", 80)
    for a, b in zip(
        (*gae(rewards, values, mask), returns_to_go(rewards, mask)), whole, strict=True
    ):
        assert_close(a, b)


@pytest.mark.parametrize("kind", ["full", "in front", "holes"])
def test_the_memory_layout_does_not_matter(kind):
    rewards, values = (x.t() for x in torch.randn(2, 70, 6))
    plain = masks_of(70)[kind]
    expected = gae(rewards.contiguous(), values.contiguous(), plain)
    for mask in (plain, plain.t().contiguous().t()):
        assert_close(gae(rewards, values, mask), expected)
        assert_close(returns_to_go(rewards, mask), returns_to_go(rewards.contiguous(), plain))


def test_mixed_dtypes_are_computed_in_the_widest():
    advantages, returns = gae(torch.randn(2, 3), torch.randn(2, 3).double(), ON.expand(2, 3))
    assert advantages.dtype == returns.dtype == torch.float64


@pytest.mark.parametrize("kind", ["full", "in front", "holes"])
def test_inputs_are_not_edited(kind):
    rewards, values, mask = *torch.randn(2, 6, 80), masks_of(80)[kind]
    copies = rewards.clone(), values.clone(), mask.clone()
    gae(rewards, values, mask)
    returns_to_go(rewards, mask)
    for x, kept in zip((rewards, values, mask), copies, strict=True):
        assert torch.equal(x, kept)


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
