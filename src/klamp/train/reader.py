"""A network that reads on, one token per row at a time, from prompts that it has read once."""

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from klamp.train.decoder import Decoder
from klamp.train.family import fits
from klamp.train.models import Models, casting
from klamp.train.states import attention, head_of, splits, trunk_of

Ids = Int[Tensor, "B"]
Rows = Int[Tensor, "K"]
Logits = Float[Tensor, "B V"]
Prompts = Int[Tensor, "N P"]
PromptMask = Bool[Tensor, "N P"]


@runtime_checkable
class Reader(Protocol):
    """Rows that are read on from where they are."""

    def __call__(self, ids: Ids) -> Logits:
        """The logits after one more token of each row."""
        ...

    def keep(self, rows: Rows) -> None:
        """Only these rows go on."""
        ...


def reader_of(
    models: Models, prompts: Prompts, prompt_mask: PromptMask, samples: int
) -> tuple[Reader, Logits]:
    """The policy after it has read the prompts, with so many rows of each, and what comes next."""
    if models.autocast is None and splits(models.policy) and fits(trunk_of(models.policy)):
        reader = Decoder(models.policy, prompts, prompt_mask, samples)
        return reader, reader.first.repeat_interleave(samples, dim=0)
    plain = Plain(models, prompt_mask, samples)
    logits = plain.read(prompts).repeat_interleave(samples, dim=0)
    return plain.repeated(), logits


class Plain:
    """The network's own forward pass with its own cache, whatever network it is."""

    def __init__(self, models: Models, prompt_mask: PromptMask, samples: int) -> None:
        from transformers import DynamicCache

        self.models, self.samples = models, samples
        self.cache: Any = DynamicCache()
        self.seen = prompt_mask

    def __call__(self, ids: Ids) -> Logits:
        """The logits after one more token of each row."""
        self.seen = torch.cat([self.seen, self.seen.new_ones(len(ids), 1)], dim=1)
        return self.read(ids[:, None])

    def keep(self, rows: Rows) -> None:
        """Only these rows go on."""
        self.cache.batch_select_indices(rows)
        self.seen = self.seen[rows]

    def repeated(self) -> "Plain":
        """The same, with a row for every sample."""
        if self.samples > 1:
            self.cache.batch_repeat_interleave(self.samples)
            self.seen = self.seen.repeat_interleave(self.samples, dim=0)
        return self

    @torch.inference_mode(mode=False)  # some networks keep what they make, for training too
    @torch.no_grad()
    def read(self, ids: Int[Tensor, "B S"]) -> Logits:
        """The logits after the last of some ids, each of which ``seen`` has a place for."""
        given: dict[str, Any] = {"input_ids": ids, **attention(self.seen)}
        if given["position_ids"] is not None:
            given["position_ids"] = given["position_ids"][:, -ids.shape[1] :]
        policy = self.models.policy
        given |= {"past_key_values": self.cache, "use_cache": True}
        with casting(self.models):
            if splits(policy):
                last = trunk_of(policy)(**given).last_hidden_state[:, -1]
                return head_of(policy)(last).float()
            return policy(**given, logits_to_keep=1).logits[:, -1].float()
