"""Prompts and responses as ids: prompts padded on the left, responses on the right."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Lengths = Int[Tensor, "B"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """Whole sequences; P is the width of prompts, T that of responses."""

    prompts: Int[Tensor, "B P"]
    prompt_mask: Bool[Tensor, "B P"]
    responses: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    """True where the policy generated the token; the end-of-text token counts."""
    groups: Lengths | None = None
    """Rows with the same id have the same prompt, which may be read once for them; None: nothing
    is known of that."""

    def select(self, rows: Tensor) -> "Tokens":
        """Some rows, at the width that these rows need; at least one response position stays."""
        prompt_mask, mask = self.prompt_mask[rows], self.mask[rows]
        p = int(prompt_mask.sum(dim=1).max()) if len(rows) else 1
        t = max(int(mask.sum(dim=1).max()), 1) if len(rows) else 1
        return Tokens(
            prompts=self.prompts[rows, -p:],
            prompt_mask=prompt_mask[:, -p:],
            responses=self.responses[rows, :t],
            mask=mask[:, :t],
            groups=None if self.groups is None else self.groups[rows],
        )

    def to(self, device: torch.device) -> "Tokens":
        """The same, on a device."""
        return Tokens(
            prompts=self.prompts.to(device),
            prompt_mask=self.prompt_mask.to(device),
            responses=self.responses.to(device),
            mask=self.mask.to(device),
            groups=None if self.groups is None else self.groups.to(device),
        )

    def lengths(self) -> Lengths:
        """Prompt and response tokens of each row."""
        return self.prompt_mask.sum(dim=1) + self.mask.sum(dim=1)


def padded_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids of unequal length as one tensor, and where they are."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(width) >= width - lengths[:, None]


@dataclass(frozen=True)
class _Part:
    """Rows of one forward pass: how many prompts they have, and the longest of each kind."""

    rows: tuple[int, ...] = ()
    prompts: int = 0
    last: int | None = None
    prompt: int = 0
    response: int = 0

    def with_row(self, row: int, group: int, prompt: int, response: int) -> "_Part":
        return _Part(
            (*self.rows, row),
            self.prompts + (group != self.last),
            group,
            max(self.prompt, prompt),
            max(self.response, response),
        )

    def tokens(self) -> int:
        return self.prompts * self.prompt + len(self.rows) * self.response


def micro_batches(tokens: Tokens, rows: Tensor, most: int) -> list[Tensor]:
    """Rows of similar length together, each part of at most ``most`` tokens with its padding.

    Rows that share a prompt stand together, and it counts once. A row that is longer than ``most``
    is a part of its own: rows are never cut.
    """
    prompts = tokens.prompt_mask[rows].sum(dim=1).tolist()
    responses = tokens.mask[rows].sum(dim=1).clamp(min=1).tolist()
    groups = list(range(len(rows))) if tokens.groups is None else tokens.groups[rows].tolist()
    lengths = tokens.lengths()[rows].tolist()
    longest: dict[int, int] = {}
    for group, length in zip(groups, lengths, strict=True):
        longest[group] = max(length, longest.get(group, 0))
    parts: list[_Part] = []
    for i in sorted(range(len(rows)), key=lambda i: (longest[groups[i]], groups[i], lengths[i])):
        row = i, groups[i], prompts[i], responses[i]
        grown = (parts[-1] if parts else _Part()).with_row(*row)
        if parts and grown.tokens() <= most:
            parts[-1] = grown
        else:
            parts.append(_Part().with_row(*row))
    return [rows[torch.tensor(part.rows)] for part in parts]
