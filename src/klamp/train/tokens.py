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


def micro_batches(tokens: Tokens, rows: Tensor, most: int) -> list[Tensor]:
    """Rows of similar length together, each part of at most ``most`` tokens with its padding.

    A row that is longer than that is a part of its own: rows are never cut.
    """
    prompts = tokens.prompt_mask[rows].sum(dim=1).tolist()
    responses = tokens.mask[rows].sum(dim=1).clamp(min=1).tolist()
    parts: list[list[int]] = []
    widths = (0, 0)  # of the part that is being filled: its longest prompt, its longest response
    lengths = tokens.lengths()[rows].tolist()
    for i in sorted(range(len(rows)), key=lambda i: lengths[i]):
        grown = max(widths[0], prompts[i]), max(widths[1], responses[i])
        if not parts or sum(grown) * (len(parts[-1]) + 1) > most:
            parts.append([])
            grown = prompts[i], responses[i]
        parts[-1].append(i)
        widths = grown
    return [rows[torch.tensor(part)] for part in parts]
