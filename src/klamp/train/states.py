"""Hidden states before each response token, and the one place that shifts.

The state at position i says what token i + 1 will be, so that of response token t is read at the
position before it. Nothing outside this file knows that. A prompt that several rows share is read
once where the network allows it: ``whole`` is the plain way, ``shared`` gives the same for fewer
tokens, and a probe of each network tells whether it does.
"""

from collections.abc import Callable
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from klamp.train.tokens import Tokens

States = Float[Tensor, "B T H"]
Logits = Float[Tensor, "B T V"]
Rows = Int[Tensor, "N"]
Places = Int[Tensor, "B"]
Attended = Bool[Tensor, "B S"]

CLOSE = 1e-3  # of the largest state: far above rounding, far below any mistake
PROBE = Tokens(
    prompts=torch.tensor([[1, 2, 3], [0, 0, 1], [1, 2, 3]]),
    prompt_mask=torch.tensor([[True] * 3, [False, False, True], [True] * 3]),
    responses=torch.tensor([[1, 3, 2], [2, 2, 3], [3, 1, 1]]),
    mask=torch.ones(3, 3, dtype=torch.bool),
    groups=torch.tensor([5, 0, 5]),
)
_sharing: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
_split: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def trunk_of(network: Any) -> Any:
    """A causal LM without its head; an adapter's layers are in it."""
    bare = network.get_base_model() if hasattr(network, "get_base_model") else network
    return bare.base_model


def head_of(network: Any) -> Any:
    """What makes logits of states."""
    return network.get_output_embeddings()


def states(trunk: Any, tokens: Tokens) -> States:
    """What the trunk knows when each response token is chosen, after its last norm."""
    several = tokens.groups is not None and len(set(tokens.groups.tolist())) < len(tokens.groups)
    return shared(trunk, tokens) if several and shares_prompts(trunk) else whole(trunk, tokens)


def whole(trunk: Any, tokens: Tokens) -> States:
    """One pass over whole sequences."""
    out = trunk(**sequences(tokens), use_cache=False)
    return before_responses(out.last_hidden_state, tokens)


def shared(trunk: Any, tokens: Tokens) -> States:
    """One pass over each prompt, one over all responses; gradients go through the cache."""
    from transformers import DynamicCache

    assert tokens.groups is not None
    first, prompt_of, sizes = distinct(tokens.groups)
    seen, cache = tokens.prompt_mask[first], DynamicCache()
    out = trunk(
        input_ids=tokens.prompts[first], **attention(seen), past_key_values=cache, use_cache=True
    )
    start = repeated(out.last_hidden_state[:, -1:], prompt_of, sizes)
    if tokens.mask.shape[1] == 1:
        return start
    for layer in cache.layers:
        kept = cast(Any, layer)
        kept.keys = repeated(kept.keys, prompt_of, sizes)
        kept.values = repeated(kept.values, prompt_of, sizes)
    given = attention(torch.cat([tokens.prompt_mask, tokens.mask[:, :-1]], dim=1))
    if given["position_ids"] is not None:
        given["position_ids"] = given["position_ids"][:, tokens.prompts.shape[1] :]
    out = trunk(input_ids=tokens.responses[:, :-1], **given, past_key_values=cache, use_cache=True)
    return torch.cat([start, out.last_hidden_state], dim=1)


def distinct(groups: Places) -> tuple[Rows, Places, list[int] | None]:
    """A row of each group; of each row the place of its group among these; and how many rows each
    has, where the rows of every group stand together."""
    ids = groups.tolist()
    place = {group: i for i, group in enumerate(dict.fromkeys(ids))}
    first = [ids.index(group) for group in place]
    of_row = [place[group] for group in ids]
    sizes = [of_row.count(i) for i in range(len(first))] if of_row == sorted(of_row) else None
    return groups.new_tensor(first), groups.new_tensor(of_row), sizes


def repeated(x: Tensor, prompt_of: Places, sizes: list[int] | None) -> Tensor:
    """What each row's prompt has. Copies have a far cheaper gradient than places by index."""
    if sizes is None:
        return x.index_select(0, prompt_of)
    copies = [one.expand(n, *x.shape[1:]) for one, n in zip(x.split(1), sizes, strict=True)]
    return copies[0] if len(copies) == 1 else torch.cat(copies)


def sequences(tokens: Tokens) -> dict[str, Tensor | None]:
    """Prompts and responses as a network takes them."""
    attended = torch.cat([tokens.prompt_mask, tokens.mask], dim=1)
    ids = torch.cat([tokens.prompts, tokens.responses], dim=1)
    return {"input_ids": ids, **attention(attended)}


def before_responses(x: Float[Tensor, "B S H"], tokens: Tokens) -> States:
    """What stands one position before each response token."""
    width = tokens.responses.shape[1]
    return x[:, -width - 1 : -1]


def attention(attended: Attended) -> dict[str, Tensor | None]:
    """What the network needs to know of padding; nothing where there is none on the left."""
    if bool(attended[:, 0].all()):
        # Padding on the right is behind every token that counts: causality hides it.
        return {"attention_mask": None, "position_ids": None}
    positions = (attended.long().cumsum(dim=1) - 1).clamp(min=0)
    return {"attention_mask": attended.long(), "position_ids": positions}


def shares_prompts(trunk: Any) -> bool:
    """Whether ``shared`` is ``whole``; asked of each trunk once."""
    if trunk not in _sharing:
        _sharing[trunk] = not _depends_on_length(trunk.config) and agree(trunk, shared)
    return _sharing[trunk] and not checkpoints(trunk)


def splits(network: Any) -> bool:
    """Whether logits are ``head(trunk(ids))`` and nothing else; asked of each network once."""
    if network not in _split:
        _split[network] = _hands_out_its_head(network)
    return _split[network]


def checkpoints(trunk: Any) -> bool:
    """Whether states are made again for the backward pass, which goes without a cache."""
    told = getattr(trunk, "gradient_checkpointing", None)
    return getattr(trunk, "is_gradient_checkpointing", False) if told is None else bool(told)


def agree(trunk: Any, other: Callable[[Any, Tokens], States]) -> bool:
    """Whether another way to the states of a trunk leads where ``whole`` does."""
    try:
        with torch.no_grad():
            tokens = PROBE.to(next(trunk.parameters()).device)
            plain, found = whole(trunk, tokens), other(trunk, tokens)
            return bool((plain - found).abs().max() <= CLOSE * plain.abs().max())
    except Exception:  # whatever a network does not take, it is then asked in the plain way
        return False


def _depends_on_length(config: Any) -> bool:
    """Windows and scalings that begin to matter at lengths which no probe can try."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return kinds != {"full_attention"} or rope in ("dynamic", "longrope") or any(windows)


def _hands_out_its_head(network: Any) -> bool:
    """The head gives wild numbers for once: they must come out of the network untouched."""
    try:
        return _untouched(network)
    except Exception:  # as above
        return False


@torch.no_grad()
def _untouched(network: Any) -> bool:
    trunk, seen = trunk_of(network), list[Tensor]()

    def wild(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        wide = torch.linspace(-100.0, 100.0, out.numel(), dtype=out.dtype, device=out.device)
        seen.extend([given[0], wide.view_as(out)])
        return seen[1]

    ids = PROBE.to(next(trunk.parameters()).device).responses
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    hook = head_of(network).register_forward_hook(wild)
    try:
        logits = network(**given).logits
    finally:
        hook.remove()
    plain = trunk(**given).last_hidden_state
    near = (seen[0] - plain).abs().max() <= CLOSE * plain.abs().max()
    return bool(near) and torch.equal(logits.to(seen[1]), seen[1])
