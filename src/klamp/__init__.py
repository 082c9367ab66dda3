"""klamp: the stability layer of reinforcement learning for language models.

objective = klamp.presets.load("klamp")
state = objective.init()
targets, state = objective.prepare(batch, state)
out = objective.loss(logprobs, batch, targets, objective.shares(targets.mask, targets.weights))
"""

from typing import TYPE_CHECKING

from klamp.errors import ConfigError as ConfigError
from klamp.errors import DataError as DataError
from klamp.errors import KlampError as KlampError
from klamp.errors import NumericsError as NumericsError

if TYPE_CHECKING:
    from klamp import presets as presets
    from klamp.objective.advantages import GAE as GAE
    from klamp.objective.advantages import Advantage as Advantage
    from klamp.objective.advantages import Returns as Returns
    from klamp.objective.advantages import Whiten as Whiten
    from klamp.objective.control import AdaptiveKL as AdaptiveKL
    from klamp.objective.control import FixedKL as FixedKL
    from klamp.objective.control import PIControl as PIControl
    from klamp.objective.correction import Correction as Correction
    from klamp.objective.groups import Difficulty as Difficulty
    from klamp.objective.kl import KLTerm as KLTerm
    from klamp.objective.losses import ClippedSurrogate as ClippedSurrogate
    from klamp.objective.losses import ValueLoss as ValueLoss
    from klamp.objective.objective import Objective as Objective
    from klamp.objective.rewards import ClipScores as ClipScores
    from klamp.objective.rewards import NormaliseScores as NormaliseScores
    from klamp.objective.state import ObjectiveState as ObjectiveState
    from klamp.types import ALONE as ALONE
    from klamp.types import Batch as Batch
    from klamp.types import LossOutput as LossOutput
    from klamp.types import Targets as Targets
else:
    # Torch takes seconds to import, which a `klamp --help` should not: the rest is imported when
    # it is first asked for. Type checkers do not see this half, so that they find misspelt names.
    _HOMES = {
        "klamp.presets": ["presets"],
        "klamp.objective.advantages": ["GAE", "Advantage", "Returns", "Whiten"],
        "klamp.objective.control": ["AdaptiveKL", "FixedKL", "PIControl"],
        "klamp.objective.correction": ["Correction"],
        "klamp.objective.groups": ["Difficulty"],
        "klamp.objective.kl": ["KLTerm"],
        "klamp.objective.losses": ["ClippedSurrogate", "ValueLoss"],
        "klamp.objective.objective": ["Objective"],
        "klamp.objective.rewards": ["ClipScores", "NormaliseScores"],
        "klamp.objective.state": ["ObjectiveState"],
        "klamp.types": ["ALONE", "Batch", "LossOutput", "Targets"],
    }
    _HOME = {name: home for home, names in _HOMES.items() for name in names}
    __all__ = sorted([*_HOME, "ConfigError", "DataError", "KlampError", "NumericsError"])

    def __getattr__(name: str) -> object:
        """A public name, imported now; what is asked for again is found without this."""
        from importlib import import_module

        if name not in _HOME:
            from klamp.objective.nearest import nearest

            # With its name, for else Python adds a second "Did you mean" of its own.
            message = f"module 'klamp' has no attribute {name!r}; {nearest(name, __all__)}"
            raise AttributeError(message, name=name)
        home = import_module(_HOME[name])
        globals()[name] = home if name == "presets" else getattr(home, name)
        return globals()[name]

    def __dir__() -> list[str]:
        """The public names, imported yet or not."""
        return __all__
