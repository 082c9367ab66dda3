"""Every settings class by its name: what a plain dict may speak of."""

from klamp.objective.advantages import GAE, Advantage, Returns, Whiten
from klamp.objective.control import AdaptiveKL, FixedKL, PIControl
from klamp.objective.correction import Correction
from klamp.objective.groups import Difficulty
from klamp.objective.kl import KLTerm
from klamp.objective.losses import CISPO, ClippedSurrogate, PolicyGradient, ValueLoss
from klamp.objective.rewards import (
    ClipScores,
    CombineScores,
    NormaliseScores,
    PenaliseOverlong,
    PenaliseTruncated,
    ScaleScores,
    SubtractOthersMean,
)

SETTINGS: dict[str, type] = {
    c.__name__: c
    for c in (
        *(ClipScores, NormaliseScores, ScaleScores, SubtractOthersMean),
        *(PenaliseOverlong, PenaliseTruncated, CombineScores),
        *(KLTerm, FixedKL, AdaptiveKL, PIControl),
        *(Advantage, Returns, GAE, Whiten),
        *(Difficulty, Correction),
        *(ClippedSurrogate, CISPO, PolicyGradient, ValueLoss),
    )
}
