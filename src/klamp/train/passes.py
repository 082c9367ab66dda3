"""One forward pass of the policy, up to the loss: by all logits, or by tiles of them.

Tiles where logits would be too many to hold. The result is the same; the gradient of the head is
then made along with the loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from klamp.heads.fused import head_loss
from klamp.objective.objective import Objective
from klamp.train import models as networks
from klamp.train.models import Models, Reading
from klamp.train.tokens import Tokens
from klamp.types import Batch, LossOutput, PerToken, Targets


@dataclass(frozen=True, kw_only=True, eq=False)
class Pass:
    """A loss, and the tensors to look at when it is not finite."""

    output: LossOutput
    suspects: Mapping[str, Tensor | None]


def loss_of(
    models: Models,
    objective: Objective,
    tokens: Tokens,
    batch: Batch,
    targets: Targets,
    shares: PerToken,
    *,
    temperature: float,
) -> Pass:
    """The objective's loss of some sequences; batch, targets and shares are as wide as they are."""
    reading = networks.read(models, models.policy, tokens)
    values = None
    if models.value is not None:
        values = networks.values_of(models, tokens, reading)
    other = _reference(models, objective, tokens)
    if reading.tiled and (other is None or other.tiled):
        made = head_loss(
            objective,
            reading.seen(),
            reading.weight,
            tokens.responses,
            batch,
            targets,
            shares,
            bias=reading.bias,
            temperature=temperature,
            values=values,
            **_beside(other),
        )
        suspects = {"logprobs": made.logprobs, "values": values, "entropy": made.entropy}
        return Pass(output=made.output, suspects={**suspects, "loss": made.output.loss})
    out = networks.told(
        reading, tokens.responses, temperature, entropy_grad=objective.entropy_coef is not None
    )
    kl = None if other is None else networks.exact_kl_of(reading, other, temperature)
    given = {"values": values, "entropy": out.entropy, "exact_kl": kl}
    output = objective.loss(out.logprobs, batch, targets, shares, **given)
    return Pass(output=output, suspects={"logprobs": out.logprobs, **given, "loss": output.loss})


def _reference(models: Models, objective: Objective, tokens: Tokens) -> Reading | None:
    """What the reference says, where the objective is made of the exact KL."""
    if objective.kl is None or objective.kl.estimator != "exact":
        return None
    with models.as_reference() as reference:
        return networks.read(models, reference, tokens)


def _beside(other: Reading | None) -> dict[str, Any]:
    if other is None:
        return {}
    return {"ref_hidden": other.seen(), "ref_weight": other.weight, "ref_bias": other.bias}
