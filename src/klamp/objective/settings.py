"""Settings: frozen dataclasses that are checked when built, and go to and from plain dicts."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeGuard

from klamp.errors import ConfigError
from klamp.objective.nearest import nearest


def require_choice(owner: object, **choices: tuple[Any, ...]) -> None:
    """Each named field must be one of the known values."""
    for name, known in choices.items():
        if (value := getattr(owner, name)) not in known:
            raise ConfigError(
                f"{type(owner).__name__}.{name} must be one of {', '.join(map(str, known))}, "
                f"got {value!r}"
            )


def require_kind(owner: object, **kinds: tuple[type | None, ...]) -> None:
    """Each named field must be of one of the classes; None among them allows None."""
    for name, known in kinds.items():
        value = getattr(owner, name)
        if value is None and None in known:
            continue
        if not isinstance(value, tuple(k for k in known if k is not None)):
            names = " or ".join("None" if k is None else k.__name__ for k in known)
            raise ConfigError(f"{type(owner).__name__}.{name} must be {names}, got {value!r}")


def require_number(
    owner: object,
    *names: str,
    low: float = -math.inf,
    high: float = math.inf,
    above: float | None = None,
    optional: bool = False,
    hint: str = "",
) -> None:
    """Each named field must be a finite number in [low, high], and > above; None if optional."""
    for name in names:
        value = getattr(owner, name)
        if value is None and optional:
            continue
        if is_finite(value) and low <= value <= high and (above is None or value > above):
            continue
        bounds = [f"> {above:g}"] if above is not None else []
        bounds += [f">= {low:g}"] if low > -math.inf else []
        bounds += [f"<= {high:g}"] if high < math.inf else []
        wanted = " and ".join(["a finite number", *bounds])
        tail = "; None turns it off" if optional else f"; {hint}" if hint else ""
        raise ConfigError(f"{type(owner).__name__}.{name} must be {wanted}, got {value!r}{tail}")


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number (a bool is none)."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


def encoded(x: Any) -> Any:
    """A settings dataclass as a plain dict with its class under ``type``; other values as is."""
    if is_dataclass(x) and not isinstance(x, type):
        own = {f.name: encoded(getattr(x, f.name)) for f in fields(x) if f.init}
        return {"type": type(x).__name__, **own}
    if isinstance(x, tuple | list):
        return [encoded(item) for item in x]
    if isinstance(x, Mapping):
        return {k: encoded(v) for k, v in x.items()}
    return x


def decoded(x: Any, classes: Mapping[str, type], *, plain_dicts: bool = False) -> Any:
    """The inverse of ``encoded``: unknown types and unknown fields are refused by name.

    A dict without a ``type`` is refused too, or with ``plain_dicts`` a dict.
    """
    if isinstance(x, list | tuple):
        return tuple(decoded(item, classes, plain_dicts=plain_dicts) for item in x)
    if not isinstance(x, Mapping):
        return x
    given: dict[str, Any] = dict(x)
    if plain_dicts and "type" not in given:
        return {k: decoded(v, classes, plain_dicts=True) for k, v in given.items()}
    name = given.pop("type", None)
    if not isinstance(name, str) or name not in classes:
        raise ConfigError(f"unknown type {name!r}; {nearest(name, sorted(classes))}")
    known = [f.name for f in fields(classes[name]) if f.init]
    for key in given:
        if key not in known:
            raise ConfigError(f"{name} has no setting {key!r}; {nearest(key, known)}")
    try:
        parts = {k: decoded(v, classes, plain_dicts=plain_dicts) for k, v in given.items()}
        return classes[name](**parts)
    except TypeError as error:
        raise ConfigError(f"{name} cannot be built from {sorted(given)}: {error}") from error
