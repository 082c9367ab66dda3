"""The exact KL of two next-token distributions, over the full vocabulary."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.errors import ConfigError, DataError
from klamp.objective.logratio import LARGEST, widen
from klamp.types import PerToken

Vocabulary = Float[Tensor, "B T V"]


def exact_kl(logprobs: Vocabulary, ref_logprobs: Vocabulary, *, chunk: int = 256) -> PerToken:
    """∑ᵥ π(v) (log π(v) − log π_ref(v)) at each token, from two [B, T, V] log-prob tensors.

    Worked through ``chunk`` tokens at a time, forward and backward, so that beside the inputs and
    their gradients no [B, T, V] tensor is made. A token of probability 0 adds 0. For a gradient
    with respect to logits, pass ``logits.log_softmax(-1)``.
    """
    if logprobs.shape != ref_logprobs.shape:
        raise DataError(
            f"exact_kl got logprobs {list(logprobs.shape)} and ref_logprobs "
            f"{list(ref_logprobs.shape)}; both must be [B, T, V] over the same vocabulary"
        )
    if chunk < 1:
        raise ConfigError(f"exact_kl chunk must be at least 1 token, got {chunk}")
    vocabulary = logprobs.shape[-1]
    flat = logprobs.reshape(-1, vocabulary), ref_logprobs.reshape(-1, vocabulary)
    return _ExactKL.apply(*flat, chunk).view(logprobs.shape[:2])


class _ExactKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logp: Tensor, ref: Tensor, chunk: int) -> Tensor:
        ctx.save_for_backward(logp, ref)
        ctx.chunk = chunk
        parts = zip(logp.split(chunk), ref.split(chunk), strict=True)
        rows = [(p * d).sum(-1) for p, d in (_terms(a, b) for a, b in parts)]
        return torch.cat(rows) if rows else widen(logp).sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        logp, ref = ctx.saved_tensors
        by_logp, by_ref = (
            torch.empty_like(x) if needed else None
            for x, needed in zip((logp, ref), ctx.needs_input_grad, strict=False)
        )
        for i in range(0, len(logp), ctx.chunk):
            rows = slice(i, i + ctx.chunk)
            p, d = _terms(logp[rows], ref[rows])
            grad = grads[0][rows, None]
            # Where nothing is asked for, NaN and inf must not come back as 0 · inf.
            weighted = torch.where(grad == 0, 0.0, p * grad)
            if by_logp is not None:  # ∂/∂log π of π · (log π − log ref)
                by_logp[rows] = torch.where(grad == 0, 0.0, weighted * (d + 1.0))
            if by_ref is not None:
                by_ref[rows] = -weighted
        return by_logp, by_ref, None


def _terms(logp: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """π and log π − log ref, with 0 · anything = 0 where π is 0; bounded where ref is 0."""
    logp, ref = widen(logp), widen(ref)
    p = logp.exp()
    return p, torch.where(p > 0, logp - ref, 0.0).clamp(-LARGEST, LARGEST)
