"""From many numbers to one: each token's share of the loss, and the sum that uses it.

A reduction turns a mask into shares, once per optimizer step and over every worker; a loss is then
the plain sum ∑ shareₜ · lossₜ. Sums split, so gradient accumulation and sharding are exact.

Masking a loss happens here and only here. Nothing upstream may assume that a caller zeroed it.
"""

from collections.abc import Callable

import torch

from klamp.types import ALONE, PerSequence, PerToken, Scalar, TokenMask, Workers


def token_mean(mask: TokenMask, *, tokens: Scalar, sequences: Scalar, constant: float) -> PerToken:
    """1 / N: each token weighs the same, so long responses weigh more (DAPO)."""
    return mask / tokens


def sequence_mean(
    mask: TokenMask, *, tokens: Scalar, sequences: Scalar, constant: float
) -> PerToken:
    """1 / (own length · S): each response weighs the same (GRPO)."""
    return mask / (mask.sum(dim=-1, keepdim=True).clamp(min=1) * sequences)


def sequence_sum(
    mask: TokenMask, *, tokens: Scalar, sequences: Scalar, constant: float
) -> PerToken:
    """1 / S: the mean over responses of the sum over their tokens."""
    return mask / sequences


def constant_mean(
    mask: TokenMask, *, tokens: Scalar, sequences: Scalar, constant: float
) -> PerToken:
    """1 / (constant · S): a length that does not depend on the data (Dr. GRPO)."""
    return mask / (constant * sequences)


REDUCTIONS: dict[str, Callable[..., PerToken]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "constant_mean": constant_mean,
}


def shares(
    mask: TokenMask,
    weights: PerSequence | None = None,
    workers: Workers = ALONE,
    *,
    reduction: str = "token_mean",
    constant: float | None = None,
) -> PerToken:
    """How much each token of an optimizer step contributes; row i gets wᵢ of its share.

    N active tokens and S non-empty sequences are counted over all workers, in one packed sum. A
    step without an active token has zero shares everywhere.
    """
    counts = torch.stack([mask.sum(), mask.any(dim=-1).sum()]).float()
    tokens, sequences = workers.sum(counts).clamp(min=1.0)
    share = REDUCTIONS[reduction](
        mask, tokens=tokens, sequences=sequences, constant=1.0 if constant is None else constant
    )
    return share if weights is None else share * weights.to(share)[:, None]


def weighted_sum(x: PerToken, shares: PerToken) -> Scalar:
    """∑ shareₜ · xₜ. What has no share cannot leak in, not even as inf · 0."""
    return (torch.where(shares > 0, x, 0.0) * shares).sum()
