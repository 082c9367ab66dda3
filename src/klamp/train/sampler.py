"""Batched sampling with a KV cache.

The log-probs it records are those of the distribution it sampled from: after temperature, top-k and
top-p. A prompt is read once for all its samples; rows that have ended leave the batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from klamp.errors import NumericsError
from klamp.train.models import Models, attention, casting
from klamp.types import PerSequence, RowMask

Chosen = Int[Tensor, "B"]
KEPT_FULL = 0.75  # below this share of rows still going, the others are dropped from the cache


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
    from transformers import DynamicCache

    rows = len(prompts) * samples_per_prompt
    out = _blank(rows, decoding.max_new_tokens, prompts, models.tokenizer.pad_token_id)
    stops = torch.tensor(models.stops(), device=prompts.device)
    cache = DynamicCache()
    logits = _next_logits(models, prompts, prompt_mask, cache)
    if samples_per_prompt > 1:
        cache.batch_repeat_interleave(samples_per_prompt)
    logits = logits.repeat_interleave(samples_per_prompt, dim=0)
    seen = prompt_mask.repeat_interleave(samples_per_prompt, dim=0)
    going = torch.arange(rows, device=prompts.device)  # which row each row of the cache is
    for t in range(decoding.max_new_tokens):
        tokens, chosen = choose(logits, decoding, generator)
        alive = out.truncated[going]
        out.responses[going, t] = torch.where(alive, tokens, out.responses[going, t])
        out.logprobs[going, t] = torch.where(alive, chosen, 0.0)
        out.mask[going, t] = alive
        alive = alive & ~torch.isin(tokens, stops)
        out.truncated[going] = alive
        left = int(alive.sum())
        if not left or t == decoding.max_new_tokens - 1:
            break
        if left <= KEPT_FULL * len(going):
            kept = alive.nonzero().squeeze(1)
            cache.batch_select_indices(kept)
            going, tokens, seen = going[kept], tokens[kept], seen[kept]
        seen = torch.cat([seen, seen.new_ones(len(seen), 1)], dim=1)
        logits = _next_logits(models, tokens[:, None], seen, cache)
    return _trimmed(out)


def choose(
    logits: Float[Tensor, "B V"], decoding: Decoding, generator: torch.Generator | None
) -> tuple[Chosen, PerSequence]:
    """The next token of each row, and its log-prob under what it was drawn from."""
    lost = ~(logits < torch.inf).all(dim=-1) | ~logits.isfinite().any(dim=-1)
    if bool(lost.any()):
        row = int(lost.nonzero()[0])
        raise NumericsError(
            f"the policy's logits are not finite in row {row} of the sampler: its weights have "
            "left the finite numbers. Resume from a checkpoint with a lower optimizer.lr"
        )
    if decoding.greedy:
        best = logits.argmax(dim=-1)
        return best, logits.log_softmax(dim=-1).gather(-1, best[:, None]).squeeze(-1)
    distribution = narrowed(logits / decoding.temperature, decoding).log_softmax(dim=-1)
    drawn = torch.multinomial(distribution.exp(), 1, generator=generator)
    return drawn.squeeze(-1), distribution.gather(-1, drawn).squeeze(-1)


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


def _next_logits(
    models: Models, ids: Int[Tensor, "B S"], seen: Bool[Tensor, "B L"], cache: Any
) -> Float[Tensor, "B V"]:
    given = attention(seen)
    if given["position_ids"] is not None:
        given["position_ids"] = given["position_ids"][:, -ids.shape[1] :]
    with casting(models):
        out = models.policy(
            input_ids=ids, **given, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
    return out.logits[:, -1].float()
