"""A small network of the Llama family, in as few calls as it takes.

What a small network costs is calls, not arithmetic. Here its norms go into the matrices behind
them, matrices with one input are joined, and the two coordinates that are rotated together stand
side by side, so that a rotation is a complex product. Gradients go back to the network's own
parameters. A probe of each network tells whether the result is its own; ``states.py`` has the plain
way, for every network.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from klamp.train.states import (
    States,
    agree,
    checkpoints,
    distinct,
    repeated,
    shares_prompts,
)
from klamp.train.tokens import Tokens

Ids = Int[Tensor, "B S"]
Turns = Complex[Tensor, "... S A D"]
Heads = Float[Tensor, "B S A D"]
Seen = Bool[Tensor, "B L"]
Attend = Callable[[int, Heads], Tensor]
"""From a layer's queries, keys and values, one behind the other, to what the queries read."""

FAMILY = {"LlamaModel", "MistralModel", "Qwen2Model"}
SMALL = 2**26  # parameters; above that a copy of the weights costs more than the calls it saves
_known: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def fits(trunk: Any) -> bool:
    """Whether ``states`` gives what the trunk gives; asked of each trunk once."""
    if trunk not in _known:
        known = type(trunk).__name__ in FAMILY and shares_prompts(trunk) and _simple(trunk)
        _known[trunk] = known and agree(trunk, states)
    return _known[trunk] and not checkpoints(trunk)


class Layer(NamedTuple):
    """The matrices of one layer, norms inside."""

    qkv: Tensor
    bias: Tensor | None
    out: Tensor
    gate_up: Tensor
    down: Tensor


class Weights:
    """The weights of a trunk as they are now, joined."""

    def __init__(self, trunk: Any) -> None:
        config = trunk.config
        self.queries, self.keys = config.num_attention_heads, config.num_key_value_heads
        self.layers = [_joined(layer) for layer in trunk.layers]
        self.embedding: Tensor = trunk.embed_tokens.weight
        self.last = _scaled(trunk.norm)
        epsilon = trunk.norm.variance_epsilon * config.hidden_size
        self.epsilon = self.embedding.new_tensor(epsilon).sqrt()
        self.rotary, self.scale = trunk.rotary_emb, trunk.layers[0].self_attn.scaling

    def run(self, ids: Ids, turns: Turns, attend: Attend) -> Float[Tensor, "B S W"]:
        """States after the last norm, given the rotation at each position."""
        rows, width = ids.shape
        heads = rows, width, self.queries + 2 * self.keys, -1
        x = torch.embedding(self.embedding, ids).flatten(0, 1)
        for i, layer in enumerate(self.layers):
            joined = linear(self._unit(x), layer.qkv, layer.bias)
            turned = torch.view_as_complex(joined.view(*heads, 2)) * turns
            read = attend(i, torch.view_as_real(turned).view(heads))
            x = torch.addmm(x, read, layer.out)
            gate, up = linear(self._unit(x), layer.gate_up).chunk(2, dim=-1)
            x = torch.addmm(x, silu(gate) * up, layer.down)
        return (self._unit(x) * self.last).view(rows, width, -1)

    def turns(self, positions: int) -> Complex[Tensor, "S A D"]:
        """What queries (with their scale), keys and values (not at all) are turned by."""
        places = torch.arange(positions, device=self.embedding.device)
        cos, sin = self.rotary(self.embedding, places[None])
        half = torch.complex(*(x[0, :, None, : x.shape[-1] // 2].contiguous() for x in (cos, sin)))
        kinds = half * self.scale, half, torch.ones_like(half)
        heads = self.queries, self.keys, self.keys
        return torch.cat([x.expand(-1, n, -1) for x, n in zip(kinds, heads, strict=True)], dim=1)

    def split(self, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [rows, heads, positions, width]."""
        sizes = self.queries, self.keys, self.keys
        query, keys, values = heads.transpose(1, 2).split_with_sizes(sizes, dim=1)
        return query, keys, values

    def _unit(self, x: Tensor) -> Tensor:
        """x / √(‖x‖² + n·ε): a root-mean-square norm but for √n, which is in the weights."""
        return x / torch.hypot(vector_norm(x, dim=-1, keepdim=True), self.epsilon)


def states(trunk: Any, tokens: Tokens) -> States:
    """What the trunk knows when each response token is chosen; a prompt is read once.

    Prompts and responses go through the matrices together; attention alone tells them apart.
    """
    weights = Weights(trunk)
    (rows, length), padded = tokens.responses[:, 1:].shape, not bool(tokens.prompt_mask[:, 0].all())
    turns = weights.turns(tokens.prompts.shape[1] + length)
    if tokens.groups is None or len(set(tokens.groups.tolist())) == rows:
        return _plain(weights, tokens, turns, padded)
    first, prompt_of, sizes = distinct(tokens.groups)
    asked, there = tokens.prompts[first], tokens.prompt_mask[first]
    seen = torch.cat([tokens.prompt_mask, tokens.mask[:, :-1]], dim=1)
    masks = (
        _mask(there, there.shape[1]) if padded else None,
        _mask(seen if padded else torch.ones_like(seen[:1]), length) if length else None,
    )
    cuts = asked.numel(), rows * length

    def attend(layer: int, heads: Heads) -> Tensor:
        before, after = heads[0].split_with_sizes(cuts)
        query, keys, values = weights.split(before.view(*asked.shape, *heads.shape[2:]))
        read = _read(query, keys, values, masks[0])
        if not length:
            return read
        query, *new = weights.split(after.view(rows, length, *heads.shape[2:]))
        keys, values = (
            torch.cat([repeated(x, prompt_of, sizes), y], dim=2)
            for x, y in zip((keys, values), new, strict=True)
        )
        return torch.cat([read, _read(query, keys, values, masks[1])])

    ids = torch.cat([asked.flatten(), tokens.responses[:, :-1].flatten()])
    here = _turns_of(turns, there, padded).expand(*asked.shape, -1, -1)
    late = _turns_of(turns, seen, padded)[..., asked.shape[1] :, :, :]
    late = late.expand(rows, length, -1, -1)
    turned = torch.cat([here.flatten(0, 1), late.flatten(0, 1)])
    read, rest = weights.run(ids[None], turned, attend)[0].split_with_sizes(cuts)
    start = repeated(read.view(*asked.shape, -1)[:, -1:], prompt_of, sizes)
    return torch.cat([start, rest.view(rows, length, start.shape[-1])], dim=1)


def prompts(
    weights: Weights, ids: Ids, seen: Seen, turns: Tensor
) -> tuple[States, list[tuple[Tensor, Tensor]]]:
    """The states of prompts, and the keys and values that each layer has of them."""
    padded, kept = not bool(seen[:, 0].all()), list[tuple[Tensor, Tensor]]()
    mask = _mask(seen, seen.shape[1]) if padded else None

    def attend(layer: int, heads: Heads) -> Tensor:
        query, keys, values = weights.split(heads)
        kept.append((keys, values))
        return _read(query, keys, values, mask)

    return weights.run(ids, _turns_of(turns, seen, padded), attend), kept


def _plain(weights: Weights, tokens: Tokens, turns: Tensor, padded: bool) -> States:
    """Whole sequences in one pass."""
    seen = torch.cat([tokens.prompt_mask, tokens.mask[:, :-1]], dim=1)
    mask = _mask(seen, seen.shape[1]) if padded else None
    ids = torch.cat([tokens.prompts, tokens.responses[:, :-1]], dim=1)
    at = _turns_of(turns, seen, padded)
    made = weights.run(ids, at, lambda i, heads: _read(*weights.split(heads), mask))
    return made[:, tokens.prompts.shape[1] - 1 :]


def _turns_of(turns: Tensor, seen: Seen, padded: bool) -> Tensor:
    """The rotations of the positions of each row; of any row where all have the same."""
    if not padded:
        return turns[: seen.shape[1]]
    return turns[(seen.long().cumsum(dim=1) - 1).clamp(min=0)]


def _mask(seen: Seen, queries: int) -> Bool[Tensor, "B 1 Q L"]:
    """What the last so many positions attend to; those before any token, to themselves."""
    places = torch.arange(seen.shape[1], device=seen.device)
    own, key = places[-queries:, None], places[None, :]
    alone = (seen.cumsum(dim=1) == 0)[:, -queries:, None]
    return ((seen[:, None, :] & (key <= own)) | (alone & (key == own)))[:, None]


def _read(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention, with the scale in the queries: [rows · positions, heads · width]."""
    times = query.shape[1] // keys.shape[1]
    if times > 1:
        keys, values = (x.repeat_interleave(times, dim=1) for x in (keys, values))
    causal = mask is None and query.shape[2] > 1
    read = scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=causal, scale=1.0
    )
    return read.transpose(1, 2).flatten(2).flatten(0, 1)


def _joined(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    width = attention.head_dim
    before, between = _scaled(layer.input_layernorm), _scaled(layer.post_attention_layernorm)
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    parts = [_side_by_side(q.weight, width), _side_by_side(k.weight, width), v.weight]
    bias = None
    if q.bias is not None:
        bias = torch.cat([_side_by_side(q.bias, width), _side_by_side(k.bias, width), v.bias])
    return Layer(
        qkv=torch.cat(parts) * before,
        bias=bias,
        out=attention.o_proj.weight.t(),
        gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]) * between,
        down=mlp.down_proj.weight.t(),
    )


def _scaled(norm: Any) -> Tensor:
    return norm.weight * len(norm.weight) ** 0.5


def _side_by_side(x: Tensor, width: int) -> Tensor:
    """Rows of heads of some width: i and i + width / 2 become neighbours."""
    return x.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).flatten(0, 2)


def _simple(trunk: Any) -> bool:
    """Small, without adapter, and with biases at most where Qwen2 has them."""
    linears = [(n, m) for n, m in trunk.named_modules() if n.endswith("_proj")]
    if any(type(m) is not nn.Linear for _, m in linears):
        return False
    biased = {n.rsplit(".", 1)[1] for n, m in linears if m.bias is not None}
    small = sum(p.numel() for p in trunk.parameters()) <= SMALL
    return small and biased in (set(), {"q_proj", "k_proj", "v_proj"})
