"""Whole systems as values: each upstream's objective under its own settings' names.

    klamp.presets.load("openrlhf", kl_target=6.0)

Every module also has the upstream's functions, under their names and signatures, thin over the
core. A preset gives upstream's numbers on clean input; it never reproduces a dependence on padding
or on how the batch was cut, nor a NaN.
"""

import inspect
from collections.abc import Callable
from typing import Any

from klamp.errors import ConfigError
from klamp.objective.nearest import nearest
from klamp.objective.objective import Objective
from klamp.presets import open_instruct, openrlhf, recommended, roll, trlx

PRESETS: dict[str, Callable[..., Objective]] = {
    "open-instruct": open_instruct.objective,
    "openrlhf": openrlhf.objective,
    "roll": roll.objective,
    "trlx": trlx.objective,
    "klamp": recommended.objective,
}


def load(name: str, **settings: Any) -> Objective:
    """The objective of a system; settings under upstream's names replace its defaults."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; {nearest(name, PRESETS)}")
    known = inspect.signature(PRESETS[name]).parameters
    for setting in settings:
        if setting not in known:
            raise ConfigError(
                f"preset {name!r} has no setting {setting!r}; {nearest(setting, known)}"
            )
    return PRESETS[name](**settings)
