"""From settings to networks: the policy, its reference, its value function, its adapter."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from klamp.errors import ConfigError
from klamp.objective.objective import Objective
from klamp.train.models import Models, ValueFunction, autocast_of, device_of
from klamp.train.settings import BUILTIN, LoraSettings, ModelSettings
from klamp.train.tasks.pretrain import BUILTIN as BUILTIN_DIRECTORY


def load(settings: ModelSettings, objective: Objective) -> Models:
    """The policy with what the objective needs beside it."""
    device = device_of(settings.device)
    policy, tokenizer = policy_of(settings.path)
    reference_kind = reference_of(settings, objective)
    frozen = copy.deepcopy(policy).to(device) if reference_kind == "copy" else None
    value = value_of(settings, objective, policy)
    if settings.lora is not None:
        policy = adapted(policy, settings.lora)
    for network in (policy, frozen, value):
        if network is not None:
            without_dropout(network)
    if frozen is not None:
        frozen.requires_grad_(False)
    policy.to(device)
    return Models(
        policy=policy,
        reference=policy if reference_kind == "adapter-off" else frozen,
        value=None if value is None else value.to(device),
        tokenizer=tokenizer,
        device=device,
        autocast=autocast_of(settings.precision, device),
    )


def policy_of(path: str) -> tuple[Any, Any]:
    """A causal LM and its tokenizer, from the package, a directory or the hub."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = str(BUILTIN_DIRECTORY) if path == BUILTIN else path
    local = Path(source).is_dir()
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        hint = "is it a Hugging Face model?" if local else "no such directory, and not on the hub"
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"model.path: cannot load {path!r} ({hint}): {first}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.path: the tokenizer of {path!r} has no end-of-text token, so no response could "
            "ever end; set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def reference_of(settings: ModelSettings, objective: Objective) -> str:
    """Which reference: ``copy``, ``adapter-off`` or ``none``."""
    if settings.reference == "adapter-off" and settings.lora is None:
        raise ConfigError(
            "model.reference: adapter-off needs model.lora, got none; use copy, or set lora: {}"
        )
    if settings.reference == "none" and objective.kl is not None:
        raise ConfigError(
            "model.reference: none, but the objective has a KL term to a reference; use "
            "reference: copy, or objective.kl: null"
        )
    if settings.reference != "auto":
        return settings.reference
    if objective.kl is None:
        return "none"
    return "copy" if settings.lora is None else "adapter-off"


def value_of(settings: ModelSettings, objective: Objective, policy: Any) -> ValueFunction | None:
    """The value function that the objective asks for."""
    kind = settings.value
    if kind == "auto":
        kind = "none" if objective.value_loss is None else "own"
    if kind == "none":
        if objective.value_loss is not None:
            raise ConfigError(
                "model.value: none, but the objective has a value loss; use own or shared, or "
                "objective.value_loss: null"
            )
        return None
    trunk = copy.deepcopy(policy.base_model) if kind == "own" else None
    return ValueFunction(policy.config.get_text_config().hidden_size, trunk)


def adapted(policy: Any, lora: LoraSettings) -> Any:
    """The policy with a fresh low-rank adapter, which alone is trained."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("model.lora needs peft; `pip install klamp[peft]`") from error
    targets = lora.target_modules
    return get_peft_model(
        policy,
        LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            task_type="CAUSAL_LM",
        ),
    )


def without_dropout(model: nn.Module) -> None:
    """No dropout: a policy that differs from pass to pass has no ratio to speak of."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010
