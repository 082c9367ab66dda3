"""What an objective remembers between batches: small, explicit, plain."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from klamp.errors import ConfigError
from klamp.objective.control import ControlState
from klamp.objective.moments import Moments
from klamp.objective.settings import decoded, encoded


@dataclass(frozen=True, kw_only=True)
class ObjectiveState:
    """The controller's state and each stage's memory. Nothing else moves."""

    control: ControlState | None = None
    stages: tuple[Any, ...] = ()

    @property
    def kl_coef(self) -> float:
        """β of the next batch; 0 without a KL term."""
        return 0.0 if self.control is None else self.control.coef

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and numbers: ready for JSON."""
        return encoded(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], extra: Iterable[type] = ()) -> "ObjectiveState":
        """The inverse of ``to_dict``; ``extra`` names memory classes of your own stages."""
        known = {c.__name__: c for c in (cls, ControlState, Moments, *extra)}
        made = decoded(data, known, plain_dicts=True)
        if not isinstance(made, cls):
            raise ConfigError(f"ObjectiveState.from_dict got a {type(made).__name__}")
        return made
