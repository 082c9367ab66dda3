"""The exact KL of two heads over the full vocabulary, from their hidden states.

The numerics of ``objective/exact.py``: what has probability 0 adds 0, a log-ratio counts for 1e15
at most. The reference gets no gradient.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.errors import DataError
from klamp.heads.logprobs import head_outputs
from klamp.heads.onepass import one_pass
from klamp.heads.softmax import Slopes, Softmax
from klamp.heads.tiles import Bias, Everywhere, Head, Weight, as_rows
from klamp.types import Scalar

At = Float[Tensor, "*shape"]


def head_kl(
    hidden: Everywhere,
    weight: Weight,
    ref_hidden: Float[Tensor, "*shape R"],
    ref_weight: Float[Tensor, "V R"],
    *,
    bias: Bias | None = None,
    ref_bias: Bias | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> At:
    """∑ᵥ p(v) (log p(v) − log q(v)) at each position, p and q the softmax of (h Wᵀ + b) / T.

    The backward makes the logits of both again: six matrix products. Where the coefficient of each
    position is known beforehand, ``head_kl_sum`` needs four.
    """
    head = as_rows(hidden, weight, bias, temperature)
    reference = reference_head(head, ref_hidden, ref_weight, ref_bias)
    labels = torch.zeros(len(head.hidden), dtype=torch.long, device=hidden.device)
    found = head_outputs(head, reference, labels, entropy_grad=False, chunk=chunk)
    assert found.kl is not None
    return found.kl.view(hidden.shape[:-1])


def head_kl_sum(
    hidden: Everywhere,
    weight: Weight,
    ref_hidden: Float[Tensor, "*shape R"],
    ref_weight: Float[Tensor, "V R"],
    weights: At,
    *,
    bias: Bias | None = None,
    ref_bias: Bias | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[Scalar, At]:
    """∑ₜ weightₜ · KLₜ with its gradient, made in the forward; and the KL of each position.

    The sum is differentiable, the KLs are to look at. A position of weight 0 is left out: its KL
    is reported as 0.
    """
    head = as_rows(hidden, weight, bias, temperature)
    reference = reference_head(head, ref_hidden, ref_weight, ref_bias)
    flat = weights.detach().reshape(-1).to(head.wide)
    rows = (flat != 0).nonzero().squeeze(1)
    kl = torch.zeros_like(flat)

    def answer(part: slice, found: Softmax) -> tuple[Tensor, Slopes]:
        assert found.kl is not None
        own = flat[rows[part]]
        kl[rows[part]] = found.kl
        return (own * found.kl).sum(), Slopes(None, None, own)

    labels = torch.zeros(len(flat), dtype=torch.long, device=hidden.device)
    total = one_pass(head, reference, labels, rows, answer, entropy_grad=False, chunk=chunk)
    return total, kl.view(weights.shape)


def reference_head(head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Head:
    """The reference beside a head: the same positions, the same vocabulary, no gradient."""
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    if len(rows) != len(head.hidden) or len(weight) != len(head.weight):
        raise DataError(
            f"the reference has {len(rows)} positions and {len(weight)} tokens, the policy "
            f"{len(head.hidden)} and {len(head.weight)}; both must cover the same"
        )
    bias = None if bias is None else bias.detach()
    return as_rows(rows, weight.detach(), bias, head.temperature, name="ref_hidden")
