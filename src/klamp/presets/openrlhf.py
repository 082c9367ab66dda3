"""OpenRLHF 0.11.0: PPO and its group-relative variants as ``train_ppo_ray`` computes them.

Settings are the command line's, without their prefix: ``--algo.kl.init_coef`` is ``kl_init_coef``.
Citations name files under ``openrlhf/``. Where upstream averages the KL per token beside a policy
loss per sample (gspo), this preset averages both per sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from klamp.errors import ConfigError
from klamp.objective import losses
from klamp.objective.active import place_on_last
from klamp.objective.advantages import GAE, Advantage, Returns, Whiten, gae, returns_to_go
from klamp.objective.control import controller
from klamp.objective.correction import Correction
from klamp.objective.estimators import clamped_estimate
from klamp.objective.kl import KLTerm
from klamp.objective.objective import Objective
from klamp.objective.reduce import shares, weighted_sum
from klamp.objective.rewards import (
    ClipScores,
    NormaliseScores,
    PenaliseOverlong,
    PenaliseTruncated,
    ScoreStage,
    SubtractOthersMean,
)
from klamp.presets.controllers import AdaptiveKLController as AdaptiveKLController
from klamp.presets.controllers import FixedKLController as FixedKLController
from klamp.types import PerSequence, PerToken, Scalar

KL_CLAMP = 10.0  # models/utils.py compute_approx_kl: clamp(min=-10, max=10)

SHAPING: dict[str, tuple[ScoreStage, ...]] = {  # trainer/ppo_utils/experience_maker.py
    "gae": (),
    "reinforce": (),
    "rloo": (SubtractOthersMean(),),
    "reinforce_baseline": (NormaliseScores(mean="group", std=None),),
    "dr_grpo": (NormaliseScores(mean="group", std=None),),
    "group_norm": (NormaliseScores(mean="group", std="group", eps=1e-9),),
}
WHITENED = ("gae", "reinforce", "reinforce_baseline")  # experience_maker.py


def objective(
    *,
    estimator: str = "gae",
    gamma: float = 1.0,
    lambd: float = 1.0,
    eps_clip: float = 0.2,
    eps_clip_low_high: Sequence[float] | None = None,
    dual_clip: float | None = None,
    policy_loss_type: str = "ppo",
    value_clip: float | None = 0.5,
    kl_init_coef: float = 0.01,
    kl_estimator: str = "k1",
    kl_target: float | None = None,
    kl_horizon: float = 10_000,
    kl_use_loss: bool = False,
    reward_clip_range: Sequence[float] | None = (-10.0, 10.0),
    max_new_tokens: int = 1024,
    overlong_buffer_len: int | None = None,
    overlong_penalty_factor: float = 1.0,
    stop_properly_penalty_coef: float | None = None,
    is_correction_enable: bool = False,
    is_correction_type: str = "tis",
    is_correction_threshold: Sequence[float] = (0.5, 5.0),
    no_std_norm: bool = False,
    entropy_coef: float | None = None,
) -> Objective:
    """PPO by default; ``estimator`` is upstream's advantage estimator."""
    if estimator not in SHAPING:
        raise ConfigError(f"estimator must be one of {', '.join(SHAPING)}, got {estimator!r}")
    if policy_loss_type not in ("ppo", "gspo"):
        raise ConfigError(f"policy_loss_type must be ppo or gspo, got {policy_loss_type!r}")
    stages = list[ScoreStage]()
    if overlong_buffer_len is not None:  # ppo_utils/length_penalty.py, before any shaping
        stages.append(
            PenaliseOverlong(
                max_length=max_new_tokens,
                buffer=overlong_buffer_len,
                factor=overlong_penalty_factor,
            )
        )
    if stop_properly_penalty_coef is not None:  # ppo_utils/length_penalty.py
        stages.append(PenaliseTruncated(coef=stop_properly_penalty_coef))
    stages.extend(SHAPING[estimator])
    if reward_clip_range is not None:  # models/utils.py compute_reward: after the shaping
        stages.append(ClipScores(low=reward_clip_range[0], high=reward_clip_range[1]))
    low, high = eps_clip_low_high or (eps_clip, eps_clip)  # cli/train_ppo_ray.py
    grouped = estimator not in ("gae", "reinforce")  # ppo_trainer.py: then gamma is forced to 1
    gspo = policy_loss_type == "gspo"
    return Objective(
        stages=tuple(stages),
        kl=KLTerm(
            estimator=kl_estimator,  # cli: --algo.kl.estimator k1
            clamp_value=KL_CLAMP,  # models/utils.py, on every estimator
            where="loss" if kl_use_loss else "reward",  # cli: --algo.kl.use_loss
            control=controller(kl_init_coef, kl_target, kl_horizon),  # ppo_utils/kl_controller.py
            watch_reduction="sequence_mean",  # ppo_trainer.py: status["kl"], mean of masked means
        ),
        advantage=Advantage(
            estimator=GAE(gamma=gamma, lam=lambd)
            if estimator == "gae"
            else Returns(gamma=1.0 if grouped else gamma),
            whiten=Whiten(ddof=0, eps=1e-8, floor=True, scale=not no_std_norm)
            if estimator in WHITENED
            else None,  # experience_maker.py: clamp(min=1e-8).rsqrt()
        ),
        correction=_correction(is_correction_type, is_correction_threshold)
        if is_correction_enable and not gspo
        else None,  # models/loss.py: not applied to gspo
        surrogate=losses.ClippedSurrogate(
            low=low,
            high=high,
            dual=dual_clip,  # models/loss.py PolicyLoss
            ratio="sequence" if gspo else "token",
        ),
        value_loss=losses.ValueLoss(clip=value_clip) if estimator == "gae" else None,  # loss.py
        entropy_coef=entropy_coef,
        reduction="sequence_mean" if gspo else "token_mean",  # models/loss.py; utils/loss_utils.py
    )


def _correction(kind: str, bounds: Sequence[float]) -> Correction:
    """models/loss.py; the weights of seq-mask-tis are clamped, as upstream's comment says."""
    forms = {
        "tis": ("token", "truncate"),
        "icepop": ("token", "mask"),
        "seq-mask-tis": ("sequence", "mask"),
    }
    if kind not in forms:
        raise ConfigError(f"is_correction_type must be one of {', '.join(forms)}, got {kind!r}")
    level, action = forms[kind]
    return Correction(level=level, action=action, low=bounds[0], high=bounds[1])


def compute_approx_kl(
    log_probs: PerToken, log_probs_base: PerToken, kl_estimator: str = "k1"
) -> PerToken:
    """k1, k2 or k3, clamped to ±10; its gradient is finite however far the reference is."""
    return clamped_estimate(kl_estimator, log_probs, log_probs_base, clamp_value=KL_CLAMP)


def compute_reward(
    r: PerSequence | float,
    kl_coef: float,
    kl: PerToken,
    action_mask: Tensor | None = None,
    reward_clip_range: Sequence[float] | None = None,
) -> PerToken:
    """−β·kl at every token, plus the clipped score at the last action."""
    scores = torch.as_tensor(r, dtype=kl.dtype, device=kl.device).expand(len(kl))
    if reward_clip_range:
        scores = scores.clamp(min=reward_clip_range[0], max=reward_clip_range[1])
    mask = torch.ones_like(kl, dtype=torch.bool) if action_mask is None else action_mask.bool()
    return place_on_last(scores, mask) - max(kl_coef, 0.0) * kl


def get_advantages_and_returns(
    values: PerToken, rewards: PerToken, action_mask: Tensor | None, gamma: float, lambd: float
) -> tuple[PerToken, PerToken]:
    """GAE over all columns, with values and rewards zeroed where there was no action."""
    v, r = (_zeroed(x, action_mask) for x in (values, rewards))
    return gae(r, v, torch.ones_like(r, dtype=torch.bool), gamma=gamma, lam=lambd)


def get_cumulative_returns(rewards: PerToken, action_mask: Tensor | None, gamma: float) -> PerToken:
    """Discounted returns-to-go over all columns, rewards zeroed where there was no action."""
    r = _zeroed(rewards, action_mask)
    return returns_to_go(r, torch.ones_like(r, dtype=torch.bool), gamma=gamma)


def _zeroed(x: PerToken, mask: Tensor | None) -> PerToken:
    return x if mask is None else torch.where(mask.bool(), x, 0.0)


@dataclass
class PolicyLoss:
    """models/loss.py PolicyLoss, without its parallel and correction arguments."""

    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.2
    dual_clip: float | None = None
    token_level_loss: bool = True
    policy_loss_type: str = "ppo"

    def __call__(
        self,
        log_probs: PerToken,
        old_log_probs: PerToken,
        advantages: PerToken,
        action_mask: Tensor,
    ) -> tuple[Scalar, Scalar, Scalar, None]:
        """(loss, clip ratio, −mean log-ratio, None)."""
        mask = action_mask.bool()
        gspo = self.policy_loss_type == "gspo"
        policy = losses.ClippedSurrogate(
            low=self.clip_eps_low,
            high=self.clip_eps_high,
            dual=self.dual_clip,
            ratio="sequence" if gspo else "token",
        )(log_probs, old_log_probs, advantages, mask)
        per_token = shares(mask, reduction="token_mean")
        per_sample = shares(mask, reduction="sequence_mean")
        loss = weighted_sum(
            policy.loss, per_token if self.token_level_loss and not gspo else per_sample
        )
        clipped = (policy.clipped_low | policy.clipped_high).to(per_token)
        moved = weighted_sum((old_log_probs - log_probs).detach(), per_token)
        return loss, weighted_sum(clipped, per_token), moved, None


@dataclass
class ValueLoss:
    """models/loss.py ValueLoss."""

    clip_eps: float | None = None

    def __call__(
        self, values: PerToken, old_values: PerToken, returns: PerToken, action_mask: Tensor
    ) -> Scalar:
        """½ · token mean of max((V_clip − R)², (V − R)²)."""
        mask = action_mask.bool()
        tokens = losses.ValueLoss(clip=self.clip_eps)(values, old_values, returns, mask)
        return weighted_sum(tokens.loss, shares(mask).to(tokens.loss)).to(values.dtype)
