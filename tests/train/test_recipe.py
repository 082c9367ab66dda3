import copy
from dataclasses import replace

import pytest

from klamp import presets
from klamp.errors import ConfigError
from klamp.objective.control import PIControl
from klamp.objective.correction import Correction
from klamp.objective.groups import Difficulty
from klamp.objective.losses import CISPO, ValueLoss
from klamp.objective.rewards import ClipScores
from klamp.train import recipe

BASE = presets.load("klamp")
every_preset = pytest.mark.parametrize("name", presets.PRESETS)


def klamp(**section):
    return recipe.objective({"preset": "klamp", **section})


@every_preset
def test_a_name_alone_is_the_preset(name):
    assert recipe.objective(name) == recipe.objective({"preset": name}) == presets.load(name)


@every_preset
def test_without_a_preset_the_section_is_the_whole_objective(name):
    whole = presets.load(name).to_dict()
    assert recipe.objective(whole) == presets.load(name)
    assert recipe.objective({k: v for k, v in whole.items() if k != "type"}) == presets.load(name)


def test_a_setting_goes_to_the_preset():
    assert klamp(kl_target=1.0, low=0.1) == presets.load("klamp", kl_target=1.0, low=0.1)
    assert klamp(kl_target=None) == presets.load("klamp", kl_target=None)


def test_a_part_is_changed_after_the_preset_built_it():
    assert klamp(kl={"gradient": "token"}) == replace(BASE, kl=replace(BASE.kl, gradient="token"))
    assert klamp(reduction="sequence_sum") == replace(BASE, reduction="sequence_sum")


def test_settings_and_parts_go_together():
    built = presets.load("klamp", kl_coef=0.3)
    wanted = replace(built, kl=replace(built.kl, gradient="token"))
    assert klamp(kl_coef=0.3, kl={"gradient": "token"}) == wanted


def test_a_part_within_a_part_is_changed_alone():
    control = replace(BASE.kl.control, target=2.0)
    assert klamp(kl={"control": {"target": 2.0}}) == replace(
        BASE, kl=replace(BASE.kl, control=control)
    )


def test_a_part_of_another_type_replaces_the_whole_part():
    # AdaptiveKL's horizon and error_clip must not be left over.
    control = {"type": "PIControl", "init_coef": 1.0, "target": 0.85}
    found = klamp(kl={"control": control}).kl
    assert found == replace(BASE.kl, control=PIControl(init_coef=1.0, target=0.85))
    assert klamp(surrogate={"type": "CISPO"}).surrogate == CISPO()


def test_a_part_of_the_same_type_keeps_what_is_not_named():
    found = klamp(surrogate={"type": "ClippedSurrogate", "high": 0.5}).surrogate
    assert found == replace(BASE.surrogate, high=0.5)


@pytest.mark.parametrize("part", ["kl", "correction"])
def test_none_turns_a_part_off(part):
    assert klamp(**{part: None}) == replace(BASE, **{part: None})


@pytest.mark.parametrize(
    ("preset", "part", "given", "built"),
    [
        ("klamp", "difficulty", {"low": 0.2, "high": 0.8}, Difficulty(low=0.2, high=0.8)),
        ("klamp", "value_loss", {}, ValueLoss()),
        ("trlx", "correction", {"high": 3.0}, Correction(high=3.0)),
    ],
)
def test_a_part_that_the_preset_lacks_needs_no_type(preset, part, given, built):
    assert getattr(presets.load(preset), part) is None
    assert getattr(recipe.objective({"preset": preset, part: given}), part) == built


def test_a_kl_can_be_switched_on_without_its_type():
    assert recipe.merged({"kl": None}, {"kl": {"estimator": "k2"}}) == {
        "kl": {"type": "KLTerm", "estimator": "k2"}
    }


def test_stages_are_replaced_as_a_list():
    stages = [{"type": "ClipScores", "low": -1.0, "high": 1.0}]
    assert klamp(stages=stages).stages == (ClipScores(low=-1.0, high=1.0),)
    assert klamp(stages=[]).stages == ()


def test_a_part_of_many_possible_types_must_name_one():
    with pytest.raises(ConfigError, match=r"objective\.stages needs a `type`; one of .*ClipScores"):
        klamp(stages={"low": 1.0})


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("trlxx", "unknown preset 'trlxx'; did you mean 'trlx'?"),
        ({"preset": "klmp"}, "unknown preset 'klmp'; did you mean 'klamp'?"),
        ({"preset": "klamp", "kl_taget": 1}, "no setting 'kl_taget'; did you mean 'kl_target'?"),
        ({"preset": "klamp", "redction": 1}, "no setting 'redction'; did you mean 'reduction'?"),
        ({"preset": "trlx", "cliprang": 1}, "no setting 'cliprang'; did you mean 'cliprange'?"),
        ({"preset": "trlx", "kl_target": 1}, "preset 'trlx' has no setting 'kl_target'"),
        ({"preset": "klamp", "kl": {"gradient": "up"}}, "KLTerm.gradient must be one of"),
        ({"preset": "klamp", "kl": {"gradiant": "up"}}, "KLTerm has no setting 'gradiant'"),
        ({"preset": "klamp", "kl": 3}, "Objective.kl must be KLTerm or None, got 3"),
        ({"redction": "token_mean"}, "Objective has no setting 'redction'"),
        ({"stages": [{"type": "ClipScoers"}]}, "unknown type 'ClipScoers'"),
    ],
)
def test_what_is_unknown_is_refused_by_name(section, said, as_users_run_it):
    with pytest.raises(ConfigError) as error:
        recipe.objective(section)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("section", "meant"),
    [
        ({"preset": "klamp", "kl": {"gradiant": "token"}}, "gradient"),
        ({"preset": "klamp", "kl": {"control": {"type": "PIContrl"}}}, "PIControl"),
        ({"stages": [{"type": "ClipScoers"}]}, "ClipScores"),
        ({"redction": "token_mean"}, "reduction"),
    ],
)
def test_a_mistyped_name_inside_the_objective_names_the_nearest(section, meant):
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        recipe.objective(section)


@pytest.mark.parametrize("section", [{"preset": "klamp", 1: 2}, {"preset": ["klamp"]}])
def test_a_name_that_is_no_text_is_refused(section, as_users_run_it):
    with pytest.raises(ConfigError):
        recipe.objective(section)


def test_nothing_that_was_given_is_changed():
    base, changes = BASE.to_dict(), {"kl": {"gradient": "token", "control": {"target": 2.0}}}
    before = copy.deepcopy((base, changes))
    recipe.merged(base, changes)
    recipe.objective(section := {"preset": "klamp", **changes})
    assert (base, changes) == before and section == {"preset": "klamp", **before[1]}
