"""open-instruct (main, August 2026): GRPO as ``grpo_fast`` computes it.

Citations name files under ``open_instruct/``. Left to the sampler, as upstream does it there:
dropping groups of zero std, active sampling, staleness, packing.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.errors import ConfigError
from klamp.objective.advantages import Advantage, Returns
from klamp.objective.control import FixedKL
from klamp.objective.correction import Correction
from klamp.objective.kl import KLTerm
from klamp.objective.logratio import (
    EXP_LIMIT,
    FLOAT32_LIMIT,
    RATIO_LIMIT,
    excess,
    log_ratio,
    ratio,
)
from klamp.objective.losses import CISPO, ClippedSurrogate, Surrogate
from klamp.objective.objective import Objective
from klamp.objective.rewards import NormaliseScores
from klamp.objective.settings import is_finite
from klamp.types import PerToken

ESTIMATORS = ("k1", "k2", "k3", "k1")  # model_utils.py estimate_kl; index 3 is ratio · k1
RHO_CLAMP, LARGEST_RHO = 10.0, 22026.5  # grpo_utils.py: log π_old/μ is clamped to ±10; e¹⁰
KL_CLAMP = 40.0  # grpo_utils.py: (new_logprobs - ref_logprobs).clamp(-40, 40)


def objective(
    *,
    beta: float = 0.05,
    kl_estimator: int = 2,
    clip_lower: float = 0.2,
    clip_higher: float = 0.272,
    loss_fn: str = "dapo",
    loss_denominator: str | float = "token",
    advantage_normalization_type: str = "centered",
    use_rho_correction: bool = True,
    rho_clamp_lower_bound: float = 0.0,
    rho_clamp_upper_bound: float = 2.0,
    rho_mask_lower_bound: float = 0.0,
    rho_mask_upper_bound: float = 0.0,
    rho_mask_sequence_level: bool = False,
) -> Objective:
    """GRPO, centred by group, k3 in the loss, token mean.

    A number as ``loss_denominator`` is a length per sequence here; upstream divides the sum over
    the whole step by it, which makes the gradient grow with the number of samples.
    """
    _check_estimator(kl_estimator)
    token = loss_denominator == "token"
    if not token and not is_finite(loss_denominator):
        raise ConfigError(f"loss_denominator must be 'token' or a number, got {loss_denominator!r}")
    return Objective(
        stages=(_normalise(advantage_normalization_type),),
        kl=KLTerm(
            estimator=ESTIMATORS[kl_estimator],  # grpo_utils.py kl_estimator: Literal[0, 1, 2, 3]
            weighting="importance" if kl_estimator == 3 else None,  # model_utils.py: ratio * diff
            clamp_log_ratio=KL_CLAMP,  # grpo_utils.py
            where="loss",  # grpo_fast.py: pg_loss + beta * kl
            control=FixedKL(coef=beta),  # grpo_utils.py beta = 0.05
        ),
        advantage=Advantage(estimator=Returns(gamma=1.0)),  # data_loader.py: one per response
        correction=_rho(  # grpo_utils.py: use_rho_correction and rho_*
            (rho_clamp_lower_bound, rho_clamp_upper_bound),
            (rho_mask_lower_bound, rho_mask_upper_bound),
            rho_mask_sequence_level,
        )
        if use_rho_correction
        else None,
        surrogate=_surrogate(loss_fn, clip_lower, clip_higher),  # grpo_utils.py clip_lower/higher
        reduction="token_mean" if token else "constant_mean",  # grpo_utils.py loss_denominator
        constant=None if token else float(loss_denominator),
    )


def _check_estimator(kl_estimator: int) -> None:
    if kl_estimator not in range(4):
        raise ConfigError(f"kl_estimator must be 0, 1, 2 or 3, got {kl_estimator!r}")


def _normalise(kind: str) -> NormaliseScores:
    """data_loader.py: scores − mean, over std (numpy's, ddof 0) + 1e-8 for ``standard``."""
    if kind not in ("centered", "standard"):
        raise ConfigError(
            f"advantage_normalization_type must be centered or standard, got {kind!r}"
        )
    return NormaliseScores(
        mean="group", std="group" if kind == "standard" else None, eps=1e-8, ddof=0
    )


def _surrogate(loss_fn: str, low: float, high: float, clamp: float = RATIO_LIMIT) -> Surrogate:
    if loss_fn == "dapo":
        return ClippedSurrogate(low=low, high=high, clamp_log_ratio=clamp)
    if loss_fn == "cispo":
        return CISPO(low=None, high=high)
    raise ConfigError(f"loss_fn must be dapo or cispo, got {loss_fn!r}")


def _rho(clamp: tuple[float, float], mask: tuple[float, float], sequence: bool) -> Correction:
    """grpo_utils.py: the log-ratio clamped to ±10; bounds of 0 are off, upstream's sentinel."""
    level = "sequence" if sequence else "token"
    cap = clamp[1] or LARGEST_RHO
    if not any(mask):
        return Correction(
            level=level, action="truncate", low=clamp[0], high=cap, clamp_log_ratio=RHO_CLAMP
        )
    return Correction(
        level=level,
        action="mask",
        low=mask[0],
        high=mask[1] or LARGEST_RHO,
        floor=clamp[0],
        cap=cap,
        weight=level,
        clamp_log_ratio=RHO_CLAMP,
    )


def estimate_kl(ref_logprobs_diff: PerToken, ratio: PerToken) -> Float[Tensor, "4 B T"]:
    """d, d²/2, e⁻ᵈ − 1 + d, ratio · d, stacked (model_utils.py)."""
    d = ref_logprobs_diff
    return torch.stack([d, 0.5 * d.square(), excess(-d, limit=FLOAT32_LIMIT), ratio * d])


def grpo_loss(
    logprobs: PerToken,
    old_logprobs: PerToken,
    ref_logprobs: PerToken,
    advantages: PerToken,
    *,
    loss_fn: str = "dapo",
    kl_estimator: int = 2,
    clip_lower: float = 0.2,
    clip_higher: float = 0.272,
) -> tuple[PerToken, PerToken, PerToken]:
    """(policy loss, 1 where clipped, KL) of each token (grpo_utils.py)."""
    _check_estimator(kl_estimator)
    everywhere = torch.ones_like(logprobs, dtype=torch.bool)
    # As far as float32 goes: upstream has no clamp here.
    surrogate = _surrogate(loss_fn, clip_lower, clip_higher, clamp=EXP_LIMIT)
    policy = surrogate(logprobs, old_logprobs, advantages, everywhere)
    diff = log_ratio(logprobs, ref_logprobs, bounds=(-KL_CLAMP, KL_CLAMP)).value
    kl = estimate_kl(diff, ratio(log_ratio(logprobs, old_logprobs).value))[kl_estimator]
    return policy.loss, (policy.clipped_low | policy.clipped_high).to(logprobs.dtype), kl
