"""A head cut into tiles: blocks of rows × columns of the vocabulary, and the products of each.

Logits are float32 or wider whatever comes in. Tall blocks with few columns make the fastest
products: the weight is read once per block, and a tile is still in the cache when it is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from klamp.errors import ConfigError, DataError
from klamp.objective.logratio import LARGEST

Vectors = Float[Tensor, "N H"]
Weight = Float[Tensor, "V H"]
Bias = Float[Tensor, "V"]
Tile = Float[Tensor, "N v"]
PerRow = Float[Tensor, "N"]
Labels = Int[Tensor, "N"]
Everywhere = Float[Tensor, "*shape H"]

TILE_BYTES = 8 << 20
"""One tile. Two or three are at work at a time, and all of them fit a cache."""
KEPT_BYTES = 32 << 20
"""All tiles of a block, where they are kept until its gradient is known; more with few rows."""
TALLEST, SHORTEST, NARROWEST = 1024, 256, 256
ALIGNED = 64
"""Tiles as wide as a multiple of this: others made products a fifth slower."""


@dataclass(frozen=True, eq=False)
class Head:
    """z = (h Wᵀ + b) / temperature."""

    hidden: Vectors
    weight: Weight
    bias: Bias | None
    temperature: float

    @property
    def wide(self) -> torch.dtype:
        """What logits and gradients are added up in."""
        return torch.promote_types(self.product, torch.float32)

    @property
    def product(self) -> torch.dtype:
        """What matrix products are made in; on a CPU float32, where bfloat16 would round logits."""
        dtype = torch.promote_types(self.hidden.dtype, self.weight.dtype)
        return (
            torch.promote_types(dtype, torch.float32) if self.hidden.device.type == "cpu" else dtype
        )

    def rows(self, rows: slice | Tensor) -> "Head":
        """The head at some of its rows, ready for products."""
        return Head(self.hidden[rows].to(self.product), self.weight, self.bias, self.temperature)

    def vectors(self, columns: slice | Tensor) -> Tensor:
        """The weight at some of its columns, ready for products."""
        return self.weight[columns].to(self.product)

    def logits(self, w: Tensor, columns: slice, out: Tile) -> Tile:
        """z of one tile, written to ``out``; a bias of −∞ counts as −1e15, so that 0 · z is 0."""
        if out.dtype == w.dtype:
            torch.mm(self.hidden, w.t(), out=out)
        else:
            out.copy_(self.hidden @ w.t())
        if self.bias is not None:
            out.add_(self.bias[columns].to(out.dtype).clamp(-LARGEST, LARGEST))
        return out if self.temperature == 1.0 else out.div_(self.temperature)


class Rooms(NamedTuple):
    """Where the tiles of some columns go: p̂, x = z − top, d = x − x_ref, and a passing result."""

    p: Tile
    x: Tile
    d: Tile | None
    spare: Tile


class Store:
    """The memory of one block's tiles: of those to ``keep`` a place for each, of others one."""

    def __init__(
        self,
        head: Head,
        rows: int,
        columns: list[slice],
        *,
        reference: bool,
        keep: Sequence[str] = (),
    ) -> None:
        widest = max(c.stop - c.start for c in columns)
        spare = reference or "x" in keep  # else x is not needed any more when spare is
        self.keep = keep
        self.memory = {
            name: head.hidden.new_empty(
                rows * (columns[-1].stop if name in keep else widest), dtype=head.wide
            )
            for name in ("p", "x", *["d"] * reference, *["spare"] * spare)
        }

    def rooms(self, columns: slice, rows: int) -> Rooms:
        """The places of some columns, for as many rows as a block has."""
        width = columns.stop - columns.start
        found: dict[str, Tensor] = {}
        for name, memory in self.memory.items():
            start = columns.start * rows if name in self.keep else 0
            found[name] = memory[start : start + rows * width].view(rows, width)
        return Rooms(found["p"], found["x"], found.get("d"), found.get("spare", found["x"]))


def blocks(rows: int, most: int, multiple: int = 1) -> list[slice]:
    """0 … rows in slices of nearly the same size, about ``most`` at most; at least one."""
    count = max(1, -(-rows // most))
    size = max(1, -(-rows // (count * multiple))) * multiple
    return [slice(i, min(i + size, rows)) for i in range(0, max(rows, 1), size)]


def columns_of(vocabulary: int, rows: int) -> list[slice]:
    """The columns of tiles that are as tall as a block of rows."""
    return blocks(vocabulary, max(NARROWEST, TILE_BYTES // (4 * max(rows, 1))), ALIGNED)


def height(chunk: int | None, vocabulary: int, *, kept: bool = False) -> int:
    """How many rows a block has: as asked for, or what its tiles leave room for."""
    if chunk is not None:
        if chunk < 1:
            raise ConfigError(f"chunk must be at least 1 row, got {chunk}")
        return chunk
    if not kept:
        return TALLEST
    return min(TALLEST, max(SHORTEST, KEPT_BYTES // (4 * vocabulary)))


def as_rows(
    hidden: Everywhere, weight: Weight, bias: Bias | None, temperature: float, name: str = "hidden"
) -> Head:
    """A head over flat rows, after a look at its shapes."""
    if hidden.shape[-1] != weight.shape[1]:
        raise DataError(
            f"{name} has {hidden.shape[-1]} features but its weight is {list(weight.shape)}; "
            "the weight must be [vocabulary, features]"
        )
    if temperature <= 0:
        raise ConfigError(f"temperature must be above 0, got {temperature}")
    return Head(hidden.reshape(-1, hidden.shape[-1]), weight, bias, temperature)


def check_labels(labels: Labels, vocabulary: int) -> None:
    """Every label is a token of the vocabulary."""
    if labels.numel() and not bool(((labels >= 0) & (labels < vocabulary)).all()):
        raise DataError(
            f"labels go from {int(labels.min())} to {int(labels.max())} but the vocabulary has "
            f"{vocabulary} tokens; give the ids of the generated tokens"
        )


def plain(x: Tensor) -> Any:
    """Without autocast: what a product is made in is decided here."""
    return torch.autocast(x.device.type, enabled=False)
