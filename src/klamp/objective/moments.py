"""Count, mean and variance, exact over batches and workers.

Two packed sums: counts and sums first, then squares of what is left after the mean is removed
(never raw squares, which cancel). Sets are merged by Chan's update. All of it in float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from klamp.types import ALONE, Workers

WITHOUT_FLOAT64 = ("mps",)
CHUNK = 1 << 16


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of everything seen so far."""

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0

    def merged(self, other: "Moments") -> "Moments":
        """The moments of both sets together (Chan, Golub & LeVeque 1979)."""
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        delta = other.mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + delta * (other.count / count),
            m2=self.m2 + other.m2 + delta * delta * (self.count * other.count / count),
        )

    def std(self, ddof: int = 1) -> float:
        """The standard deviation; 0 where there are too few values to have one."""
        return (self.m2 / (self.count - ddof)) ** 0.5 if self.count > ddof else 0.0


@dataclass(frozen=True)
class SegmentMoments:
    """Moments of several sets at once: one entry per segment, in float64."""

    count: Tensor
    mean: Tensor
    m2: Tensor

    def std(self, ddof: int = 1) -> Tensor:
        """√(m2 / (count − ddof)); 0 where there are too few values to have one."""
        return (self.m2 / (self.count - ddof).clamp(min=1.0)).sqrt()

    def flat(self) -> Tensor:
        """True where all values are the same but for rounding, or there is at most one."""
        return self.m2 <= self.count * (1e-12 * self.mean).square()

    def each(self) -> list[Moments]:
        """The same as plain values (one host sync)."""
        rows = torch.stack([self.count, self.mean, self.m2], dim=1).tolist()
        return [Moments(*row) for row in rows]


def segment_moments(
    x: Tensor, valid: Tensor, segment: Tensor, n: int, workers: Workers = ALONE
) -> SegmentMoments:
    """The moments of the valid x of each of n segments, over all workers."""
    return centred_moments(x, valid, segment, n, workers)[0]


def centred_moments(
    x: Tensor,
    valid: Tensor | None,
    segment: Tensor,
    n: int,
    workers: Workers = ALONE,
    sizes: Tensor | None = None,
) -> tuple[SegmentMoments, Tensor]:
    """``segment_moments``, and each x less the mean of its segment.

    Every x is valid where that is None; ``sizes`` are then what the segments count, if known.
    """
    x = wide(x)
    segment = segment.to(x.device)  # which is another one where x's own has no float64
    # What is not valid goes to a segment of its own, which nobody asks for.
    place = segment if valid is None else torch.where(valid.to(x.device), segment, n)
    if sizes is None or valid is not None:
        sizes = torch.bincount(place, minlength=n + 1)[:n]
    sums = workers.sum(torch.stack([sizes.to(x), _sums(x, place, n)]))
    count, total = sums.unbind()
    mean = total / count.clamp(min=1.0)
    centred = mean.index_select(0, segment)
    torch.sub(x, centred, out=centred)
    m2 = workers.sum(_sums(centred, place, n, squared=True))
    return SegmentMoments(count, mean, m2), centred


def _sums(x: Tensor, place: Tensor, n: int, *, squared: bool = False) -> Tensor:
    """∑ x, or ∑ x², at each of the first n places."""
    sums = x.new_zeros(n + 1)
    # Both are a plain loop on a CPU, of which scatter's is the shorter.
    add = sums.scatter_add_ if x.is_cpu else sums.index_add_
    # Squares of a part at a time stay in the processor's cache; all of them would be fresh memory.
    for part, at in zip(x.split(CHUNK), place.split(CHUNK), strict=True):
        add(0, at, part * part if squared else part)
    return sums[:n]


def moments(x: Tensor, valid: Tensor, workers: Workers = ALONE) -> SegmentMoments:
    """The moments of all valid x over all workers, as one segment of 0-dim tensors."""
    x = wide(x)
    valid = valid.to(x.device)  # which is another one where x's own has no float64
    x = torch.where(valid, x, 0.0)
    count, total = workers.sum(torch.stack([valid.sum().to(x), x.sum()]))
    mean = total / count.clamp(min=1.0)
    m2 = workers.sum(torch.where(valid, x - mean, 0.0).square().sum())
    return SegmentMoments(count, mean, m2)


def plain(m: SegmentMoments) -> Moments:
    """The one segment of ``moments`` as plain numbers (one host sync)."""
    return Moments(*torch.stack([m.count, m.mean, m.m2]).tolist())


def wide(x: Tensor) -> Tensor:
    """x in float64, on the CPU where its device has none."""
    device = torch.device("cpu") if x.device.type in WITHOUT_FLOAT64 else x.device
    return x.detach().to(device, torch.float64)


def wide_dtype(x: Tensor) -> torch.dtype:
    """The widest float that x's own device has."""
    return torch.float32 if x.device.type in WITHOUT_FLOAT64 else torch.float64
