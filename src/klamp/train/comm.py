"""The processes of a run, as the loop sees them: a rank, a size, sums and maxima."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Comm(Protocol):
    """The processes that train together; also the ``Workers`` of the objective."""

    @property
    def rank(self) -> int:
        """This process, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """``x`` summed over all processes."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """The elementwise maximum over all processes."""
        ...

    def wait(self) -> None:
        """Until every process is here."""
        ...


@dataclass(frozen=True)
class OneProcess:
    """A run of one process: the identity."""

    rank: int = 0
    size: int = 1

    def sum(self, x: Tensor) -> Tensor:
        """x."""
        return x

    def max(self, x: Tensor) -> Tensor:
        """x."""
        return x

    def wait(self) -> None:
        """Nobody to wait for."""


@dataclass(frozen=True)
class Distributed:
    """The processes of torch.distributed's default group."""

    rank: int
    size: int

    def sum(self, x: Tensor) -> Tensor:
        """A new tensor; ``x`` is left as it is."""
        return self._reduced(x, torch.distributed.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        """A new tensor; ``x`` is left as it is."""
        return self._reduced(x, torch.distributed.ReduceOp.MAX)

    def wait(self) -> None:
        """A barrier."""
        torch.distributed.barrier()

    def _reduced(self, x: Tensor, operation: torch.distributed.ReduceOp.RedOpType) -> Tensor:
        x = x.clone()
        torch.distributed.all_reduce(x, op=operation)
        return x
