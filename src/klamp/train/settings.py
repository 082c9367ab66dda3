"""The sections of a config, field by field; each docstring under a field is its documentation."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

BUILTIN = "builtin"


class Section(BaseModel):
    """Frozen, and every key must be known."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TaskSettings(Section):
    """Where prompts come from."""

    name: Literal["sort", "reverse", "add", "recite", "file"] = "sort"
    lengths: tuple[int, ...] = (6,)
    """How many digits the prompts of sort, reverse and recite have."""
    file: Path | None = None
    """JSON lines with `prompt`, and `answer` where it is known; for `name: file`."""
    evaluation_file: Path | None = None
    """Prompts to evaluate on; without it one in ten of `file` is held out."""

    @model_validator(mode="after")
    def _file_when_named(self) -> "TaskSettings":
        if (self.name == "file") != (self.file is not None):
            raise ValueError("task.name: file and task.file: PATH go together; give both")
        if self.evaluation_file is not None and self.file is None:
            raise ValueError(
                "task.evaluation_file goes with task.file; built-in tasks hold out their own"
            )
        return self


class Outliers(Section):
    """Rewards that are replaced by ± size, to see what a stray one does."""

    fraction: float = Field(default=0.02, ge=0, le=1)
    size: float = 100.0


class RewardSettings(Section):
    """What a completion is worth."""

    function: str = "exact"
    """`exact`, `positions`, `leaky`, or your own `module:function` or `path.py:function`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for the function."""
    outliers: Outliers | None = None


class LoraSettings(Section):
    """A low-rank adapter; the reference is then the model with it switched off."""

    rank: int = Field(default=8, ge=1)
    alpha: int = Field(default=16, ge=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"


class ModelSettings(Section):
    """Which policy, reference and value function."""

    path: str = BUILTIN
    """`builtin`, a local directory, or a name on the Hugging Face hub."""
    reference: Literal["auto", "copy", "adapter-off", "none"] = "auto"
    """auto: none where no KL needs it, the adapter switched off with LoRA, else a frozen copy."""
    value: Literal["auto", "none", "shared", "own"] = "auto"
    """The value head's trunk; auto: own where the objective has a value loss, else none."""
    lora: LoraSettings | None = None
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 autocast where the device is fast at it."""


class SamplingSettings(Section):
    """How completions are drawn."""

    prompts: int = Field(default=32, ge=1)
    """Prompts per step, over all processes."""
    samples_per_prompt: int = Field(default=8, ge=1)
    max_new_tokens: int = Field(default=10, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float | None = Field(default=None, gt=0, le=1)


class OptimizerSettings(Section):
    """AdamW, its schedule, and how a batch is cut."""

    lr: float = Field(default=3e-4, gt=0)
    value_lr: float = Field(default=1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_lr: float = Field(default=0.1, ge=0, le=1)
    """What the schedule ends at, as a fraction of lr."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    epochs: int = Field(default=1, ge=1)
    updates_per_epoch: int = Field(default=1, ge=1)
    """Optimizer steps that one pass over the batch is cut into."""
    micro_tokens: int = Field(default=16_384, ge=1)
    """Most prompt and response tokens (padding counted) of one forward pass."""


class EvaluationSettings(Section):
    """How the policy is measured on held-out prompts."""

    every: int | None = Field(default=15, ge=1)
    """Steps between evaluations; before the first and after the last there is always one."""
    prompts: int = Field(default=512, ge=1)
    shown: int = Field(default=12, ge=0)
    """Completions kept for the report."""


class CheckpointSettings(Section):
    """How often the run can be taken up again."""

    every: int | None = Field(default=15, ge=1)
    keep: int = Field(default=2, ge=1)


class TrackingSettings(Section):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = False
    wandb: str | None = None
    """Project name."""
    trackio: str | None = None
    """Project name."""
