"""One batch of experience: prompts → samples → what the frozen models say of them → Batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.errors import DataError
from klamp.objective.exact import exact_kl
from klamp.objective.objective import Objective
from klamp.train import models as networks
from klamp.train.models import Models
from klamp.train.sampler import Decoding, generate
from klamp.train.tasks.task import Example
from klamp.train.tokens import Tokens, micro_batches, padded_left
from klamp.types import Batch, GroupIds, RowMask


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


@torch.no_grad()
def observe(
    models: Models, objective: Objective, tokens: Tokens, *, temperature: float, micro_tokens: int
) -> Observed:
    """Log-probs, values and, where asked for, the exact KL, before the first update."""
    size = tokens.mask.shape
    old = torch.zeros(size, device=models.device)
    ref = None if models.reference is None else torch.zeros_like(old)
    values = None if models.value is None else torch.zeros_like(old)
    wants_exact = objective.kl is not None and objective.kl.estimator == "exact"
    exact = torch.zeros_like(old) if wants_exact else None
    everyone = torch.arange(size[0], device=models.device)
    for rows in micro_batches(tokens, everyone, micro_tokens):
        part = tokens.select(rows)
        width = part.mask.shape[1]
        out = networks.forward(models, models.policy, part, temperature)
        old[rows, :width] = out.logprobs
        if values is not None:
            values[rows, :width] = networks.values_of(models, part, out)
        if ref is not None:
            with models.as_reference() as reference:
                other = networks.forward(models, reference, part, temperature)
            ref[rows, :width] = other.logprobs
            if exact is not None:
                exact[rows, :width] = exact_kl(out.distribution, other.distribution)
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
