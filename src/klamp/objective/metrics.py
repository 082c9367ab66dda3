"""The algebra of metrics: (sum, count, kind), so that any cut of a step reduces to the same number.

A mean of means is wrong as soon as two parts differ in size. A metric therefore stays a sum and a
count (or an extreme) until the very end, and one host sync turns all of them into numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

from klamp.objective.moments import wide_dtype
from klamp.types import ALONE, Workers

Number = Shaped[Tensor, ""]
MEAN, SUM, MAX, MIN = "mean", "sum", "max", "min"


@dataclass(frozen=True)
class Metric:
    """One number in parts. ``mean`` is sum / count; ``max`` and ``min`` keep the extreme in sum."""

    sum: Number
    count: Number
    kind: str = MEAN

    def __float__(self) -> float:
        """The number, of this part alone; 0.0 where nothing was counted."""
        return reduced({"x": self})["x"]


Metrics = Mapping[str, Metric]


def mean_of(x: Tensor, mask: Tensor) -> Metric:
    """The mean of x where the mask is True; a fraction when x is bool."""
    x = torch.where(mask, x.detach(), 0)
    return Metric(x.sum(dtype=wide_dtype(x)), mask.sum())


def count_of(mask: Tensor) -> Metric:
    """How often the mask is True, over the whole step."""
    return Metric(mask.sum(), torch.ones_like(mask.sum()), SUM)


def total_of(x: Tensor) -> Metric:
    """A part of a sum, such as a loss that is already weighted by shares."""
    return Metric(x.detach(), torch.ones_like(x.detach()), SUM)


def max_of(x: Tensor, mask: Tensor) -> Metric:
    """The largest x where the mask is True."""
    return Metric(_extreme(torch.where(mask, x.detach(), -torch.inf)), mask.sum(), MAX)


def min_of(x: Tensor, mask: Tensor) -> Metric:
    """The smallest x where the mask is True."""
    return Metric(-_extreme(torch.where(mask, -x.detach(), -torch.inf)), mask.sum(), MIN)


def merge(a: Metrics, b: Metrics) -> dict[str, Metric]:
    """The metrics of two parts of a step; a name that only one part has is kept."""
    return {**a, **{k: _joined(a[k], m) if k in a else m for k, m in b.items()}}


def reduced(metrics: Metrics, workers: Workers = ALONE) -> dict[str, float]:
    """Numbers over all workers: one packed sum, one packed maximum, one host sync.

    Every worker must hold the same names.
    """
    if not metrics:
        return {}
    names = sorted(metrics)
    adds = torch.stack([_pair(metrics[n]) for n in names])
    tops = torch.stack([_top(metrics[n]) for n in names])
    packed = torch.cat([workers.sum(adds), workers.max(tops)[:, None]], dim=1)
    return {
        n: _number(metrics[n].kind, *row) for n, row in zip(names, packed.tolist(), strict=True)
    }


def _number(kind: str, total: float, count: float, top: float) -> float:
    if kind == SUM:
        return total
    if count == 0:
        return 0.0
    return {MEAN: total / count, MAX: top, MIN: -top}[kind]


def _pair(m: Metric) -> Tensor:
    total = m.sum if m.kind in (MEAN, SUM) else torch.zeros_like(m.sum)
    return torch.stack([total.to(wide_dtype(total)), m.count.to(wide_dtype(total))])


def _top(m: Metric) -> Tensor:
    if m.kind in (MEAN, SUM):
        return torch.zeros_like(m.sum, dtype=wide_dtype(m.sum))
    return (m.sum if m.kind == MAX else -m.sum).to(wide_dtype(m.sum))


def _joined(a: Metric, b: Metric) -> Metric:
    if a.kind == MAX:
        return Metric(torch.maximum(a.sum, b.sum), a.count + b.count, MAX)
    if a.kind == MIN:
        return Metric(torch.minimum(a.sum, b.sum), a.count + b.count, MIN)
    return Metric(a.sum + b.sum, a.count + b.count, a.kind)


def _extreme(x: Tensor) -> Tensor:
    return x.amax() if x.numel() else x.new_full((), -torch.inf)
