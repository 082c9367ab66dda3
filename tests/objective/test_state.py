import json

import pytest
import torch

from helpers import assert_close, make_batch
from klamp import presets
from klamp.errors import ConfigError
from klamp.objective.control import AdaptiveKL, ControlState, PIControl
from klamp.objective.kl import KLTerm
from klamp.objective.moments import Moments
from klamp.objective.objective import Objective
from klamp.objective.rewards import ClipScores, CombineScores, NormaliseScores, ScaleScores
from klamp.objective.state import ObjectiveState

RUNNING = NormaliseScores(mean="running", std="running")
REMEMBERS = {
    "pi": Objective(stages=(RUNNING,), kl=KLTerm(control=PIControl(target=0.1))),
    "adaptive": Objective(
        stages=(ClipScores(low=-1.0, high=1.0), ScaleScores(), ScaleScores(by="reference")),
        kl=KLTerm(where="reward", control=AdaptiveKL(horizon=100)),
    ),
    "components": Objective(stages=(CombineScores(weights=(1.0, 0.5), normalise=RUNNING),)),
    "nothing": Objective(),
} | {name: presets.load(name) for name in presets.PRESETS}
each = pytest.mark.parametrize("objective", REMEMBERS.values(), ids=REMEMBERS)


def batches(n):
    for seed in range(n):
        torch.manual_seed(seed)
        yield make_batch(domains=torch.arange(8) % 3, components=torch.randn(8, 2))


def after(objective, n):
    state = objective.init()
    for batch in batches(n):
        _, state = objective.prepare(batch, state)
    return state


def restored(state):
    return ObjectiveState.from_dict(json.loads(json.dumps(state.to_dict(), allow_nan=False)))


@each
def test_a_state_survives_json(objective):
    for state in (objective.init(), after(objective, 3)):
        assert restored(state) == state


@each
def test_a_resumed_run_repeats_the_undisturbed_one_exactly(objective):
    state = after(objective, 2)
    for batch in batches(2):
        one, moved = objective.prepare(batch, state)
        two, again = objective.prepare(batch, restored(state))
        assert moved == again
        assert torch.equal(one.advantages, two.advantages)
        assert one.metrics == two.metrics


def test_running_moments_are_in_the_state():
    state = after(REMEMBERS["pi"], 3)
    (memory,) = state.stages
    assert [(domain, m.count) for domain, m in memory] == [(0, 9), (1, 9), (2, 6)]
    assert isinstance(memory[0][1], Moments)
    assert state.control.integral != 0
    seen = torch.cat([b.scores[b.domains == 2] for b in batches(3)]).double()
    assert_close(torch.tensor(memory[2][1].mean), seen.mean().float())


@pytest.mark.parametrize("memory", [None, 3, [1.5, "x"], {"seen": 3, "by": {"a": 1.0}}])
def test_the_memory_of_a_stage_of_ones_own_is_any_plain_value(memory):
    found = restored(ObjectiveState(stages=(memory,))).to_dict()
    assert found == ObjectiveState(stages=(memory,)).to_dict()


def test_preparing_does_not_move_the_state_it_was_given():
    objective = REMEMBERS["pi"]
    state = objective.init()
    _, moved = objective.prepare(next(batches(1)), state)
    assert state == objective.init()
    assert moved != state


def test_the_coefficient_is_the_controllers_or_nothing():
    assert ObjectiveState().kl_coef == 0.0
    assert ObjectiveState(control=ControlState(coef=0.3)).kl_coef == 0.3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"type": "ControlState", "coef": 0.1}, r"ObjectiveState\.from_dict got a ControlState"),
        ({"type": "State"}, r"unknown type 'State'; one of ControlState, Moments, ObjectiveState"),
        (
            {"type": "ObjectiveState", "kl": 1},
            r"ObjectiveState has no setting 'kl'; one of control",
        ),
    ],
)
def test_what_is_no_state_is_refused_by_name(data, message):
    with pytest.raises(ConfigError, match=message):
        ObjectiveState.from_dict(data)
