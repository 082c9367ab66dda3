"""Settings: frozen dataclasses that are checked when built, and go to and from plain dicts."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from klamp.errors import ConfigError


def require_choice(owner: object, **choices: tuple[Any, ...]) -> None:
    """Each named field must be one of the known values."""
    for name, known in choices.items():
        if (value := getattr(owner, name)) not in known:
            raise ConfigError(
                f"{type(owner).__name__}.{name} must be one of {', '.join(map(str, known))}, "
                f"got {value!r}"
            )


def require_number(
    owner: object,
    *names: str,
    low: float = -math.inf,
    high: float = math.inf,
    above: float | None = None,
    hint: str = "",
) -> None:
    """Each named field must be a finite number in [low, high], and > above; None is off."""
    for name in names:
        value = getattr(owner, name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if (
            not number
            or not math.isfinite(value)
            or not low <= value <= high
            or (above is not None and value <= above)
        ):
            bounds = [f"> {above:g}"] if above is not None else []
            bounds += [f">= {low:g}"] if low > -math.inf else []
            bounds += [f"<= {high:g}"] if high < math.inf else []
            wanted = " and ".join(["a finite number", *bounds])
            tail = f"; {hint}" if hint else ""
            raise ConfigError(
                f"{type(owner).__name__}.{name} must be {wanted}, got {value!r}{tail}"
            )


def encoded(x: Any) -> Any:
    """A settings dataclass as a plain dict with its class under ``type``; other values as is."""
    if is_dataclass(x) and not isinstance(x, type):
        own = {f.name: encoded(getattr(x, f.name)) for f in fields(x) if f.init}
        return {"type": type(x).__name__, **own}
    if isinstance(x, tuple | list):
        return [encoded(item) for item in x]
    return x


def decoded(x: Any, classes: Mapping[str, type]) -> Any:
    """The inverse of ``encoded``: unknown types and unknown fields are refused by name."""
    if isinstance(x, list | tuple):
        return tuple(decoded(item, classes) for item in x)
    if not isinstance(x, Mapping):
        return x
    given: dict[str, Any] = dict(x)
    name = given.pop("type", None)
    if name not in classes:
        raise ConfigError(f"unknown type {name!r}; one of {', '.join(sorted(classes))}")
    known = [f.name for f in fields(classes[name]) if f.init]
    for key in given:
        if key not in known:
            raise ConfigError(f"{name} has no setting {key!r}; it has {', '.join(known)}")
    try:
        return classes[name](**{k: decoded(v, classes) for k, v in given.items()})
    except TypeError as error:
        raise ConfigError(f"{name} cannot be built from {sorted(given)}: {error}") from error
