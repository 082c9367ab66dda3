"""From targets to new weights: epochs, optimizer steps, micro-batches.

Each token's share of an optimizer step is fixed before the step is cut into forward passes, so any
cut gives the same gradient. An update that is not finite never reaches the weights.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from klamp.objective.metrics import Metric, merge, reduced
from klamp.objective.objective import Objective
from klamp.train.comm import Comm
from klamp.train.models import Models
from klamp.train.passes import loss_of
from klamp.train.settings import OptimizerSettings
from klamp.train.tokens import Tokens, micro_batches
from klamp.types import Batch, Targets


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """What the updates of one batch did."""

    metrics: Mapping[str, float]
    first: Mapping[str, float]
    """The metrics of the first update alone: what was sampled from is what is trained."""
    skipped: int
    """Updates at the end that were skipped in a row; the number before them if none was made."""
    problem: str | None
    """The first thing that was not finite, by name."""


def optimizer_of(models: Models, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW over the policy and, at a rate of its own, the value function."""
    groups: list[dict[str, Any]] = [{"params": _trained(models.policy), "base": settings.lr}]
    if models.value is not None:
        groups.append({"params": _trained(models.value), "base": settings.value_lr})
    return torch.optim.AdamW(
        groups,
        lr=settings.lr,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def rate(settings: OptimizerSettings, step: int, steps: int) -> float:
    """What the learning rate is multiplied by at a step, counted from 1."""
    if step <= settings.warmup_steps:
        return step / (settings.warmup_steps + 1)
    done = (step - settings.warmup_steps - 1) / max(1, steps - settings.warmup_steps - 1)
    falls = {
        "constant": 1.0,
        "linear": settings.final_lr + (1.0 - settings.final_lr) * (1.0 - done),
        "cosine": settings.final_lr
        + (1.0 - settings.final_lr) * (0.5 + 0.5 * math.cos(math.pi * done)),
    }
    return falls[settings.schedule]


@dataclass(frozen=True, kw_only=True, eq=False)
class Learner:
    """What an update needs to know."""

    models: Models
    objective: Objective
    optimizer: torch.optim.AdamW
    settings: OptimizerSettings
    temperature: float
    comm: Comm

    def learn(
        self, tokens: Tokens, batch: Batch, targets: Targets, order: torch.Generator, skipped: int
    ) -> Learnt:
        """Every epoch and optimizer step of one batch."""
        rows = len(batch.mask)
        made: list[dict[str, float]] = []
        problem: str | None = None
        for _ in range(self.settings.epochs):
            shuffled = torch.randperm(rows, generator=order, device=order.device)
            for part in shuffled.tensor_split(self.settings.updates_per_epoch):
                metrics, bad = self.update(tokens, batch, targets, part.to(batch.mask.device))
                made.append(metrics)
                skipped = skipped + 1 if bad else 0
                problem = problem or bad
        return Learnt(metrics=summary(made), first=made[0], skipped=skipped, problem=problem)

    def update(
        self, tokens: Tokens, batch: Batch, targets: Targets, rows: Tensor
    ) -> tuple[dict[str, float], str | None]:
        """One optimizer step on some rows: its metrics, and what was not finite in it."""
        shares = self.objective.shares(targets.mask[rows], targets.weights[rows], self.comm)
        shares = torch.zeros_like(batch.old_logprobs).index_copy(
            0, rows, shares.to(batch.old_logprobs)
        )
        self.optimizer.zero_grad()
        counted: dict[str, Metric] = {}
        problem: str | None = None
        for part in micro_batches(tokens, rows, self.settings.micro_tokens):
            metrics, bad = self.backward(tokens, batch, targets, shares, part)
            counted = merge(counted, metrics)
            problem = problem or bad
        numbers = reduced(counted, self.comm)
        self.share_gradients()
        norms = [self.norm(group["params"]) for group in self.optimizer.param_groups]
        if problem is None and not all(map(math.isfinite, norms)):
            problem = self.first_bad_gradient()
        problem = anywhere(self.comm, problem)
        if problem is None:
            self.step(norms)
        self.optimizer.zero_grad()
        numbers["actor/grad_norm"] = norms[0]
        if len(norms) > 1:
            numbers["critic/grad_norm"] = norms[1]
        numbers["actor/skipped_updates"] = float(problem is not None)
        return numbers, problem

    def backward(
        self, tokens: Tokens, batch: Batch, targets: Targets, shares: Tensor, rows: Tensor
    ) -> tuple[Mapping[str, Metric], str | None]:
        """One forward and backward pass."""
        part = tokens.select(rows)
        width = part.mask.shape[1]  # what is beyond it is padding
        mine = batch.select(rows).columns(width)
        found = loss_of(
            self.models,
            self.objective,
            part,
            mine,
            targets.select(rows).columns(width),
            shares[rows, :width],
            temperature=self.temperature,
        )
        loss = found.output.loss
        loss.backward()
        if bool(loss.isfinite()):
            return found.output.metrics, None
        return found.output.metrics, first_bad(found.suspects, mine.mask, rows)

    def share_gradients(self) -> None:
        """Gradients summed over processes: each holds its tokens' shares of one loss."""
        if self.comm.size == 1:
            return
        parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        flat = self.comm.sum(torch.cat([p.grad.flatten() for p in parameters]))
        for p, summed in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad.copy_(summed.view_as(p))

    def norm(self, parameters: Iterable[Tensor]) -> float:
        """The norm of the gradient."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def step(self, norms: Sequence[float]) -> None:
        """One step of AdamW on gradients whose norm is at most ``max_grad_norm``."""
        most = self.settings.max_grad_norm
        for group, norm in zip(self.optimizer.param_groups, norms, strict=True):
            if most is not None and norm > most:
                torch.nn.utils.clip_grads_with_norm_(group["params"], most, torch.tensor(norm))
        self.optimizer.step()

    def first_bad_gradient(self) -> str:
        """The first parameter whose gradient is not finite, by name."""
        named = [("policy", self.models.policy), ("value", self.models.value)]
        for owner, network in named:
            for name, p in [] if network is None else network.named_parameters():
                if p.grad is not None and not bool(p.grad.isfinite().all()):
                    return f"the gradient of {owner} parameter {name}"
        return "the norm of the gradient"


def anywhere(comm: Comm, problem: str | None) -> str | None:
    """A problem here, or the news that another process has one: all must skip together."""
    found = comm.max(torch.tensor(0.0 if problem is None else 1.0))
    return problem if problem is not None or not float(found) else "a tensor on another process"


def first_bad(
    made: Mapping[str, Tensor | None], mask: Tensor, rows: Tensor | None = None
) -> str | None:
    """The first of some tensors with a non-finite active entry: its name, row and position."""
    for name, x in made.items():
        if x is None:
            continue
        bad = ~x.detach().isfinite()
        bad = bad & mask if x.ndim == 2 else bad
        if bool(bad.any()):
            if x.ndim != 2:
                return f"the {name}"
            row, position = bad.nonzero()[0].tolist()
            row = row if rows is None else int(rows[row])
            return f"{name} at row {row}, position {position}"
    return None


def summary(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The updates of a step as one: means, but extremes of extremes, and counts added up."""
    names = list(dict.fromkeys(name for made in updates for name in made))
    return {name: _joined(name, [made[name] for made in updates if name in made]) for name in names}


def _joined(name: str, numbers: Sequence[float]) -> float:
    if name.endswith("_max"):
        return max(numbers)
    if name.endswith("_min"):
        return min(numbers)
    if name.endswith(("nonfinite_tokens", "skipped_updates")):
        return sum(numbers)
    return sum(numbers) / len(numbers)


def _trained(network: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in network.parameters() if p.requires_grad]
