"""klamp's own choice, each part with its reason."""

from klamp.objective.advantages import Advantage, Returns
from klamp.objective.control import controller
from klamp.objective.correction import Correction
from klamp.objective.kl import KLTerm
from klamp.objective.losses import ClippedSurrogate
from klamp.objective.objective import Objective
from klamp.objective.rewards import ClipScores, NormaliseScores


def objective(
    *,
    score_clip: float | None = 10.0,
    kl_coef: float = 0.05,
    kl_target: float | None = 6.0,
    kl_horizon: float = 10_000,
    low: float = 0.2,
    high: float = 0.28,
    sampler_ratio_high: float = 2.0,
) -> Objective:
    """GRPO with a KL that pulls in the right direction and a controller that holds it."""
    # Before the statistics: one absurd score must not set the scale of its whole group.
    clip = () if score_clip is None else (ClipScores(low=-score_clip, high=score_clip),)
    return Objective(
        # Siblings of one prompt are the cheapest baseline, and need no value function.
        stages=(*clip, NormaliseScores(mean="group", std="group")),
        kl=KLTerm(
            # Unbiased, and never negative, so that what is logged reads as a KL.
            estimator="k3",
            # The only gradient here whose expectation is that of the response's KL.
            gradient="sequence",
            # e²⁰ is far past any KL worth resolving, and far from overflow.
            clamp_log_ratio=20.0,
            # A token that drifted past the clamp is the last that should stop being pulled back.
            clamp_gradient="pass",
            # One sequence that left the reference must not drown the batch's gradient.
            clamp_to_come=50.0,
            # In the loss: advantages then mean reward alone, and can be normalised as such.
            where="loss",
            # A target in nats per response says what is wanted; a coefficient does not.
            control=controller(kl_coef, kl_target, kl_horizon),
            # k3 is e^-d on the rare token that the policy has left: one such token in a batch moves
            # its mean by half a nat where k1's moves by a tenth (docs/kl-gradient.md).
            watch="k1",
            watch_reduction="sequence_sum",
        ),
        advantage=Advantage(estimator=Returns(gamma=1.0)),  # every token shares the outcome
        # An engine's log-probs differ from the trainer's: bounded weights, no sample thrown away.
        correction=Correction(level="token", action="truncate", high=sampler_ratio_high),
        # Clip-higher (DAPO): rare tokens may grow, which keeps exploration alive.
        surrogate=ClippedSurrogate(low=low, high=high),
        # Each token the same share: shares that depend on the length would bias the KL's gradient.
        reduction="token_mean",
        # No entropy bonus: clip-higher and the KL hold entropy up without a reward for noise.
        entropy_coef=None,
    )
