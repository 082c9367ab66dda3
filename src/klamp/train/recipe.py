"""The ``objective`` section of a config: a preset, its settings, and changes to what it gives.

    objective:
      preset: klamp
      kl_target: 1.0            # a setting of the preset
      kl: {gradient: token}     # a part of the objective, changed after the preset built it

Without a preset the section is the whole objective, as `klamp presets NAME` prints one.
"""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from klamp import presets
from klamp.errors import ConfigError
from klamp.objective.catalogue import SETTINGS
from klamp.objective.nearest import nearest
from klamp.objective.objective import Objective

PARTS = tuple(f.name for f in fields(Objective))


def objective(section: Mapping[str, Any] | str) -> Objective:
    """The objective that a section describes."""
    given: dict[str, Any] = {"preset": section} if isinstance(section, str) else dict(section)
    name = given.pop("preset", None)
    if name is None:
        return Objective.from_dict(given)
    if not isinstance(name, str) or name not in presets.PRESETS:
        raise ConfigError(f"unknown preset {name!r}; {nearest(name, presets.PRESETS)}")
    known = inspect.signature(presets.PRESETS[name]).parameters
    settings = {k: v for k, v in given.items() if k in known}
    changes = {k: v for k, v in given.items() if k not in known}
    for key in changes:
        if key not in PARTS:
            raise ConfigError(
                f"preset {name!r} has no setting {key!r}; {nearest(key, [*known, *PARTS])}"
            )
    base = presets.load(name, **settings)
    return Objective.from_dict(merged(base.to_dict(), changes)) if changes else base


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with changes put in place, part by part; a part of another type replaces it."""
    out = dict(base)
    for key, new in changes.items():
        old = out.get(key)
        if not isinstance(new, Mapping):
            out[key] = new
        elif isinstance(old, Mapping) and new.get("type", old.get("type")) == old.get("type"):
            out[key] = merged(old, new)
        else:
            out[key] = new if "type" in new else {"type": _only_type(key), **new}
    return out


def _only_type(part: str) -> str:
    """The type of a part that the preset has switched off, where only one is possible."""
    known = {"kl": "KLTerm", "difficulty": "Difficulty", "correction": "Correction"}
    known |= {"value_loss": "ValueLoss", "advantage": "Advantage", "surrogate": "ClippedSurrogate"}
    if part not in known:
        raise ConfigError(f"objective.{part} needs a `type`; one of {', '.join(sorted(SETTINGS))}")
    return known[part]
