"""Keys and values of what was read, and attention to them for one token of each row.

The samples of a long prompt share its keys and values; a short one's are repeated, since it is then
cheaper to read more than to call more. Responses have keys and values of their own.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Rows = Int[Tensor, "K"]
PromptMask = Bool[Tensor, "N P"]
Cached = Float[Tensor, "2 N H P D"]
Queries = Float[Tensor, "B Q D"]
New = Float[Tensor, "B E D"]
Read = Float[Tensor, "B W"]

ROOM = 16  # positions to grow by: gaps between rows cost more than a copy now and then
LONG = 2**17  # numbers per layer in repeated prompts, from which on they are shared


class Memory:
    """What every layer remembers of every row."""

    def __init__(self, cached: Sequence[Cached], prompt_mask: PromptMask, samples: int) -> None:
        _, prompts, self.heads, self.prompt, _ = cached[0].shape
        shares = samples > 1 and samples * cached[0].numel() >= LONG
        self.length = self.prompt  # positions that were read
        self.start = self.prompt if shares else 0  # the first that rows have for themselves
        self.shared = [x.flatten(1, 2) for x in cached] if shares else None
        repeated = [x[:, :, :, self.start :].repeat_interleave(samples, dim=1) for x in cached]
        self.own = [_with_room(x) for x in repeated]
        padding = self.prompt - prompt_mask.sum(dim=1)
        self.padding = None if bool(prompt_mask.all()) else padding.repeat_interleave(samples)
        self.prompt_of = [i for i in range(prompts) for _ in range(samples)]
        self.slots: Tensor | None = None
        self.places = prompts, samples  # prompts, and rows that each has room for
        self.bias = self._bias()

    def forward(self) -> None:
        """One more position, for which every layer is to give keys and values."""
        self.length += 1
        if self.length - self.start > self.own[0].shape[3]:
            self.own = [_with_room(x) for x in self.own]
        if self.shared is None:
            self.bias = self._bias()

    def attend(self, layer: int, query: Queries, new: New) -> Read:
        """What the newest token of each row reads, with its own keys and then values in ``new``."""
        own, here, width = self.own[layer], self.length - self.start, query.shape[-1]
        rows = len(query)
        own.select(3, here - 1).copy_(new.view(rows, 2, self.heads, width).transpose(0, 1))
        keys, values = own.narrow(3, 0, here).flatten(1, 2).unbind(0)
        query = query.reshape(rows * self.heads, -1, width)
        if self.shared is None:
            scores = _scores(query, keys, self.bias)
            return torch.bmm(scores.softmax(dim=-1), values).view(rows, -1)
        before, there = self.shared[layer].unbind(0)
        parts = [_scores(self._by_prompt(query), before, self.bias)]
        parts.append(self._by_prompt(torch.bmm(query, keys.transpose(1, 2))))
        weights = torch.cat(parts, dim=-1).softmax(dim=-1)
        read = self._by_row(torch.bmm(weights[..., : self.prompt], there))
        late = self._by_row(weights[..., self.prompt :]).view(rows * self.heads, -1, here)
        return read + torch.bmm(late, values).view(rows, -1)

    def keep(self, rows: Rows) -> None:
        """Only these rows go on."""
        self.own = [x.index_select(1, rows) for x in self.own]
        self.padding = None if self.padding is None else self.padding[rows]
        left = [self.prompt_of[row] for row in rows.tolist()]
        if self.shared is not None:
            prompts = list(dict.fromkeys(left))
            of_prompt = rows.new_tensor(prompts)
            self.shared = [
                x.unflatten(1, (-1, self.heads)).index_select(1, of_prompt).flatten(1, 2)
                for x in self.shared
            ]
            left = [prompts.index(prompt) for prompt in left]
            self.places = len(prompts), max(left.count(i) for i in range(len(prompts)))
            ranks = [left[:row].count(prompt) for row, prompt in enumerate(left)]
            slots = [p * self.places[1] + rank for p, rank in zip(left, ranks, strict=True)]
            full = slots == list(range(self.places[0] * self.places[1]))
            self.slots = None if full else rows.new_tensor(slots)
        self.prompt_of = left
        self.bias = self._bias()

    def _by_prompt(self, x: Tensor) -> Tensor:
        """[rows · heads, queries, n] → [prompts · heads, rows of one · queries, n]."""
        prompts, rows = self.places
        width = x.shape[-1]
        if self.slots is not None:
            x = x.view(len(self.slots), -1)
            x = x.new_zeros(prompts * rows, x.shape[1]).index_copy_(0, self.slots, x)
        x = x.view(prompts, rows, self.heads, -1, width).transpose(1, 2)
        return x.reshape(prompts * self.heads, -1, width)

    def _by_row(self, x: Tensor) -> Tensor:
        """The way back, all heads of a row beside each other: [rows, heads · queries · n]."""
        prompts, rows = self.places
        x = x.view(prompts, self.heads, rows, -1, x.shape[-1]).transpose(1, 2)
        x = x.reshape(prompts * rows, -1)
        return x if self.slots is None else x.index_select(0, self.slots)

    def _bias(self) -> Tensor | None:
        """−∞ at padding, for every head of every row, or of every prompt that rows share."""
        if self.padding is None:
            return None
        padding, width = self.padding, self.length
        if self.shared is not None:
            first = [self.prompt_of.index(i) for i in range(self.places[0])]
            padding, width = self.padding[torch.tensor(first, device=padding.device)], self.prompt
        places = torch.arange(width, device=padding.device)
        hidden = self.own[0].new_zeros(len(padding), 1, width)
        hidden = hidden.masked_fill_(places < padding[:, None, None], -torch.inf)
        return hidden.repeat_interleave(self.heads, dim=0)


def _scores(query: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    keys = keys.transpose(1, 2)
    return torch.bmm(query, keys) if bias is None else torch.baddbmm(bias, query, keys)


def _with_room(x: Tensor) -> Tensor:
    used = x.shape[3]
    wide = x.new_empty(*x.shape[:3], used + ROOM, x.shape[4])
    wide[:, :, :, :used] = x
    return wide
