"""The terms of the loss: each a sum of shares, with the numbers that explain it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from klamp.errors import DataError
from klamp.objective.kl import KLTerm
from klamp.objective.logratio import RATIO_LIMIT, excess, log_ratio, narrow, widen
from klamp.objective.losses import ClippedSurrogate, Surrogate, ValueLoss
from klamp.objective.metrics import Metric, count_of, max_of, mean_of, min_of, total_of
from klamp.objective.reduce import weighted_sum
from klamp.types import Batch, PerToken, Scalar, Targets, TokenMask


class Term(NamedTuple):
    """What one term adds to the loss."""

    loss: Scalar
    metrics: dict[str, Metric]


class Attached(torch.autograd.Function):
    """A loss whose gradient is already there."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, loss: Tensor | float, gradient: Tensor) -> Tensor:
        """The loss."""
        ctx.save_for_backward(gradient)
        return loss.clone() if isinstance(loss, Tensor) else logprobs.new_tensor(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """The gradient, times what is asked for."""
        (gradient,) = ctx.saved_tensors
        # On the CPU looking costs nothing, and as it is the gradient need not be copied.
        if not torch.compiler.is_compiling() and grads[0].is_cpu and float(grads[0]) == 1.0:
            return gradient, None, None
        return gradient * grads[0], None, None


def token_wise(surrogate: Surrogate, kl: KLTerm | None, targets: Targets) -> bool:
    """Whether no token's terms depend on another's log-prob."""
    if isinstance(surrogate, ClippedSurrogate) and surrogate.ratio == "sequence":
        return False
    if kl is None or kl.where != "loss" or kl.gradient == "value":
        return True
    return kl.weighting is None and (kl.gradient == "token" or targets.kl_to_come is not None)


def written_down(surrogate: Surrogate, kl: KLTerm | None, batch: Batch) -> bool:
    """Whether ``block`` and ``written`` have the gradient of a token's terms."""
    known = kl is None or (kl.weighting is None and kl.estimator in ("k1", "k2", "k3"))
    has_reference = kl is None or batch.ref_logprobs is not None
    return isinstance(surrogate, ClippedSurrogate) and known and has_reference


def policy_term(
    surrogate: Surrogate,
    logprobs: PerToken,
    batch: Batch,
    targets: Targets,
    active: TokenMask,
    shares: PerToken,
) -> Term:
    """∑ share · correction · surrogate."""
    old = batch.old_logprobs
    advantages = torch.where(active, targets.advantages, 0.0)
    # A sequence's ratio is that of all its tokens, also of those that have no share here.
    policy = surrogate(logprobs, old, advantages, targets.mask)
    loss = weighted_sum(policy.loss * torch.where(active, targets.corrections, 0.0), shares)
    clipped = policy.clipped_low | policy.clipped_high
    # Samples are the old policy's, so excess(log π/π_old) is k3 of KL(π_old ‖ π).
    near = log_ratio(logprobs.detach(), old, active, bounds=(-RATIO_LIMIT, RATIO_LIMIT)).value
    moved = excess(near)
    return Term(
        loss,
        {
            "actor/pg_loss": total_of(loss),
            "actor/ratio_mean": mean_of(policy.ratio, active),
            "actor/ratio_max": max_of(policy.ratio, active),
            "actor/ratio_min": min_of(policy.ratio, active),
            "actor/clip_frac": mean_of(clipped, active),
            "actor/clip_frac_low": mean_of(policy.clipped_low, active),
            "actor/clip_frac_high": mean_of(policy.clipped_high, active),
            "actor/dual_clip_frac": mean_of(policy.dual_clipped, active),
            "actor/ratio_clamp_frac": mean_of(policy.clamped, active),
            "actor/old_kl": mean_of(moved, active),
            "actor/nonfinite_tokens": count_of(active & ~logprobs.isfinite()),
        },
    )


def kl_term(
    kl: KLTerm,
    logprobs: PerToken,
    batch: Batch,
    targets: Targets,
    active: TokenMask,
    shares: PerToken,
    exact_kl: PerToken | None,
) -> Term:
    """β · ∑ share · KL."""
    if exact_kl is not None:
        check_shape("exact_kl", exact_kl, batch)
    tokens = kl(logprobs, batch, active, to_come=targets.kl_to_come, exact_kl=exact_kl)
    loss = targets.kl_coef * weighted_sum(tokens.term, shares)
    return Term(
        loss,
        {
            "actor/kl_loss": total_of(loss),
            "actor/kl": mean_of(tokens.term, active),
            "actor/kl_clamp_frac": mean_of(tokens.clamped, active),
            "actor/kl_coef_clamp_frac": mean_of(tokens.bounded, active),
        },
    )


def entropy_term(
    coef: float | None, entropy: PerToken | None, batch: Batch, targets: Targets, shares: PerToken
) -> Term:
    """−coef · ∑ share · entropy; without a coefficient the entropy is only watched."""
    if entropy is None:
        raise DataError(
            f"Objective.entropy_coef is {coef} but loss got entropy=None; pass the policy's "
            "entropy at each token, or set entropy_coef=None"
        )
    check_shape("entropy", entropy, batch)
    active = targets.mask & (shares > 0)
    x = torch.where(active, widen(entropy), 0.0)
    if coef is None:
        return Term(shares.new_zeros(()), {"actor/entropy": mean_of(x, active)})
    loss = -coef * weighted_sum(x, shares)
    return Term(loss, {"actor/entropy_loss": total_of(loss), "actor/entropy": mean_of(x, active)})


def value_term(
    value_loss: ValueLoss,
    values: PerToken | None,
    batch: Batch,
    targets: Targets,
    shares: PerToken,
) -> Term:
    """∑ share · value loss, summed in float64: a large error squared is no reason to overflow."""
    if values is None or targets.returns is None:
        missing = "values" if values is None else "targets.returns"
        raise DataError(
            f"Objective.value_loss needs values and returns but loss got {missing}=None; pass the "
            "critic's values, or set value_loss=None"
        )
    check_shape("values", values, batch)
    active = targets.mask & (shares > 0)
    tokens = value_loss(values, batch.values, targets.returns, active)
    loss = narrow(weighted_sum(tokens.loss, shares.to(tokens.loss)), widen(values).dtype)
    return Term(
        loss,
        {
            "critic/value_loss": total_of(loss),
            "critic/values/mean": mean_of(values, active),
            "critic/value_clip_frac": mean_of(tokens.clipped, active),
            "critic/nonfinite_tokens": count_of(active & ~values.isfinite()),
        },
    )


def check_shape(name: str, x: PerToken, batch: Batch) -> None:
    """Everything given to the loss covers the same response positions."""
    if x.shape != batch.mask.shape:
        raise DataError(
            f"loss got {name} with shape {list(x.shape)} but Batch.mask has "
            f"{list(batch.mask.shape)}; both cover response positions only"
        )
