"""One objective: a value that says everything about how a batch becomes a gradient.

    scores ─ stages ─▶ rewards ─▶ advantages ─▶ Targets ─ surrogate + KL + value ─▶ ∑ share · loss

``prepare`` runs once per batch and is where state moves; ``shares`` once per optimizer step;
``loss`` once per forward pass. Only the first two talk to other workers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from klamp.errors import ConfigError
from klamp.objective import prepare as steps
from klamp.objective import reduce
from klamp.objective.advantages import Advantage
from klamp.objective.catalogue import SETTINGS
from klamp.objective.correction import Correction
from klamp.objective.groups import Difficulty
from klamp.objective.kl import KLTerm
from klamp.objective.logratio import widen
from klamp.objective.losses import CISPO, ClippedSurrogate, PolicyGradient, Surrogate, ValueLoss
from klamp.objective.settings import (
    decoded,
    encoded,
    require_choice,
    require_kind,
    require_number,
)
from klamp.objective.stage import ScoreStage
from klamp.objective.state import ObjectiveState
from klamp.objective.terms import check_shape, entropy_term, value_term
from klamp.objective.ways import COMPILED, FUSED, PLAIN, token_terms
from klamp.types import (
    ALONE,
    Batch,
    LossOutput,
    PerSequence,
    PerToken,
    Targets,
    TokenMask,
    Workers,
)

KINDS: dict[str, tuple[type | None, ...]] = {
    "kl": (KLTerm, None),
    "advantage": (Advantage,),
    "difficulty": (Difficulty, None),
    "correction": (Correction, None),
    "surrogate": (ClippedSurrogate, CISPO, PolicyGradient),
    "value_loss": (ValueLoss, None),
}


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A complete, printable, comparable description of an objective."""

    stages: tuple[ScoreStage, ...] = ()
    """What happens to raw scores, in order."""
    kl: KLTerm | None = None
    """None: no KL is applied; it is still watched where the batch has reference log-probs."""
    advantage: Advantage = Advantage()
    difficulty: Difficulty | None = None
    correction: Correction | None = None
    surrogate: Surrogate = ClippedSurrogate()
    value_loss: ValueLoss | None = None
    entropy_coef: float | None = None
    reduction: str = "token_mean"
    constant: float | None = None
    """The length that ``reduction="constant_mean"`` divides by."""
    missing_scores: str = "drop"
    """A NaN score: ``drop`` (out of the statistics, advantage 0, counted), or ``refuse``."""

    def __post_init__(self) -> None:
        require_kind(self, stages=(tuple, list))
        object.__setattr__(self, "stages", tuple(self.stages))
        require_choice(self, reduction=tuple(reduce.REDUCTIONS), missing_scores=("drop", "refuse"))
        require_number(self, "entropy_coef", optional=True)
        require_number(self, "constant", above=0.0, optional=True)
        require_kind(self, **KINDS)
        if (self.reduction == "constant_mean") != (self.constant is not None):
            raise ConfigError(
                f"Objective.constant goes with reduction='constant_mean', got constant="
                f"{self.constant} reduction={self.reduction!r}; set both or neither"
            )
        for stage in self.stages:
            if isinstance(stage, type) or not isinstance(stage, ScoreStage):
                raise ConfigError(
                    f"Objective.stages has {stage!r}, which is no stage; a stage has init() and "
                    "is called with (scores, batch, memory, workers)"
                )
        self._check_sequence_gradient()

    def _check_sequence_gradient(self) -> None:
        kl = self.kl
        if kl is None or kl.gradient != "sequence" or kl.accept_length_bias:
            return
        if self.reduction == "sequence_mean":
            raise ConfigError(
                "KLTerm(gradient='sequence') with reduction='sequence_mean' is not the gradient "
                "of the KL: shares that depend on the own length bias it. Use token_mean, "
                "sequence_sum or constant_mean, or set accept_length_bias=True"
            )

    def init(self) -> ObjectiveState:
        """The state before the first batch."""
        return ObjectiveState(
            control=None if self.kl is None else self.kl.control.init(),
            stages=tuple(stage.init() for stage in self.stages),
        )

    @torch.no_grad()
    def prepare(
        self, batch: Batch, state: ObjectiveState, workers: Workers = ALONE
    ) -> tuple[Targets, ObjectiveState]:
        """Turn what was observed into what to train towards, and move the controller by it."""
        steps.require_own_state(self.kl, len(self.stages), state)
        steps.require_active_token(batch, workers)
        raw = steps.raw_scores(batch, self.missing_scores)
        shaped = steps.run_stages(self.stages, raw, batch, state.stages, workers)
        rows = steps.filter_rows(self.difficulty, raw, batch, workers)
        kl = steps.observe(self.kl, batch, workers)
        penalty = steps.reward_penalty(self.kl, kl, state)
        gains = steps.estimate(self.advantage, shaped.scores, penalty, batch, rows.mask, workers)
        tokens = steps.correct_tokens(self.correction, rows, batch, workers)
        control, seen = steps.move_controller(self.kl, kl, batch, state, workers)
        counted = {**shaped.metrics, **rows.metrics, **gains.metrics, **tokens.metrics}
        counted |= steps.kl_metrics(kl, batch)
        targets = Targets(
            mask=tokens.mask,
            weights=rows.weights,
            advantages=gains.advantages,
            returns=gains.returns,
            corrections=tokens.corrections,
            kl_coef=state.kl_coef,
            metrics=steps.report(counted, seen, workers),
            kl_to_come=None if self.kl is None else self.kl.to_come(batch, workers),
        )
        return targets, ObjectiveState(control=control, stages=shaped.memories)

    def shares(
        self, mask: TokenMask, weights: PerSequence | None = None, workers: Workers = ALONE
    ) -> PerToken:
        """How much each token of an optimizer step contributes to its loss."""
        return reduce.shares(
            mask, weights, workers, reduction=self.reduction, constant=self.constant
        )

    def loss(
        self,
        logprobs: PerToken,
        batch: Batch,
        targets: Targets,
        shares: PerToken,
        values: PerToken | None = None,
        entropy: PerToken | None = None,
        exact_kl: PerToken | None = None,
    ) -> LossOutput:
        """∑ share · (policy + β·KL + value − entropy) on any part of a step. Parts add up."""
        given = (logprobs, batch, targets, shares)
        return self._loss(FUSED, given, values, entropy, exact_kl)

    def compiled_loss(
        self,
        logprobs: PerToken,
        batch: Batch,
        targets: Targets,
        shares: PerToken,
        values: PerToken | None = None,
        entropy: PerToken | None = None,
        exact_kl: PerToken | None = None,
    ) -> LossOutput:
        """``loss`` with its policy and KL terms as one loop by torch.compile, on any device."""
        given = (logprobs, batch, targets, shares)
        return self._loss(COMPILED, given, values, entropy, exact_kl)

    def plain_loss(
        self,
        logprobs: PerToken,
        batch: Batch,
        targets: Targets,
        shares: PerToken,
        values: PerToken | None = None,
        entropy: PerToken | None = None,
        exact_kl: PerToken | None = None,
    ) -> LossOutput:
        """What ``loss`` means, by autograd through the formulae."""
        given = (logprobs, batch, targets, shares)
        return self._loss(PLAIN, given, values, entropy, exact_kl)

    def _loss(
        self,
        way: str,
        given: tuple[PerToken, Batch, Targets, PerToken],
        values: PerToken | None,
        entropy: PerToken | None,
        exact_kl: PerToken | None,
    ) -> LossOutput:
        logprobs, batch, targets, shares = given
        check_shape("logprobs", logprobs, batch)
        check_shape("shares", shares, batch)
        logprobs = widen(logprobs)  # once, so that gradients add up before they are narrowed
        of_tokens = (logprobs, batch, targets, shares, exact_kl)
        terms = token_terms(way, self.surrogate, self.kl, *of_tokens)
        if self.entropy_coef is not None or entropy is not None:
            terms.append(entropy_term(self.entropy_coef, entropy, batch, targets, shares))
        if self.value_loss is not None:
            terms.append(value_term(self.value_loss, values, batch, targets, shares))
        loss, metrics = terms[0]
        for term in terms[1:]:
            loss, metrics = loss + term.loss, metrics | term.metrics
        return LossOutput(loss=loss, metrics=metrics)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and numbers, each setting's class under ``type``."""
        return encoded(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], extra: Iterable[type] = ()) -> "Objective":
        """The inverse of ``to_dict``; ``extra`` names settings classes of your own."""
        known = {**SETTINGS, cls.__name__: cls, **{c.__name__: c for c in extra}}
        made = decoded({"type": cls.__name__, **data}, known)
        if not isinstance(made, cls):
            raise ConfigError(f"Objective.from_dict got a {type(made).__name__}")
        return made
