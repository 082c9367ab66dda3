"""ROLL 0.3.0's functions under their own names, thin over the core (``klamp.presets.roll``)."""

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.errors import ConfigError
from klamp.objective.advantages import Whiten, gae, returns_to_go
from klamp.objective.estimators import clamped_estimate
from klamp.objective.exact import exact_kl
from klamp.objective.groups import Difficulty
from klamp.objective.moments import wide
from klamp.objective.normalise import NormaliseScores
from klamp.objective.reduce import shares, weighted_sum
from klamp.presets.running import RunningMoments
from klamp.types import Batch, PerSequence, PerToken, RowMask, Scalar, TokenMask

ESTIMATORS = {"kl": "k1", "abs": "abs", "mse": "k2", "k3": "k3"}  # utils/functionals.py
KL_CLAMP = 10.0  # utils/functionals.py compute_approx_kl: on k3 only
WHITEN = Whiten(ddof=1, eps=1e-8)  # utils/functionals.py masked_whiten
REDUCTIONS = {  # utils/functionals.py agg_loss
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant_mean",
}


def compute_approx_kl(
    log_probs: Float[Tensor, "B T ..."],
    log_probs_base: Float[Tensor, "B T ..."],
    action_mask: Tensor | None = None,
    kl_penalty: str = "kl",
) -> PerToken:
    """kl, abs, mse, k3 (clamped to ±10), or full from [B, T, V] log-probs; 0 where masked."""
    if kl_penalty == "full":
        kl = exact_kl(log_probs, log_probs_base)
    elif kl_penalty in ESTIMATORS:
        clamp = KL_CLAMP if kl_penalty == "k3" else None
        kl = clamped_estimate(ESTIMATORS[kl_penalty], log_probs, log_probs_base, clamp_value=clamp)
    else:
        known = ", ".join([*ESTIMATORS, "full"])
        raise ConfigError(f"kl_penalty must be one of {known}, got {kl_penalty!r}")
    return kl if action_mask is None else torch.where(action_mask.bool(), kl, 0.0)


def reward_norm(
    response_level_rewards: PerSequence,
    n_sample: int = -1,
    running_ctrl: dict[str, RunningMoments] | None = None,
    norm_mean_type: str | None = None,
    norm_std_type: str | None = None,
) -> PerSequence:
    """(r − mean) / (std + 1e-6), each by batch, group of n_sample, running or none.

    ``running_ctrl={"domain": RunningMoments()}`` is updated by the call.
    """
    rewards = wide(response_level_rewards)
    stage = NormaliseScores(
        mean=norm_mean_type,
        std=norm_std_type,
        eps=1e-6,
        ddof=1,
        no_spread="divide",
        group_of_one="zero",
    )
    running = next(iter((running_ctrl or {"domain": RunningMoments()}).values()))
    batch = _batch(response_level_rewards, max(n_sample, 1))
    scores, memory, _ = stage(rewards, batch, ((0, running.moments),))
    running.moments = dict(memory)[0]
    return scores.to(response_level_rewards)


def compute_clip_fraction(values: Tensor, clip_max: float, clip_min: float) -> Scalar:
    """The fraction of values that lie outside [clip_min, clip_max]."""
    return ((values > clip_max) | (values < clip_min)).float().mean()


def difficulty_mask(
    scores: PerSequence,
    n_sample: int = -1,
    low_threshold: float = 0.1,
    high_threshold: float = 0.95,
) -> RowMask:
    """True where low < mean score of the group of n_sample < high; all True without groups."""
    batch = _batch(scores, max(n_sample, 1))
    return Difficulty(low=low_threshold, high=high_threshold)(wide(scores), batch).keep


def compute_sample_weights(
    response_mask: Tensor,
    difficulty: PerSequence | None = None,
    difficulty_loss_weight: bool = False,
    length_loss_weight: bool = False,
) -> PerSequence:
    """0.5 + 1.5·difficulty, and 1.5 down to 0.5 by length, of mean 1."""
    mask = response_mask.bool()
    scores = torch.zeros(len(mask), device=mask.device)
    batch = _batch(scores, 1, mask=mask, difficulty=difficulty)
    weigh = difficulty_loss_weight and difficulty is not None
    weights = Difficulty(weigh_difficulty=weigh, weigh_length=length_loss_weight)
    return weights(wide(scores), batch).weights.to(scores)


def agg_loss(
    loss_mat: PerToken,
    loss_mask: Tensor,
    loss_agg_mode: str,
    batch_num_tokens: float | Tensor | None = None,
    global_valid_samples: float | Tensor | None = None,
    weights: PerSequence | None = None,
) -> Scalar:
    """A per-token loss as one number; the totals of a whole step may be given."""
    if loss_agg_mode not in REDUCTIONS:
        raise ConfigError(
            f"loss_agg_mode must be one of {', '.join(REDUCTIONS)}, got {loss_agg_mode!r}"
        )
    mask: TokenMask = loss_mask.bool()
    reduction = REDUCTIONS[loss_agg_mode]
    width = float(mask.shape[1]) if reduction == "constant_mean" else None
    total = weighted_sum(loss_mat, shares(mask, weights, reduction=reduction, constant=width))
    rows = mask.any(dim=-1).sum().clamp(min=1)
    if reduction == "constant_mean":  # upstream does not divide by the number of sequences
        return total * rows
    if reduction == "token_mean" and batch_num_tokens is not None:
        return total * (mask.sum() / batch_num_tokens)
    if reduction != "token_mean" and global_valid_samples is not None:
        return total * (rows / global_valid_samples)
    return total


def masked_whiten(values: PerToken, mask: Tensor, shift_mean: bool = True) -> PerToken:
    """(x − mean) / √(var + 1e-8) by the masked values, at every position."""
    mean, scale = WHITEN.statistics(values, mask.bool())
    whitened = (values - mean) * scale
    return whitened if shift_mean else whitened + mean


def compute_gae_advantage_return(
    token_level_rewards: PerToken, values: PerToken, gamma: float, lambd: float
) -> tuple[PerToken, PerToken]:
    """GAE over all columns."""
    everywhere = torch.ones_like(values, dtype=torch.bool)
    return gae(token_level_rewards, values, everywhere, gamma=gamma, lam=lambd)


def compute_reinforce_return(
    token_level_rewards: PerToken, gamma: float, lambd: float
) -> tuple[PerToken, PerToken]:
    """Discounted returns-to-go over all columns, twice."""
    everywhere = torch.ones_like(token_level_rewards, dtype=torch.bool)
    returns = returns_to_go(token_level_rewards, everywhere, gamma=gamma)
    return returns, returns


def _batch(
    scores: PerSequence,
    n_sample: int,
    mask: TokenMask | None = None,
    difficulty: PerSequence | None = None,
) -> Batch:
    rows = torch.arange(len(scores), device=scores.device)
    mask = torch.ones_like(rows, dtype=torch.bool)[:, None] if mask is None else mask
    return Batch(
        mask=mask,
        scores=scores,
        groups=rows // n_sample,
        old_logprobs=torch.zeros_like(mask, dtype=torch.float32),
        difficulty=difficulty,
    )
