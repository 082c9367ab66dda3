"""Policy, reference and value function at work, and the one place that shifts.

logits at position i say what token i + 1 will be; the log-prob of response token t is read at
the position before it. Nothing outside this file knows that.
"""

import contextlib
import os
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from klamp.errors import ConfigError
from klamp.train.tokens import Tokens


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
    width = tokens.responses.shape[1]
    ids = torch.cat([tokens.prompts, tokens.responses], dim=1)
    attended = torch.cat([tokens.prompt_mask, tokens.mask], dim=1)
    shared = models.value is not None and models.value.trunk is None and network is models.policy
    inputs = {"input_ids": ids, **attention(attended)}
    with casting(models):
        out = network(
            **inputs, logits_to_keep=width + 1, output_hidden_states=shared, use_cache=False
        )
        hidden = out.hidden_states[-1] if shared else None
    logits = out.logits[:, :-1].float() / temperature
    distribution = logits.log_softmax(dim=-1)
    chosen = distribution.gather(-1, tokens.responses[..., None]).squeeze(-1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_grad):
        entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return Forward(
        logprobs=chosen,
        entropy=entropy,
        values=None if hidden is None else read_values(models, hidden, width),
        distribution=distribution,
    )


def values_of(models: Models, tokens: Tokens, made: Forward) -> Float[Tensor, "B T"]:
    """V before each response token: what the policy's pass gave, or a pass of its own trunk."""
    assert models.value is not None
    if models.value.trunk is None:
        assert made.values is not None
        return made.values
    ids = torch.cat([tokens.prompts, tokens.responses], dim=1)
    attended = torch.cat([tokens.prompt_mask, tokens.mask], dim=1)
    with casting(models):
        out = models.value.trunk(input_ids=ids, **attention(attended), use_cache=False)
    return read_values(models, out.last_hidden_state, tokens.responses.shape[1])


def read_values(models: Models, hidden: Float[Tensor, "B S H"], width: int) -> Float[Tensor, "B T"]:
    """The head at the positions that the response tokens are chosen from."""
    assert models.value is not None
    return models.value.head(hidden[:, -width - 1 : -1].float()).squeeze(-1)


def attention(attended: Tensor) -> dict[str, Tensor | None]:
    """What the network needs to know of padding; nothing where there is none on the left."""
    if bool(attended[:, 0].all()):
        # Padding on the right is behind every token that counts: causality hides it.
        return {"attention_mask": None, "position_ids": None}
    positions = (attended.long().cumsum(dim=1) - 1).clamp(min=0)
    return {"attention_mask": attended.long(), "position_ids": positions}


def casting(models: Models) -> Any:
    """Autocast where the run has it."""
    if models.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(models.device.type, dtype=models.autocast)
