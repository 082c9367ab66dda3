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
from klamp.heads.exact import head_kl
from klamp.heads.logprobs import label_logprobs
from klamp.objective.exact import exact_kl
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
Bias = Float[Tensor, "V"]
HELD = 1 << 23  # logits, 32 MiB of them; where there would be more, they are made in tiles


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
class Reading:
    """A network's states before each response token, and its logits where they are held."""

    states: States | None
    """None where logits are more than the head's, and nobody else asks for states."""
    logits: Logits | None
    head: Any
    """What makes logits of states."""

    @property
    def tiled(self) -> bool:
        """Whether logits are to be made a tile at a time."""
        return self.logits is None

    def seen(self) -> States:
        """The states, where there are any."""
        assert self.states is not None
        return self.states

    @property
    def weight(self) -> Float[Tensor, "V H"]:
        """The head's."""
        return self.head.weight

    @property
    def bias(self) -> Bias | None:
        """The head's, if it has one."""
        return self.head.bias


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """What one pass over sequences gives, per response token."""

    logprobs: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"]
    reading: Reading


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
    reading = read(models, network, tokens)
    return told(reading, tokens.responses, temperature, entropy_grad=entropy_grad)


def read(models: Models, network: Any, tokens: Tokens) -> Reading:
    """The states of sequences, and their logits unless these are too many to hold."""
    head = head_of(network)
    with casting(models):
        if not splits(network):
            own = models.value is not None and models.value.trunk is None
            logits, seen = as_a_whole(network, tokens, own and network is models.policy)
            return Reading(states=seen, logits=logits, head=head)
        found = hidden_states(models, trunk_of(network), tokens)
        # An adapter, or whatever else stands in for the head, has more to say than its weight.
        held = type(head) is not nn.Linear or tokens.responses.numel() * len(head.weight) <= HELD
        return Reading(states=found, logits=head(found) if held else None, head=head)


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
    reading: Reading, labels: Labels, temperature: float, *, entropy_grad: bool = False
) -> Forward:
    """What logits say of the tokens that were chosen, and of those that were not."""
    if reading.tiled:
        chosen, entropy = label_logprobs(
            reading.seen(),
            reading.weight,
            labels,
            bias=reading.bias,
            temperature=temperature,
            entropy_grad=entropy_grad,
        )
        return Forward(logprobs=chosen.float(), entropy=entropy.float(), reading=reading)
    distribution = distribution_of(reading, temperature)
    chosen = distribution.gather(-1, labels[..., None]).squeeze(-1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_grad):
        entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return Forward(logprobs=chosen, entropy=entropy, reading=reading)


def distribution_of(reading: Reading, temperature: float) -> Logits:
    """Log-probs of the whole vocabulary."""
    logits = reading.head(reading.seen()) if reading.logits is None else reading.logits
    return (logits.float() / temperature).log_softmax(dim=-1)


def exact_kl_of(own: Reading, other: Reading, temperature: float) -> Float[Tensor, "B T"]:
    """KL(own ‖ other) over the whole vocabulary."""
    if own.tiled and other.tiled:
        given = (own.seen(), own.weight, other.seen(), other.weight)
        kl = head_kl(*given, bias=own.bias, ref_bias=other.bias, temperature=temperature)
        return kl.float()
    return exact_kl(distribution_of(own, temperature), distribution_of(other, temperature))


def values_of(models: Models, tokens: Tokens, reading: Reading | None) -> Float[Tensor, "B T"]:
    """V before each response token: by the policy's states, or those of a trunk of its own."""
    assert models.value is not None
    if models.value.trunk is None:
        assert reading is not None
        return read_values(models, reading.seen())
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
