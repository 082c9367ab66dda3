"""The algebra of metrics: (sum, count, kind), so that any cut of a step reduces to the same number.

A mean of means is wrong as soon as two parts differ in size. A metric therefore stays a sum and a
count (or an extreme) until the very end, and one host sync turns all of them into numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from jaxtyping import Shaped
from torch import Tensor

from klamp.objective.moments import wide_dtype
from klamp.types import ALONE, Workers

Number = Shaped[Tensor, ""] | float
MEAN, SUM, MAX, MIN = "mean", "sum", "max", "min"


@dataclass(frozen=True)
class Metric:
    """One number in parts. ``mean`` is sum / count; ``max`` and ``min`` keep the extreme in sum.

    Parts are 0-dim tensors, or plain numbers where they were already looked at.
    """

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
    found = [metrics[n] for n in names]
    if workers is ALONE and not any(_elsewhere(m.sum) or _elsewhere(m.count) for m in found):
        numbers = [_number(m.kind, float(m.sum), float(m.count)) for m in found]
        return dict(zip(names, numbers, strict=True))
    adds = [m.sum if m.kind in (MEAN, SUM) else 0.0 for m in found]
    tops = [_SIGNS[m.kind] * m.sum if m.kind in _SIGNS else 0.0 for m in found]
    counts = [m.count for m in found]
    device = next((x.device for x in (*adds, *tops, *counts) if _elsewhere(x)), None)
    sums, tops = _packed([*adds, *counts], device), _packed(tops, device)
    numbers = torch.cat([workers.sum(sums), workers.max(tops)]).tolist()
    k = len(names)
    rows = zip(names, found, numbers[:k], numbers[k : 2 * k], numbers[2 * k :], strict=True)
    return {
        name: _number(m.kind, _SIGNS[m.kind] * top if m.kind in _SIGNS else total, count)
        for name, m, total, count, top in rows
    }


_SIGNS = {MAX: 1.0, MIN: -1.0}


def _elsewhere(x: Number) -> TypeGuard[Tensor]:
    """Whether looking at it would wait for a device."""
    return isinstance(x, Tensor) and not x.is_cpu


def _packed(numbers: Sequence[Number], device: torch.device | None) -> Tensor:
    """Numbers as one tensor, as wide as their device can."""
    if device is None:  # on the CPU looking at a number is cheaper than an operation
        return torch.tensor([float(x) for x in numbers], dtype=torch.float64)
    tensors = [torch.as_tensor(x, device=device) for x in numbers]
    return torch.stack([x.to(wide_dtype(x)) for x in tensors])


def _number(kind: str, value: float, count: float) -> float:
    if kind == SUM:
        return value
    if count == 0:
        return 0.0
    return value / count if kind == MEAN else value


def _joined(a: Metric, b: Metric) -> Metric:
    count = _plus(a.count, b.count)
    if a.kind in (MEAN, SUM):
        return Metric(_plus(a.sum, b.sum), count, a.kind)
    if isinstance(a.sum, Tensor) and isinstance(b.sum, Tensor):
        pick = torch.maximum if a.kind == MAX else torch.minimum
        return Metric(pick(a.sum, b.sum), count, a.kind)
    ends = float(a.sum), float(b.sum)
    if any(map(math.isnan, ends)):  # which max() and min() may lose
        return Metric(math.nan, count, a.kind)
    return Metric(max(ends) if a.kind == MAX else min(ends), count, a.kind)


def _plus(a: Number, b: Number) -> Number:
    """Their sum: of a number and an integer tensor torch's would be in the default dtype."""
    if isinstance(a, Tensor) == isinstance(b, Tensor) or _elsewhere(a) or _elsewhere(b):
        return a + b
    return float(a) + float(b)


def _extreme(x: Tensor) -> Tensor:
    return x.amax() if x.numel() else x.new_full((), -torch.inf)
