"""OpenRLHF 0.11.0: PPO and its group-relative variants as ``train_ppo_ray`` computes them.

Settings are the command line's, without their prefix: ``--algo.kl.init_coef`` is ``kl_init_coef``.
Citations name files under ``openrlhf/``. Where upstream averages the KL per token beside a policy
loss per sample (gspo), this preset averages both per sample; gspo with the sampler's log-probs in
its ratio is not offered.
"""

from collections.abc import Sequence

from klamp.errors import ConfigError
from klamp.objective import losses
from klamp.objective.advantages import GAE, Advantage, Returns, Whiten
from klamp.objective.control import controller
from klamp.objective.correction import Correction
from klamp.objective.kl import KLTerm
from klamp.objective.logratio import LARGEST_RATIO
from klamp.objective.objective import Objective
from klamp.objective.rewards import (
    ClipScores,
    NormaliseScores,
    PenaliseOverlong,
    PenaliseTruncated,
    ScoreStage,
    SubtractOthersMean,
)
from klamp.objective.settings import is_finite
from klamp.presets.controllers import AdaptiveKLController as AdaptiveKLController
from klamp.presets.controllers import FixedKLController as FixedKLController
from klamp.presets.openrlhf_functions import KL_CLAMP, is_gspo
from klamp.presets.openrlhf_functions import PolicyLoss as PolicyLoss
from klamp.presets.openrlhf_functions import ValueLoss as ValueLoss
from klamp.presets.openrlhf_functions import compute_approx_kl as compute_approx_kl
from klamp.presets.openrlhf_functions import compute_reward as compute_reward
from klamp.presets.openrlhf_functions import (
    get_advantages_and_returns as get_advantages_and_returns,
)
from klamp.presets.openrlhf_functions import get_cumulative_returns as get_cumulative_returns

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
    grouped = estimator not in ("gae", "reinforce")
    gspo = is_gspo(policy_loss_type)
    if grouped and gamma != 1.0:  # ppo_trainer.py overwrites it with 1
        raise ConfigError(f"estimator={estimator!r} needs gamma=1, got gamma={gamma}")
    if gspo and is_correction_enable:  # models/loss.py: then the ratio is to the sampler
        raise ConfigError("policy_loss_type='gspo' with is_correction_enable=True is not offered")
    for name, pair in (
        ("eps_clip_low_high", eps_clip_low_high),
        ("reward_clip_range", reward_clip_range),
        ("is_correction_threshold", is_correction_threshold),
    ):
        _check_pair(name, pair)
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
            else Returns(gamma=gamma),  # models/utils.py via experience_maker.py
            whiten=Whiten(ddof=0, eps=1e-8, floor=True, scale=not no_std_norm)
            if estimator in WHITENED
            else None,  # experience_maker.py: clamp(min=1e-8).rsqrt()
        ),
        correction=_correction(is_correction_type, is_correction_threshold)
        if is_correction_enable
        else None,  # models/loss.py
        surrogate=losses.ClippedSurrogate(
            low=low,
            high=high,
            dual=dual_clip,  # models/loss.py PolicyLoss
            ratio="sequence" if gspo else "token",
        ),
        value_loss=losses.ValueLoss(clip=value_clip) if estimator == "gae" else None,  # loss.py
        entropy_coef=entropy_coef,  # cli: --actor.entropy_coef
        reduction="sequence_mean" if gspo else "token_mean",  # models/loss.py; utils/loss_utils.py
    )


def _check_pair(name: str, pair: object) -> None:
    numbers = isinstance(pair, Sequence) and len(pair) == 2 and all(map(is_finite, pair))
    if pair is not None and not numbers:
        raise ConfigError(f"{name} must be two numbers (low, high), got {pair!r}")


def _correction(kind: str, bounds: Sequence[float]) -> Correction:
    """models/loss.py; seq-mask-tis leaves the weights of what it keeps as they are."""
    low, high = bounds
    if kind == "tis":
        return Correction(level="token", action="truncate", low=low, high=high)
    if kind == "icepop":
        return Correction(level="token", action="mask", low=low, high=high)
    if kind == "seq-mask-tis":
        return Correction(
            level="sequence", action="mask", low=low, high=high, floor=0.0, cap=LARGEST_RATIO
        )
    raise ConfigError(f"is_correction_type must be tis, icepop or seq-mask-tis, got {kind!r}")
