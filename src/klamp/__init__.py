"""klamp: the stability layer of reinforcement learning for language models.

objective = klamp.presets.load("klamp")
state = objective.init()
targets, state = objective.prepare(batch, state)
out = objective.loss(logprobs, batch, targets, objective.shares(targets.mask, targets.weights))
"""

from klamp import presets as presets
from klamp.errors import ConfigError as ConfigError
from klamp.errors import DataError as DataError
from klamp.errors import KlampError as KlampError
from klamp.errors import NumericsError as NumericsError
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
