"""Untrained networks of several architectures, built from their configs; and sequences for them."""

from dataclasses import replace

import torch
import transformers
from trainer_parts import sequences

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KINDS = {
    "llama": ("llama", SIZES | {"num_key_value_heads": 4}),
    "llama, scaled": (
        "llama",
        SIZES
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": ("mistral", SIZES | {"sliding_window": None}),
    "mistral, window": ("mistral", SIZES | {"sliding_window": 4}),
    "qwen2": ("qwen2", SIZES),
    "qwen3": ("qwen3", SIZES | {"head_dim": 8}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}),
    "gpt_neox": ("gpt_neox", SIZES | {"rotary_pct": 0.5}),
    "gemma": ("gemma", SIZES | {"head_dim": 8}),
    "gemma2": ("gemma2", SIZES | {"head_dim": 8, "final_logit_softcapping": 30.0}),
    "cohere": ("cohere", SIZES | {"logit_scale": 0.25}),
    "llama, dynamic": (
        "llama",
        SIZES
        | {
            "max_position_embeddings": 8,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
}


def network(kind, **changes):
    """A causal LM in float64 over 40 ids, far enough from nothing to tell tokens apart."""
    torch.manual_seed(0)
    name, sizes = KINDS[kind]
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "vocab_size": 40}
    config = transformers.AutoConfig.for_model(name, **(sizes | ids | changes))
    if kind == "gemma2":
        config._attn_implementation = "eager"
    made = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


A, B, C = [22, 5, 3, 9, 30], [22, 7, 30], [21, 12, 4, 6, 3, 11, 30]
ROWS = {
    "groups in any order": (
        [A, C, A, B, C, A],
        [[3, 5, 9, 1], [7, 7], [11], [4, 12, 6, 5, 8], [2], [9, 9, 3]],
        [4, 1, 4, 0, 1, 4],
    ),
    "groups together, unequal": (
        [C, C, C, A, B, B],
        [[3, 5, 9, 1], [7, 7], [11], [4, 12, 6, 5, 8], [2], [9, 9, 3]],
        [2, 2, 2, 0, 1, 1],
    ),
    "prompts of one length": ([A, A, A[::-1], A[::-1]], [[3, 5], [7], [1], [2, 9]], [0, 0, 1, 1]),
    "one prompt": ([B, B, B], [[3, 5, 9], [7], [11, 2]], [0, 0, 0]),
    "one token each": ([A, B, A], [[3], [5], [9]], [0, 1, 0]),
    "nothing shared": ([A, B, C], [[3, 4], [5], [9, 1, 2]], [2, 0, 1]),
}


def rows(kind):
    """Sequences with prompts that some rows share."""
    prompts, responses, groups = ROWS[kind]
    return replace(sequences(prompts, responses), groups=torch.tensor(groups))


def gradients(module, x, mask):
    """The gradient of a weighted sum of states at active positions, of every parameter."""
    module.zero_grad()
    weight = torch.linspace(-1.0, 2.0, x.numel(), dtype=x.dtype).view_as(x)
    (weight * x)[mask].sum().backward()
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def assert_same_gradients(found, wanted):
    """Equal to 1e-5 of the largest entry: norms and rotations are in float32 in any network."""
    assert found.keys() == wanted.keys() and any(g.abs().max() > 0.1 for g in wanted.values())
    for name, gradient in wanted.items():
        apart = (found[name] - gradient).abs().max() / max(gradient.abs().max(), 1e-3)
        assert apart < 1e-5, (name, float(apart))
