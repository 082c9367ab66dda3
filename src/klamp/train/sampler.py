"""Batched sampling with a KV cache.

The log-probs it records are those of the distribution it sampled from: after temperature, top-k and
top-p. A prompt is read once for all its samples; rows that have ended leave the batch.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from klamp.errors import NumericsError
from klamp.train.models import Models
from klamp.train.reader import Reader, reader_of
from klamp.types import PerSequence, RowMask

Chosen = Int[Tensor, "B"]
Luck = Float[Tensor, "B"]
KEPT_FULL = 0.75  # below this share of rows still going, the others are dropped from the cache
LOOKS = {"cpu": 1}  # tokens between two looks at how many rows still go; 8 where that costs a wait


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How the next token is chosen."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    greedy: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Generated:
    """Responses padded on the right."""

    responses: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    logprobs: Float[Tensor, "B T"]
    truncated: RowMask
    """True where the response reached the limit without an end."""


@torch.no_grad()
def generate(
    models: Models,
    prompts: Int[Tensor, "N P"],
    prompt_mask: Bool[Tensor, "N P"],
    decoding: Decoding,
    *,
    samples_per_prompt: int = 1,
    generator: torch.Generator | None = None,
) -> Generated:
    """Samples of each prompt, those of one prompt beside each other."""
    rows = len(prompts) * samples_per_prompt
    out = _blank(rows, decoding.max_new_tokens, prompts, models.tokenizer.pad_token_id)
    stops = torch.tensor(models.stops(), device=prompts.device)
    luck = _luck(rows, decoding, generator, prompts.device)
    with torch.inference_mode():  # ``out`` was made outside of it, and may be learnt from
        reader, logits = reader_of(models, prompts, prompt_mask, samples_per_prompt)
        _write(out, reader, logits, decoding, luck, stops)
    return _trimmed(out)


def _write(
    out: Generated,
    reader: Reader,
    logits: Float[Tensor, "B V"],
    decoding: Decoding,
    luck: Float[Tensor, "B T"] | None,
    stops: Tensor,
) -> None:
    """Token by token, until the last row has ended."""
    going = torch.arange(len(logits), device=logits.device)  # which row each row of the reader is
    alive, written = out.truncated, _Columns(out, going)
    every, last = LOOKS.get(logits.device.type, 8), decoding.max_new_tokens - 1
    for t in range(decoding.max_new_tokens):
        tokens, chosen = drawn(logits, decoding, None if luck is None else luck[:, t])
        written.add(tokens, chosen, alive)
        alive = alive & (tokens[:, None] != stops).all(dim=1)
        if t == last or t % every == 0:
            refuse_lost(chosen)
            left = int(alive.sum())
            if t == last or not left:
                break
            if left <= KEPT_FULL * len(going):
                kept = alive.nonzero().squeeze(1)
                written.flush(alive)
                reader.keep(kept)
                going, tokens, alive = going[kept], tokens[kept], alive[kept]
                luck = None if luck is None else luck[kept]
                written = _Columns(out, going, t + 1)
        logits = reader(tokens)
    written.flush(alive)


def choose(
    logits: Float[Tensor, "B V"], decoding: Decoding, generator: torch.Generator | None
) -> tuple[Chosen, PerSequence]:
    """The next token of each row, and its log-prob under what it was drawn from."""
    luck = _luck(len(logits), replace(decoding, max_new_tokens=1), generator, logits.device)
    tokens, chosen = drawn(logits, decoding, None if luck is None else luck[:, 0])
    refuse_lost(chosen)
    return tokens, chosen


def drawn(
    logits: Float[Tensor, "B V"], decoding: Decoding, luck: Luck | None
) -> tuple[Chosen, PerSequence]:
    """The likeliest tokens, or those at which the summed-up distribution passes ``luck``."""
    if luck is None:
        distribution = logits.log_softmax(dim=-1)
        tokens = distribution.argmax(dim=-1, keepdim=True)
    else:
        warm = logits if decoding.temperature == 1.0 else logits / decoding.temperature
        distribution = narrowed(warm, decoding).log_softmax(dim=-1)
        below = distribution.exp().cumsum(dim=-1, dtype=luck.dtype)
        tokens = torch.searchsorted(below, luck[:, None] * below[:, -1:], right=True)
        tokens = tokens.clamp_(max=logits.shape[-1] - 1)  # only where they are not finite
    return tokens.squeeze(-1), distribution.gather(-1, tokens).squeeze(-1)


def refuse_lost(chosen: PerSequence) -> None:
    """Logits with NaN or +∞, or without anything above −∞, give no finite log-prob."""
    if not bool(chosen.isfinite().all()):
        row = int((~chosen.isfinite()).nonzero()[0])
        raise NumericsError(
            f"the policy's logits are not finite in row {row} of the sampler: its weights have "
            "left the finite numbers. Resume from a checkpoint with a lower optimizer.lr"
        )


def narrowed(logits: Float[Tensor, "B V"], decoding: Decoding) -> Float[Tensor, "B V"]:
    """−∞ outside the top-k and outside the smallest set of probability ≥ top-p."""
    if decoding.top_k is not None and decoding.top_k < logits.shape[-1]:
        least = logits.topk(decoding.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if decoding.top_p is not None and decoding.top_p < 1.0:
        ordered, places = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        outside = probs.cumsum(dim=-1) - probs >= decoding.top_p  # the first is always inside
        logits = logits.masked_fill(outside.scatter(-1, places, outside), -torch.inf)
    return logits


def _blank(rows: int, width: int, like: Tensor, pad: int) -> Generated:
    """Nothing generated yet, and no row at its end."""
    return Generated(
        responses=like.new_full((rows, width), pad),
        mask=torch.zeros(rows, width, dtype=torch.bool, device=like.device),
        logprobs=torch.zeros(rows, width, device=like.device),
        truncated=torch.ones(rows, dtype=torch.bool, device=like.device),
    )


def _trimmed(out: Generated) -> Generated:
    """The same, as wide as its longest response."""
    width = int(out.mask.any(dim=0).sum())
    return Generated(
        responses=out.responses[:, :width],
        mask=out.mask[:, :width],
        logprobs=out.logprobs[:, :width],
        truncated=out.truncated,
    )


def _luck(
    rows: int, decoding: Decoding, generator: torch.Generator | None, device: torch.device
) -> Tensor | None:
    """A number in [0, 1) for every token, drawn before any: no row's depend on the others'."""
    if decoding.greedy:
        return None
    exact = torch.float32 if device.type == "mps" else torch.float64
    size = rows, decoding.max_new_tokens
    found = torch.rand(size, dtype=exact, generator=generator, device=device)
    return found * (1.0 - 2.0**-20)  # so that no rounding goes past the last token that can be


class _Columns:
    """What some rows wrote since position ``start``, not yet where it belongs."""

    def __init__(self, out: Generated, rows: Tensor, start: int = 0) -> None:
        self.out, self.rows, self.start = out, rows, start
        self.tokens: list[Tensor] = []
        self.chosen: list[Tensor] = []
        self.alive: list[Tensor] = []

    def add(self, tokens: Tensor, chosen: Tensor, alive: Tensor) -> None:
        """One more token of each row."""
        self.tokens.append(tokens)
        self.chosen.append(chosen)
        self.alive.append(alive)

    def flush(self, alive: Tensor) -> None:
        """All of it into its place, but nothing of rows after their end."""
        here = slice(self.start, self.start + len(self.tokens))
        mask, out = torch.stack(self.alive, dim=1), self.out
        tokens, chosen = torch.stack(self.tokens, dim=1), torch.stack(self.chosen, dim=1)
        out.responses[self.rows, here] = tokens.where(mask, out.responses[self.rows, here])
        out.logprobs[self.rows, here] = chosen.where(mask, 0.0).to(out.logprobs)
        out.mask[self.rows, here] = mask
        out.truncated[self.rows] = alive
