"""The steps of ``Objective.prepare``, in the order in which it takes them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klamp.errors import DataError
from klamp.objective.active import place_on_last
from klamp.objective.advantages import Advantage, AdvantageOutput
from klamp.objective.control import ControlState, FixedKL
from klamp.objective.correction import Correction, mismatch
from klamp.objective.groups import Difficulty, signal_report
from klamp.objective.kl import KLTerm
from klamp.objective.metrics import Metric, mean_of, merge, reduced
from klamp.objective.moments import wide
from klamp.objective.stage import ScoreStage
from klamp.objective.state import ObjectiveState
from klamp.objective.watch import (
    ObservedKL,
    advantage_metrics,
    explained_variance,
    observe_kl,
    score_metrics,
)
from klamp.types import Batch, PerSequence, PerToken, RowMask, TokenMask, Workers

WATCH_ONLY = KLTerm(estimator="k3", control=FixedKL(coef=0.0))
"""How the KL is reported where the objective has none but the batch has a reference."""


class Shaped(NamedTuple):
    """Scores after all stages; NaN where missing."""

    scores: PerSequence
    memories: tuple[Any, ...]
    metrics: dict[str, Metric]


class FilteredRows(NamedTuple):
    """Row weights for the loss and for the policy term, and the mask that is left."""

    mask: TokenMask
    weights: PerSequence
    policy_weights: PerSequence
    metrics: dict[str, Metric]


class CorrectedTokens(NamedTuple):
    """The loss mask and what the policy term is multiplied by."""

    mask: TokenMask
    corrections: PerToken
    metrics: dict[str, Metric]


def raw_scores(batch: Batch, policy: str) -> PerSequence:
    """The scores in float64, NaN where there is none."""
    scores = wide(batch.scores)
    scores = torch.where(scores.isinf(), torch.nan, scores)
    if policy == "refuse" and scores.isnan().any():
        row = int(scores.isnan().nonzero()[0])
        raise DataError(
            f"Batch.scores is {batch.scores[row].item()} at row {row}: a missing score, which "
            'missing_scores="refuse" forbids. Mend the reward function, or use "drop"'
        )
    return scores


def require_active_token(batch: Batch, workers: Workers) -> None:
    """There must be something to learn from, on some worker."""
    if not int(workers.sum(batch.mask.sum())):
        raise DataError(
            f"Batch.mask is False at all {batch.mask.numel()} positions: no token was generated. "
            "Check that the mask covers the response, not the prompt"
        )


def require_own_state(kl: KLTerm | None, stages: int, state: ObjectiveState) -> None:
    """A state of another objective would drop a memory, or switch the KL off, in silence."""
    if len(state.stages) != stages or (state.control is None) != (kl is None):
        raise DataError(
            f"the state has {len(state.stages)} stage memories and control={state.control} but "
            f"the objective has {stages} stages and {'no' if kl is None else 'a'} KL term; use the "
            "state of this objective's own init()"
        )


def run_stages(
    stages: tuple[ScoreStage, ...],
    raw: PerSequence,
    batch: Batch,
    memories: tuple[Any, ...],
    workers: Workers,
) -> Shaped:
    """Each stage on what the one before it returned."""
    batch = beside(batch, raw)
    scores, moved = raw, list[Any]()
    metrics: dict[str, Metric] = {}
    for stage, memory in zip(stages, memories, strict=True):
        scores, memory, counted = stage(scores, batch, memory, workers)
        moved.append(memory)
        metrics = merge(metrics, counted)
    unclipped = {"critic/reward_clip_frac": mean_of(torch.zeros_like(raw), ~raw.isnan())}
    return Shaped(scores, tuple(moved), {**unclipped, **metrics, **score_metrics(raw, scores)})


def filter_rows(
    difficulty: Difficulty | None, raw: PerSequence, batch: Batch, workers: Workers
) -> FilteredRows:
    """Which rows the loss sees, and what they weigh; statistics have seen them all."""
    dtype, mask, batch = compute_dtype(batch), batch.mask, beside(batch, raw)
    ones = torch.ones_like(raw)
    keep, weights, metrics = torch.ones_like(raw > 0), ones, dict[str, Metric]()
    if difficulty is not None:
        keep, weights, metrics = difficulty(raw, batch, workers)
    metrics = {**metrics, **signal_report(raw, batch.groups, keep)}
    on_policy = difficulty is not None and difficulty.weights_on == "policy"
    on_loss, on_policy_term = (ones, weights) if on_policy else (weights, ones)
    keep = keep.to(mask.device)
    if difficulty is not None and difficulty.denominator == "shrink":
        mask = mask & keep[:, None]
    on_loss = torch.where(keep, on_loss.to(keep.device, dtype), 0.0)
    return FilteredRows(mask, on_loss, on_policy_term.to(keep.device, dtype), metrics)


def observe(kl: KLTerm | None, batch: Batch, workers: Workers) -> ObservedKL | None:
    """The KL of the old policy to the reference, where there is one to measure."""
    if kl is None and batch.ref_logprobs is None:
        return None
    return observe_kl(kl or WATCH_ONLY, batch, workers)


def reward_penalty(
    kl: KLTerm | None, seen: ObservedKL | None, state: ObjectiveState
) -> Tensor | float:
    """β · KL of each token, where the KL belongs to the reward."""
    if kl is None or seen is None or kl.where != "reward":
        return 0.0
    return state.kl_coef * seen.tokens


def estimate(
    advantage: Advantage,
    scores: PerSequence,
    penalty: Tensor | float,
    batch: Batch,
    seen: TokenMask,
    workers: Workers,
) -> AdvantageOutput:
    """Score on the last token, less the KL penalty → advantages; 0 where the score is missing."""
    dtype = compute_dtype(batch)
    # Bounded before it is narrowed: a float64 score may not fit.
    scores = scores.clamp(-1e38, 1e38).to(batch.mask.device, dtype)
    known: RowMask = ~scores.isnan()
    rewards = place_on_last(scores.nan_to_num(nan=0.0), batch.mask) - penalty
    rewards = torch.where(batch.mask, rewards, 0.0).clamp(-1e38, 1e38).to(dtype)
    values = None if batch.values is None else batch.values.to(dtype)
    counted = seen & known[:, None]
    out = advantage(rewards, values, batch.mask, workers, counted)
    advantages = torch.where(known[:, None], out.advantages, 0.0)
    # A value function cannot learn from a score that is not there: its target is its own value.
    unknown = torch.zeros_like(out.returns) if values is None else values
    returns = torch.where(known[:, None], out.returns, torch.where(batch.mask, unknown, 0.0))
    metrics = {**out.metrics, **advantage_metrics(advantages, counted)}
    if values is not None:
        metrics["critic/explained_variance"] = explained_variance(values, returns, counted, workers)
    return AdvantageOutput(advantages, returns, metrics)


def correct_tokens(
    correction: Correction | None, rows: FilteredRows, batch: Batch, workers: Workers
) -> CorrectedTokens:
    """What the sampler's mismatch makes of each token."""
    corrections = rows.policy_weights[:, None].expand_as(batch.old_logprobs)
    if correction is None:
        return CorrectedTokens(rows.mask, corrections.contiguous(), mismatch(batch, workers))
    weights, keep, metrics = correction(batch, workers)
    mask = rows.mask & keep if correction.denominator == "shrink" else rows.mask
    return CorrectedTokens(mask, corrections * weights, metrics)


def kl_metrics(seen: ObservedKL | None, batch: Batch) -> dict[str, Metric]:
    """How many tokens a clamp of the KL changed."""
    if seen is None:
        return {}
    return {"critic/kl_clamp_frac": mean_of(seen.clamped, batch.mask)}


def move_controller(
    kl: KLTerm | None,
    seen: ObservedKL | None,
    batch: Batch,
    state: ObjectiveState,
    workers: Workers,
) -> tuple[ControlState | None, dict[str, float]]:
    """The controller after this batch, and the KL as it saw it."""
    numbers = {"critic/kl": 0.0, "critic/kl_per_token": 0.0, "critic/kl_per_sequence": 0.0}
    if seen is not None:
        numbers = {
            "critic/kl": seen.watched,
            "critic/kl_per_token": seen.per_token,
            "critic/kl_per_sequence": seen.per_sequence,
        }
    control = state.control
    if kl is not None and control is not None and seen is not None:
        n = int(workers.sum(torch.tensor(len(batch.mask), device=batch.mask.device)))
        control = kl.control.update(control, seen.watched, n)
    target = kl.control.target if kl is not None else None
    return control, {
        **numbers,
        "critic/kl_coef": state.kl_coef,
        "critic/kl_target": 0.0 if target is None else float(target),
        "critic/kl_refused": 0.0 if control is None else float(control.refused),
    }


def report(
    counted: Mapping[str, Metric], numbers: Mapping[str, float], workers: Workers
) -> dict[str, float]:
    """Everything counted on the way, over all workers."""
    return {**reduced(counted, workers), **numbers}


def beside(batch: Batch, scores: PerSequence) -> Batch:
    """The batch on the device that holds the float64 scores."""
    return batch if batch.mask.device == scores.device else batch.to(scores.device)


def compute_dtype(batch: Batch) -> torch.dtype:
    """The widest float of the batch, at least float32."""
    dtype = torch.float32
    for x in (batch.scores, batch.old_logprobs, batch.ref_logprobs, batch.values):
        dtype = dtype if x is None else torch.promote_types(dtype, x.dtype)
    return dtype
