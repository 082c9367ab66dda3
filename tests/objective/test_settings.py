import json
from dataclasses import dataclass, fields, is_dataclass, replace

import pytest

from klamp import presets
from klamp.errors import ConfigError
from klamp.objective.advantages import GAE, Advantage, Returns, Whiten
from klamp.objective.catalogue import SETTINGS
from klamp.objective.control import AdaptiveKL, FixedKL, PIControl
from klamp.objective.correction import Correction
from klamp.objective.kl import KLTerm
from klamp.objective.losses import CISPO, ClippedSurrogate, PolicyGradient, ValueLoss
from klamp.objective.objective import Objective
from klamp.objective.rewards import (
    ClipScores,
    CombineScores,
    NormaliseScores,
    PenaliseOverlong,
    PenaliseTruncated,
    ScaleScores,
    SubtractOthersMean,
)
from klamp.objective.settings import decoded, encoded, require_choice, require_kind, require_number

NAN, INF = float("nan"), float("inf")
OBJECTIVES = {name: presets.load(name) for name in presets.PRESETS} | {
    "everything": Objective(
        stages=(
            CombineScores(weights=(1.0, 2.0), normalise=NormaliseScores(std=None)),
            ClipScores(low=-1.0, high=1.0),
            ScaleScores(by="reference", std=2.0),
            SubtractOthersMean(group_of_one="zero"),
            PenaliseOverlong(max_length=10, buffer=2),
            PenaliseTruncated(coef=-1.0),
        ),
        kl=KLTerm(gradient="token", weighting="importance", clamp_value=3.0, control=PIControl()),
        advantage=Advantage(estimator=GAE(), whiten=Whiten(ddof=1), whiten_rewards=Whiten()),
        correction=Correction(level="sequence", action="mask"),
        surrogate=CISPO(low=0.1),
        value_loss=ValueLoss(clip=0.2),
        entropy_coef=0.01,
        reduction="constant_mean",
        constant=100.0,
    ),
    "gradient": Objective(surrogate=PolicyGradient(), advantage=Advantage(estimator=Returns())),
    "weights": presets.load("roll", length_loss_weight=True, adv_estimator="gae"),
    "adaptive": presets.load("openrlhf", kl_target=6.0),
}


users = pytest.mark.usefixtures("as_users_run_it")


def through_json(x):
    return json.loads(json.dumps(x, allow_nan=False))


@dataclass(frozen=True)
class Knob:
    value: object = None
    kind: object = "a"


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_an_objective_survives_json(objective):
    again = Objective.from_dict(through_json(objective.to_dict()))
    assert again == objective
    assert hash(again) == hash(objective)
    assert repr(again) == repr(objective)


def test_every_settings_class_takes_part_in_the_round_trip():
    def types(x):
        if isinstance(x, dict):
            return {x["type"]}.union(*(types(v) for v in x.values()))
        return set().union(*map(types, x)) if isinstance(x, list) else set()

    seen = set().union(*(types(o.to_dict()) for o in OBJECTIVES.values()))
    assert seen == {*SETTINGS, "Objective"}


def test_a_dict_says_the_class_under_type_and_holds_plain_values():
    clip = ClipScores(low=-1.0, high=2.0)
    assert encoded(clip) == {"type": "ClipScores", "low": -1.0, "high": 2.0}
    assert "bounds" not in encoded(KLTerm())  # derived, not set


def test_what_a_dict_leaves_out_has_its_default():
    found = Objective.from_dict({"kl": {"type": "KLTerm", "estimator": "k2"}})
    assert found == Objective(kl=KLTerm(estimator="k2"))


def test_a_stage_of_ones_own_is_named_in_extra():
    @dataclass(frozen=True)
    class Halve:
        by: float = 2.0

        def init(self):
            return None

        def __call__(self, scores, batch, memory, workers):
            return scores / self.by, None, {}

    objective = Objective(stages=(Halve(by=4.0),))
    data = through_json(objective.to_dict())
    assert Objective.from_dict(data, extra=[Halve]) == objective
    with pytest.raises(ConfigError, match=r"unknown type 'Halve'; one of Adaptive"):
        Objective.from_dict(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kl": {"type": "KLTrem"}}, r"unknown type 'KLTrem'; did you mean 'KLTerm'"),
        ({"kl": {"estimator": "k1"}}, r"unknown type None; one of"),
        ({"kll": None}, r"Objective has no setting 'kll'; did you mean 'kl'"),
        (
            {"kl": {"type": "KLTerm", "beta": 0.1}},
            r"KLTerm has no setting 'beta'; one of estimator, gradient, weighting",
        ),
        ({"kl": {"type": "KLTerm", "bounds": {}}}, r"KLTerm has no setting 'bounds'"),
        (
            {"stages": [{"type": "ClipScores", "low": 0.0}]},
            r"ClipScores cannot be built from \['low",
        ),
        ({"type": "KLTerm"}, r"Objective\.from_dict got a KLTerm"),
        (
            {"kl": {"type": "KLTerm", "estimator": "k9"}},
            r"KLTerm\.estimator must be one of .* 'k9'",
        ),
    ],
)
def test_what_a_dict_does_not_mean_is_refused_by_name(data, message):
    with pytest.raises(ConfigError, match=message):
        Objective.from_dict(data)


@users
@pytest.mark.parametrize("wrong", ["0.2", [0.2], True])
def test_a_number_of_the_wrong_type_is_refused_by_name(wrong):
    data = {"surrogate": {"type": "ClippedSurrogate", "low": wrong}}
    with pytest.raises(ConfigError, match=r"ClippedSurrogate\.low must be a finite number"):
        Objective.from_dict(data)


@users
@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: FixedKL(coef=None), "FixedKL.coef"),
        (lambda: AdaptiveKL(target=None), "AdaptiveKL.target"),
        (lambda: AdaptiveKL(horizon=None), "AdaptiveKL.horizon"),
        (lambda: PIControl(floor=None), "PIControl.floor"),
        (lambda: Returns(gamma=None), "Returns.gamma"),
        (lambda: GAE(lam=None), "GAE.lam"),
        (lambda: Whiten(eps=None), "Whiten.eps"),
        (lambda: ClipScores(low=None, high=1.0), "ClipScores.low"),
        (lambda: NormaliseScores(eps=None), "NormaliseScores.eps"),
        (lambda: PenaliseTruncated(coef=None), "PenaliseTruncated.coef"),
        (lambda: Correction(high=None), "Correction.high"),
        (lambda: ClippedSurrogate(low=None), "ClippedSurrogate.low"),
        (lambda: ValueLoss(coef=None), "ValueLoss.coef"),
    ],
)
def test_what_cannot_be_turned_off_must_be_a_number(build, field):
    """None turns a thing off, where there is a thing to turn off."""
    with pytest.raises(ConfigError, match=rf"{field} must be a finite number.* got None"):
        build()


@users
@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"kl": "k3"}, "Objective.kl"),
        ({"surrogate": "clipped"}, "Objective.surrogate"),
        ({"surrogate": None}, "Objective.surrogate"),
        ({"advantage": {"type": "GAE"}}, "Objective.advantage"),
        ({"difficulty": True}, "Objective.difficulty"),
        ({"advantage": {"type": "Advantage", "whiten": True}}, "Advantage.whiten"),
        ({"kl": {"type": "KLTerm", "control": 0.05}}, "KLTerm.control"),
    ],
)
def test_a_part_of_the_wrong_kind_is_refused_by_name(data, field):
    with pytest.raises(ConfigError, match=field):
        Objective.from_dict(data)


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (NAN, {}, r"Knob\.value must be a finite number, got nan"),
        (INF, {}, r"must be a finite number, got inf"),
        ("1", {}, r"must be a finite number, got '1'"),
        (True, {}, r"must be a finite number, got True"),
        (-1, {"low": 0.0}, r"must be a finite number and >= 0, got -1"),
        (2, {"high": 1.0, "low": 0.0}, r"a finite number and >= 0 and <= 1, got 2"),
        (0, {"above": 0.0, "hint": "try 1"}, r"a finite number and > 0, got 0; try 1"),
        (0, {"above": 0.0, "optional": True}, r"a finite number and > 0, got 0; None turns it off"),
        (None, {}, r"must be a finite number, got None"),
    ],
)
def test_a_number_out_of_range_is_refused_with_field_value_and_remedy(value, bounds, message):
    with pytest.raises(ConfigError, match=message):
        require_number(Knob(value=value), "value", **bounds)


def test_a_number_at_its_bound_is_fine():
    require_number(Knob(value=0), "value", low=0.0, high=0.0)
    require_number(Knob(value=1e-30), "value", above=0.0)


def test_none_is_fine_where_there_is_a_thing_to_turn_off():
    require_number(Knob(value=None), "value", above=0.0, optional=True)


def test_a_part_must_be_of_a_known_kind():
    require_kind(Knob(value=GAE()), value=(Returns, GAE))
    require_kind(Knob(value=None), value=(Returns, None))
    with pytest.raises(ConfigError, match=r"Knob\.value must be Returns or None, got GAE\("):
        require_kind(Knob(value=GAE()), value=(Returns, None))
    with pytest.raises(ConfigError, match=r"Knob\.value must be Returns, got None"):
        require_kind(Knob(value=None), value=(Returns,))


def test_an_unknown_choice_names_the_known_ones():
    require_choice(Knob(), kind=("a", "b"), value=("c", None))
    with pytest.raises(ConfigError, match=r"Knob\.kind must be one of x, None, got 'a'"):
        require_choice(Knob(), kind=("x", None))


def test_lists_become_tuples_and_other_values_pass():
    assert decoded([1, [2.5, "x", None]], {}) == (1, (2.5, "x", None))
    knob = Knob(value=(1, (2,)))
    assert decoded(through_json(encoded(knob)), {"Knob": Knob}) == knob


def test_settings_are_frozen_comparable_and_replaceable():
    for made in (KLTerm(), Advantage(), ClippedSurrogate(), OBJECTIVES["everything"]):
        assert is_dataclass(made)
        first = next(f.name for f in fields(made) if f.init)
        with pytest.raises(AttributeError):
            setattr(made, first, None)
        assert replace(made) == made
    assert KLTerm() != KLTerm(estimator="k1")
