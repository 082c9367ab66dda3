"""One batch of experience: prompts → samples → what the frozen models say of them → Batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.errors import DataError
from klamp.objective.objective import Objective
from klamp.train import models as networks
from klamp.train.models import Models
from klamp.train.sampler import Decoding, generate
from klamp.train.states import shares_prompts, trunk_of
from klamp.train.tasks.task import Example
from klamp.train.tokens import Tokens, micro_batches, padded_left
from klamp.types import Batch, GroupIds, PerToken, RowMask


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """Completions, as ids and as text."""

    tokens: Tokens
    examples: tuple[Example, ...]
    """The example of each row; samples of one prompt share it."""
    texts: tuple[str, ...]
    groups: GroupIds
    sampler_logprobs: Float[Tensor, "B T"]
    truncated: RowMask


@dataclass(frozen=True, kw_only=True, eq=False)
class Observed:
    """What the models say of samples before anything is learnt from them."""

    old_logprobs: Float[Tensor, "B T"]
    ref_logprobs: Float[Tensor, "B T"] | None
    values: Float[Tensor, "B T"] | None
    exact_kl: Float[Tensor, "B T"] | None


def sample(
    models: Models,
    examples: Sequence[Example],
    decoding: Decoding,
    *,
    samples_per_prompt: int = 1,
    generator: torch.Generator | None = None,
) -> Samples:
    """Completions of each example's prompt by the policy."""
    ids, mask = prompt_ids(models, examples)
    made = generate(
        models, ids, mask, decoding, samples_per_prompt=samples_per_prompt, generator=generator
    )
    written = torch.where(made.mask, made.responses, models.tokenizer.pad_token_id)
    texts = models.tokenizer.batch_decode(written, skip_special_tokens=True)
    of_row = torch.arange(len(examples), device=ids.device).repeat_interleave(samples_per_prompt)
    return Samples(
        tokens=Tokens(
            prompts=ids[of_row],
            prompt_mask=mask[of_row],
            responses=made.responses,
            mask=made.mask,
            groups=of_row if shares_prompts(trunk_of(models.policy)) else None,
        ),
        examples=tuple(examples[i] for i in of_row.tolist()),
        texts=tuple(texts),
        groups=of_row,
        sampler_logprobs=made.logprobs,
        truncated=made.truncated,
    )


def prompt_ids(models: Models, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """The prompts as one tensor, padded on the left."""
    rows = [models.tokenizer(e.prompt, add_special_tokens=True)["input_ids"] for e in examples]
    for example, row in zip(examples, rows, strict=True):
        if not row:
            raise DataError(f"the prompt {example.prompt!r} has no tokens; remove it from the task")
    ids, mask = padded_left(rows, models.tokenizer.pad_token_id)
    return ids.to(models.device), mask.to(models.device)


def as_trained(models: Models, decoding: Decoding) -> bool:
    """Whether the sampler's log-probs are those of the very distribution that is trained.

    Nothing may be cut off from it or rounded otherwise; temperature is the same for both.
    """
    whole = decoding.top_k is None and decoding.top_p in (None, 1.0)
    return whole and not decoding.greedy and models.autocast is None


@torch.no_grad()
def observe(
    models: Models,
    objective: Objective,
    tokens: Tokens,
    *,
    temperature: float,
    micro_tokens: int,
    known: PerToken | None = None,
) -> Observed:
    """Log-probs, values and, where asked for, the exact KL, before the first update.

    The policy is not asked again for log-probs that are ``known``, unless more is needed of it.
    """
    size = tokens.mask.shape
    wants_exact = objective.kl is not None and objective.kl.estimator == "exact"
    reads_values = models.value is not None and models.value.trunk is None
    skips = known is not None and not wants_exact and not reads_values
    old = torch.zeros(size, device=models.device) if known is None or not skips else known
    ref = None if models.reference is None else torch.zeros_like(old)
    values = None if models.value is None else torch.zeros_like(old)
    exact = torch.zeros_like(old) if wants_exact else None
    everyone = torch.arange(size[0], device=models.device)
    nothing_else = skips and ref is None and values is None
    for rows in [] if nothing_else else micro_batches(tokens, everyone, micro_tokens):
        part = tokens.select(rows)
        here = rows, slice(part.mask.shape[1])
        out = None if skips else networks.forward(models, models.policy, part, temperature)
        if out is not None:
            old[here] = out.logprobs
        if values is not None:
            reading = None if out is None else out.reading
            values[here] = networks.values_of(models, part, reading)
        if ref is not None:
            with models.as_reference() as reference:
                other = networks.forward(models, reference, part, temperature)
            ref[here] = other.logprobs
            if exact is not None and out is not None:
                exact[here] = networks.exact_kl_of(out.reading, other.reading, temperature)
    return Observed(old_logprobs=old, ref_logprobs=ref, values=values, exact_kl=exact)


def batch(samples: Samples, observed: Observed, scores: Sequence[float]) -> Batch:
    """What was observed, as the objective takes it."""
    given = [e.columns.get("difficulty") for e in samples.examples]
    known = all(isinstance(d, int | float) for d in given)
    device = samples.groups.device
    return Batch(
        mask=samples.tokens.mask,
        scores=torch.tensor(scores, dtype=torch.float32, device=device),
        groups=samples.groups,
        old_logprobs=observed.old_logprobs,
        ref_logprobs=observed.ref_logprobs,
        sampler_logprobs=samples.sampler_logprobs,
        values=observed.values,
        exact_kl=observed.exact_kl,
        truncated=samples.truncated,
        difficulty=torch.tensor(given, dtype=torch.float32, device=device) if known else None,
    )
