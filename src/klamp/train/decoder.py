"""The next token of a small network of the Llama family, from what it has read."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from klamp.train.family import Weights, prompts
from klamp.train.memory import ROOM, Memory
from klamp.train.states import head_of, trunk_of

Ids = Int[Tensor, "B"]
Logits = Float[Tensor, "B V"]
Prompts = Int[Tensor, "N P"]
PromptMask = Bool[Tensor, "N P"]


class Decoder:
    """Rows that are read on, one token at a time."""

    def __init__(self, network: Any, ids: Prompts, mask: PromptMask, samples: int) -> None:
        self.weights, self.head = Weights(trunk_of(network)), head_of(network)
        self.turns = self.weights.turns(2 * ids.shape[1] + ROOM)
        read, kept = prompts(self.weights, ids, mask, self.turns)
        self.memory = Memory([torch.stack(pair) for pair in kept], mask, samples)
        self.first: Logits = self.head(read[:, -1]).float()
        """What comes after each prompt."""

    def __call__(self, ids: Ids) -> Logits:
        """What comes after one more token of each row."""
        at, padding, queries = self.memory.length, self.memory.padding, self.weights.queries
        if at == len(self.turns):
            self.turns = self.weights.turns(2 * at)
        turn = self.turns[at : at + 1] if padding is None else self.turns[at - padding][:, None]
        self.memory.forward()

        def attend(layer: int, heads: Tensor) -> Tensor:
            heads = heads.squeeze(1)
            sizes = queries, heads.shape[1] - queries
            return self.memory.attend(layer, *heads.split_with_sizes(sizes, dim=1))

        return self.head(self.weights.run(ids[:, None], turn, attend).squeeze(1)).float()

    def keep(self, rows: Ids) -> None:
        """Only these rows go on."""
        self.memory.keep(rows)
