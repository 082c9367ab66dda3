"""Policy, reference and value function at work: from sequences to log-probs and values."""

import contextlib
import os
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from klamp.errors import ConfigError
from klamp.train import family
from klamp.train.states import (
    Logits,
    States,
    before_responses,
    head_of,
    sequences,
    splits,
    states,
    trunk_of,
)
from klamp.train.tokens import Tokens

Labels = Int[Tensor, "B T"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Models:
    """The networks of a run."""

    policy: Any
    reference: Any | None
    """None: no reference. The policy itself: the adapter is switched off for it."""
    value: "ValueFunction | None"
    tokenizer: Any
    device: torch.device
    autocast: torch.dtype | None

    @contextlib.contextmanager
    def as_reference(self) -> Generator[Any]:
        """The reference, ready to be asked; no gradient is kept."""
        assert self.reference is not None
        off = self.policy.disable_adapter() if self.reference is self.policy else None
        with off or contextlib.nullcontext(), torch.no_grad():
            yield self.reference

    def stops(self) -> list[int]:
        """The ids that end a response."""
        known = getattr(self.policy.generation_config, "eos_token_id", None)
        found = known if isinstance(known, list) else [known]
        return sorted({i for i in [*found, self.tokenizer.eos_token_id] if i is not None})


class ValueFunction(nn.Module):
    """V(text so far): a linear head on the hidden states of its own trunk or the policy's."""

    def __init__(self, width: int, trunk: nn.Module | None) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """What one pass over sequences gives, per response token."""

    logprobs: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"]
    values: Float[Tensor, "B T"] | None
    distribution: Float[Tensor, "B T V"]
    """Log-probs of the whole vocabulary, for the exact KL."""


def device_of(name: str) -> torch.device:
    """The device of a name; auto takes the fastest there is."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.mps.is_available()}
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if there[kind])
    if not there[name]:
        found = ", ".join(kind for kind, is_there in there.items() if is_there)
        raise ConfigError(f"model.device: {name} is not available here; there is {found}")
    if name == "cuda":  # torchrun starts one process per card, and says which is whose
        return torch.device(name, int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device(name)


def autocast_of(precision: str, device: torch.device) -> torch.dtype | None:
    """bfloat16 where it is asked for, or where the device has units for it."""
    fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if precision == "bfloat16" or (precision == "auto" and fast) else None


def forward(
    models: Models, network: Any, tokens: Tokens, temperature: float, *, entropy_grad: bool = False
) -> Forward:
    """One pass of the policy or the reference over whole sequences."""
    asked = models.value is not None and models.value.trunk is None and network is models.policy
    with casting(models):
        if splits(network):
            hidden = hidden_states(models, trunk_of(network), tokens)
            logits = head_of(network)(hidden)
        else:
            logits, hidden = as_a_whole(network, tokens, asked)
    values = read_values(models, hidden) if hidden is not None and asked else None
    return told(logits, tokens.responses, values, temperature, entropy_grad=entropy_grad)


def hidden_states(models: Models, trunk: Any, tokens: Tokens) -> States:
    """What a trunk knows when each response token is chosen, in the cheapest way that is right."""
    few = models.autocast is None and family.fits(trunk)
    return family.states(trunk, tokens) if few else states(trunk, tokens)


def as_a_whole(network: Any, tokens: Tokens, asked: bool) -> tuple[Logits, States | None]:
    """Logits, and states where asked for, of a network whose logits are more than its head's."""
    width = tokens.responses.shape[1]
    out = network(
        **sequences(tokens), logits_to_keep=width + 1, output_hidden_states=asked, use_cache=False
    )
    hidden = before_responses(out.hidden_states[-1], tokens) if asked else None
    return out.logits[:, :-1], hidden


def told(
    logits: Logits,
    labels: Labels,
    values: Float[Tensor, "B T"] | None,
    temperature: float,
    *,
    entropy_grad: bool,
) -> Forward:
    """What logits say of the tokens that were chosen, and of those that were not."""
    logits = logits.float() if temperature == 1.0 else logits.float() / temperature
    distribution = logits.log_softmax(dim=-1)
    chosen = distribution.gather(-1, labels[..., None]).squeeze(-1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_grad):
        entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return Forward(logprobs=chosen, entropy=entropy, values=values, distribution=distribution)


def values_of(models: Models, tokens: Tokens, made: Forward | None) -> Float[Tensor, "B T"]:
    """V before each response token: what the policy's pass gave, or a pass of its own trunk."""
    assert models.value is not None
    if models.value.trunk is None:
        assert made is not None and made.values is not None
        return made.values
    with casting(models):
        hidden = hidden_states(models, models.value.trunk, tokens)
    return read_values(models, hidden)


def read_values(models: Models, hidden: States) -> Float[Tensor, "B T"]:
    """The head of the value function on the states that the response tokens are chosen from."""
    assert models.value is not None
    return models.value.head(hidden.float()).squeeze(-1)


def casting(models: Models) -> Any:
    """Autocast where the run has it."""
    if models.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(models.device.type, dtype=models.autocast)
