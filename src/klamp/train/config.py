"""The config of a run: pydantic models ⇄ YAML, strict keys, ``--set a.b=c``.

Every field has a default; an empty file trains the built-in model on the built-in task.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from klamp.errors import ConfigError
from klamp.objective.nearest import nearest
from klamp.objective.objective import Objective
from klamp.train import recipe, yamlfile
from klamp.train.settings import (
    CheckpointSettings,
    EvaluationSettings,
    ModelSettings,
    OptimizerSettings,
    RewardSettings,
    SamplingSettings,
    Section,
    TaskSettings,
    TrackingSettings,
)

DEFAULT = Path(__file__).parent / "default.yaml"


class Config(Section):
    """Everything about a run."""

    seed: int = 0
    steps: int = Field(default=90, ge=1)
    task: TaskSettings = TaskSettings()
    reward: RewardSettings = RewardSettings()
    model: ModelSettings = ModelSettings()
    sampling: SamplingSettings = SamplingSettings()
    objective: dict[str, Any] = Field(default_factory=lambda: recipe.objective("klamp").to_dict())
    """Resolved: the whole objective as a plain dict."""
    optimizer: OptimizerSettings = OptimizerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    tracking: TrackingSettings = TrackingSettings()
    max_skipped: int = Field(default=5, ge=1)
    """Non-finite updates in a row that end the run."""
    threads: int | None = Field(None, ge=1)
    """CPU threads; None leaves it to torch."""

    @field_validator("objective", mode="before")
    @classmethod
    def _resolved(cls, section: Any) -> dict[str, Any]:
        if not isinstance(section, dict | str):
            raise ConfigError(f"objective must be a mapping or a preset's name, got {section!r}")
        return recipe.objective(section).to_dict()

    @cached_property
    def goal(self) -> Objective:
        """The objective as a value."""
        return Objective.from_dict(self.objective)


def load(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The checked config of a file (None: the built-in default) with ``a.b=c`` put over it."""
    source = path or DEFAULT
    data = yamlfile.read(source)
    for override in overrides:
        data = overridden(data, override)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        where = str(source) if path else "the built-in config"
        raise ConfigError(f"{where}: {'; '.join(_sentences(error))}") from error


def overridden(data: Mapping[str, Any], override: str) -> dict[str, Any]:
    """``data`` with one ``a.b=c`` put in its place."""
    name, equals, text = override.partition("=")
    if not equals or not all(name.split(".")):
        raise ConfigError(f"--set takes key=value such as optimizer.lr=1e-4, got {override!r}")
    try:
        return _put(data, name.split("."), yamlfile.parse(text))
    except ConfigError as error:
        raise ConfigError(f"--set {override}: {error}") from error


def _put(data: Any, path: Sequence[str], value: Any) -> Any:
    """``data`` with ``value`` at the end of the path, in place of what was there."""
    if not path:
        return value
    if isinstance(data, str):  # `objective: klamp` is short for its preset
        data = {"preset": data}
    old: dict[str, Any] = dict(data) if isinstance(data, Mapping) else {}
    return {**old, path[0]: _put(old.get(path[0]), path[1:], value)}


def dump(config: Config) -> str:
    """The config as YAML, fully resolved; ``load`` gives the same config back."""
    return yamlfile.dump(config.model_dump(mode="json"))


def _sentences(error: ValidationError) -> list[str]:
    """One sentence per mistake, with the nearest right key."""
    found: list[str] = []
    for item in error.errors():
        name = ".".join(map(str, item["loc"])) or "config"
        if item["type"] == "extra_forbidden":
            known = _keys_at(item["loc"][:-1])
            found.append(f"unknown key {name!r}; {nearest(str(item['loc'][-1]), known)}")
        else:
            found.append(f"{name}: {_said(item['type'], item['msg'], item['input'])}")
    return found


def _said(kind: str, message: str, given: Any) -> str:
    """What pydantic says, with what it got; our own sentences as they are."""
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    got = "" if isinstance(given, dict) else f", got {given!r}"
    return message[0].lower() + message[1:] + got


def _keys_at(place: Sequence[Any]) -> list[str]:
    """The keys that a section of the config has."""
    section: Any = Config
    for key in place:
        kind = section.model_fields[key].annotation
        options = [kind, *getattr(kind, "__args__", ())]
        section = next(k for k in options if isinstance(k, type) and issubclass(k, Section))
    return list(section.model_fields)
