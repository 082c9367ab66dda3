"""ROLL 0.3.0: the RLVR pipeline's objective, with the settings of its example files.

Citations name files under ``roll/``. Not followed, because they depend on padding or on the cut:
sample weights have mean 1 over the batch (upstream: the micro-batch), the value loss has the same
denominator as the rest, masks apply in every averaging mode; statistics are the whole batch's
(upstream: each domain's); entropy is averaged over the loss mask. Not offered: importance weights
other than per token and the train-infer filters (use ``Correction``), ``error_max_len_clip``,
``rl_loss_coef``, and settings that upstream reads but never uses.
"""

from klamp.errors import ConfigError
from klamp.objective.advantages import GAE, Advantage, Returns
from klamp.objective.control import FixedKL, controller
from klamp.objective.correction import Correction
from klamp.objective.groups import Difficulty
from klamp.objective.kl import KLTerm
from klamp.objective.losses import ClippedSurrogate, ValueLoss
from klamp.objective.objective import Objective
from klamp.objective.rewards import ClipScores, NormaliseScores, ScoreStage
from klamp.presets.roll_functions import ESTIMATORS, KL_CLAMP, REDUCTIONS, WHITEN
from klamp.presets.roll_functions import agg_loss as agg_loss
from klamp.presets.roll_functions import compute_approx_kl as compute_approx_kl
from klamp.presets.roll_functions import compute_clip_fraction as compute_clip_fraction
from klamp.presets.roll_functions import (
    compute_gae_advantage_return as compute_gae_advantage_return,
)
from klamp.presets.roll_functions import compute_reinforce_return as compute_reinforce_return
from klamp.presets.roll_functions import compute_sample_weights as compute_sample_weights
from klamp.presets.roll_functions import difficulty_mask as difficulty_mask
from klamp.presets.roll_functions import masked_whiten as masked_whiten
from klamp.presets.roll_functions import reward_norm as reward_norm
from klamp.presets.running import RunningMoments as RunningMoments


def objective(
    *,
    adv_estimator: str = "grpo",
    norm_mean_type: str | None = None,
    norm_std_type: str | None = None,
    reward_clip: float | None = 10.0,
    advantage_clip: float | None = 2.0,
    whiten_rewards: bool = False,
    whiten_advantages: bool = False,
    gamma: float = 1.0,
    lambd: float = 0.95,
    difficulty_mask: bool = True,
    difficulty_low_threshold: float = 0.1,
    difficulty_high_threshold: float = 0.95,
    difficulty_loss_weight: bool = False,
    length_loss_weight: bool = False,
    max_len_mask: bool = False,
    kl_penalty: str = "kl",
    init_kl_coef: float = 0.2,
    target_kl: float | None = None,
    kl_horizon: float = 10_000,
    add_token_level_kl: bool = False,
    use_kl_loss: bool = False,
    kl_loss_coef: float = 0.0,
    pg_clip: float = 0.2,
    pg_clip_low: float = 0.2,
    pg_clip_high: float = 0.2,
    use_pg_clip_range: bool = False,
    dual_clip_loss: bool = False,
    importance_sampling: str = "token",
    value_clip: float | None = None,
    entropy_loss_coef: float = 0.0,
    loss_agg_mode: str = "seq-mean-token-mean",
    response_length: int | None = None,
    is_weight_enabled: bool = False,
    is_weight_upper_bound: float = 1.2,
) -> Objective:
    """GRPO by default: normalise by group, clip, clip again per token, clip the advantage.

    ``loss_agg_mode="seq-mean-token-sum-norm"`` divides by ``response_length`` (upstream: by the
    width of the padded batch).
    """
    _check(adv_estimator, importance_sampling, loss_agg_mode, response_length)
    if adv_estimator == "grpo":  # utils/functionals.py: grpo overwrites both types
        if {norm_mean_type, norm_std_type} - {None, "group"}:
            raise ConfigError(
                f"adv_estimator='grpo' normalises by group, got norm_mean_type={norm_mean_type!r} "
                f"norm_std_type={norm_std_type!r}; leave them None or use 'reinforce'"
            )
        norm_mean_type, norm_std_type = "group", "group"
    low, high = (pg_clip_low, pg_clip_high) if use_pg_clip_range else (pg_clip, pg_clip)
    reduction = REDUCTIONS[loss_agg_mode]
    return Objective(
        stages=_stages(norm_mean_type, norm_std_type, reward_clip),
        kl=_kl_in_reward(kl_penalty, init_kl_coef, target_kl, kl_horizon)
        if add_token_level_kl and not use_kl_loss
        else _kl_in_loss(kl_loss_coef, add_token_level_kl)
        if use_kl_loss
        else None,
        advantage=Advantage(
            estimator=GAE(gamma=gamma, lam=lambd)
            if adv_estimator == "gae"
            else Returns(gamma=gamma),  # utils/functionals.py compute_advantage
            reward_clip=reward_clip,  # utils/functionals.py compute_token_reward: the same bound
            whiten_rewards=WHITEN if whiten_rewards else None,
            whiten=WHITEN if whiten_advantages else None,
            clip=advantage_clip,  # utils/functionals.py compute_advantage
        ),
        difficulty=Difficulty(
            low=difficulty_low_threshold if difficulty_mask else None,
            high=difficulty_high_threshold if difficulty_mask else None,
            drop_truncated=max_len_mask,
            weigh_difficulty=difficulty_loss_weight,
            weigh_length=length_loss_weight,
            weights_on="policy",  # pipeline/rlvr/actor_worker.py: weights on the pg loss only
            denominator="shrink",  # pipeline/rlvr/actor_worker.py: final_response_mask averages
        ),
        correction=Correction(level="token", action="truncate", high=is_weight_upper_bound)
        if is_weight_enabled
        else None,  # utils/train_infer_corrections.py
        surrogate=ClippedSurrogate(
            low=low,
            high=high,
            dual=1.0 + 2.0 * pg_clip if dual_clip_loss else None,  # actor_worker.py
            ratio="sequence" if importance_sampling == "seq" else "token",  # actor_worker.py
        ),
        value_loss=ValueLoss(clip=value_clip) if adv_estimator == "gae" else None,
        entropy_coef=entropy_loss_coef if entropy_loss_coef > 0 else None,  # actor_worker.py
        reduction=reduction,
        constant=response_length if reduction == "constant_mean" else None,
    )


def _check(
    adv_estimator: str, importance_sampling: str, loss_agg_mode: str, response_length: int | None
) -> None:
    for name, value, known in (
        ("adv_estimator", adv_estimator, ("grpo", "gae", "reinforce")),
        ("importance_sampling", importance_sampling, ("token", "seq")),
        ("loss_agg_mode", loss_agg_mode, tuple(REDUCTIONS)),
    ):
        if value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if loss_agg_mode == "seq-mean-token-sum-norm" and response_length is None:
        raise ConfigError(
            "loss_agg_mode='seq-mean-token-sum-norm' divides by a length, got "
            "response_length=None; give the longest response there may be"
        )


def _stages(mean: str | None, std: str | None, reward_clip: float | None) -> tuple[ScoreStage, ...]:
    """utils/functionals.py reward_postprocess: normalise, then clip."""
    stages = list[ScoreStage]()
    if mean is not None or std is not None:
        stages.append(NormaliseScores(mean=mean, std=std, eps=1e-6, ddof=1))
    if reward_clip is not None:
        stages.append(ClipScores(low=-reward_clip, high=reward_clip))
    return tuple(stages)


def _kl_in_reward(
    kl_penalty: str, init_kl_coef: float, target_kl: float | None, kl_horizon: float
) -> KLTerm:
    """utils/functionals.py compute_token_reward."""
    if kl_penalty not in ESTIMATORS:
        raise ConfigError(f"kl_penalty must be one of {', '.join(ESTIMATORS)}, got {kl_penalty!r}")
    return KLTerm(
        estimator=ESTIMATORS[kl_penalty],
        clamp_value=KL_CLAMP if kl_penalty == "k3" else None,
        where="reward",
        control=controller(init_kl_coef, target_kl, kl_horizon),
        watch_reduction="sequence_mean",
    )


def _kl_in_loss(kl_loss_coef: float, also_in_reward: bool) -> KLTerm:
    """pipeline/rlvr/actor_worker.py: k3, whatever kl_penalty says."""
    if also_in_reward:
        raise ConfigError(
            "add_token_level_kl and use_kl_loss are both True; one objective has one KL term: "
            "set one of them to False"
        )
    return KLTerm(
        estimator="k3",
        clamp_value=KL_CLAMP,
        where="loss",
        control=FixedKL(coef=kl_loss_coef),
        watch_reduction="sequence_mean",
    )
