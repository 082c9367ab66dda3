"""What a step leaves behind besides new weights: its metrics, warnings, and recorded batches."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from klamp.errors import NumericsError
from klamp.inspect import record as records
from klamp.inspect.record import Record
from klamp.inspect.runlog import Step
from klamp.objective.state import ObjectiveState
from klamp.train.comm import Comm
from klamp.train.rollout import Observed, Samples
from klamp.train.tasks.task import is_right

ALWAYS = (
    "critic/score/mean",
    "task/accuracy",
    "critic/kl",
    "critic/kl_coef",
    "critic/kl_target",
    "critic/reward_clip_frac",
    "critic/token_reward_clip_frac",
    "critic/advantage_clip_frac",
)
EXACT, ROUNDED = 0.001, 0.1  # how far from 1 a ratio may be by rounding, in float32 and bfloat16


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What learning from one batch came to."""

    state: ObjectiveState
    metrics: Mapping[str, float]
    skipped: int
    """Non-finite updates in a row, up to now."""
    problem: str | None
    """The first thing that was not finite, by name."""


def complete(metrics: Mapping[str, float]) -> dict[str, float]:
    """The contract's names in every line, 0.0 where a thing is off; no number that is none."""
    finite = {name: x for name, x in metrics.items() if math.isfinite(x)}
    return {**dict.fromkeys(ALWAYS, 0.0), **dict(sorted(finite.items()))}


def of_skipped(scores: Sequence[float], state: ObjectiveState) -> dict[str, float]:
    """What can be said of a batch that nothing was learnt from."""
    known = [x for x in scores if math.isfinite(x)]
    return {
        "critic/score/mean": sum(known) / len(known) if known else 0.0,
        "critic/kl_coef": state.kl_coef,
        "actor/skipped_updates": 1.0,
    }


def sample_metrics(samples: Samples, comm: Comm) -> dict[str, float]:
    """Accuracy (of those whose answer is known) and lengths of samples, over all processes."""
    told = [is_right(e, t) for e, t in zip(samples.examples, samples.texts, strict=True)]
    lengths = samples.tokens.mask.sum(dim=1)
    counts = [
        float(sum(r is True for r in told)),
        float(sum(r is not None for r in told)),
        float(lengths.sum()),
        float(samples.truncated.sum()),
        float(len(lengths)),
    ]
    right, known, tokens, cut, rows = comm.sum(torch.tensor(counts, dtype=torch.float64)).tolist()
    longest = comm.max(lengths.max())
    found = {
        "response/length_mean": tokens / rows,
        "response/length_max": float(longest),
        "response/truncated_frac": cut / rows,
        "task/graded": known / rows,
    }
    return {**found, "task/accuracy": right / known} if known else found


def speeds(samples: Samples, comm: Comm, seconds: float, sampling: float) -> dict[str, float]:
    """Generated tokens per second of the whole step, and how the time was spent."""
    tokens = float(comm.sum(samples.tokens.mask.sum().to(torch.float64)))
    return {
        "time/tokens_per_second": tokens / max(seconds, 1e-9),
        "time/sample_seconds": sampling,
        "time/train_seconds": seconds - sampling,
    }


def ratio_at_step0(first: Mapping[str, float]) -> float:
    """The ratio furthest from 1 in the first update of a batch; nothing has moved yet."""
    ends = [first.get("actor/ratio_min", 1.0), first.get("actor/ratio_max", 1.0)]
    return max(ends, key=lambda ratio: abs(ratio - 1.0))


def warnings(line: Step, problem: str | None, *, rounded: bool) -> list[str]:
    """What a person should be told of a step, a sentence each."""
    found: list[str] = []
    if problem is not None:
        found.append(f"step {line.step}: not finite: {problem}; the update was skipped")
    ratio = line.metrics.get("actor/ratio_at_step0", 1.0)
    if abs(ratio - 1.0) > (ROUNDED if rounded else EXACT):
        found.append(
            f"actor/ratio_at_step0 is {ratio:.4g} and should be 1: the policy gives other "
            "log-probs in training than when its samples were observed (dropout, or precision?)"
        )
    return found


def stop_if_lost(outcome: Outcome, step: int, most: int, run: Path) -> None:
    """Too many updates in a row that were not finite: going on would hide it."""
    if outcome.skipped >= most:
        raise NumericsError(
            f"{outcome.skipped} updates in a row were not finite and were skipped; in step {step} "
            f"the first was {outcome.problem}. The batches are in {run / 'records'}; lower "
            "optimizer.lr, or look at the model, the reward and the clamps"
        )


def record(
    run: Path,
    step: int,
    samples: Samples,
    observed: Observed,
    scores: Sequence[float],
    state: ObjectiveState,
    reason: str,
) -> None:
    """The whole batch of a step, under RUN/records/."""
    tensors = {
        "prompts": samples.tokens.prompts,
        "responses": samples.tokens.responses,
        "mask": samples.tokens.mask,
        "groups": samples.groups,
        "truncated": samples.truncated,
        "sampler_logprobs": samples.sampler_logprobs,
        "scores": torch.tensor(scores),
        **{name: x for name, x in vars(observed).items() if x is not None},
    }
    about = {
        "step": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "reason": reason,
        "state": state.to_dict(),
        "prompts": [e.prompt for e in samples.examples],
        "completions": list(samples.texts),
    }
    place = run / "records" / f"step-{step:06d}"
    records.write(place, Record(tensors=tensors, about=about))
