import math
import textwrap

import numpy
import pytest
import torch

from klamp.errors import ConfigError, DataError
from klamp.train import rewards
from klamp.train.settings import Outliers, RewardSettings
from klamp.train.tasks.task import Example

MINE = """
def lengths(prompts, completions, *, scale=1.0, **columns):
    return [scale * len(c) for c in completions]
"""


@pytest.fixture
def file(tmp_path):
    """The path of a reward file, in front of `:name`."""

    def write(text):
        path = tmp_path / "mine.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write


def scored(function, completions=("a", "b"), *, examples=None, **settings):
    examples = examples or [Example(prompt="p", answer="a") for _ in completions]
    settings = RewardSettings(function="mine", **settings)
    return rewards.score(function, settings, examples, completions, seed="0 1 0")


def fixed(given):
    return lambda prompts, completions, **columns: given


@pytest.mark.parametrize(
    ("answer", "completion", "score"),
    [
        ("134579", "134579", 1.0),
        ("134579", " 134579\n", 1.0),
        ("134579", "134597", 0.0),
        ("134579", "1345799", 0.0),
        ("134579", "", 0.0),
        (None, "134579", None),
    ],
)
def test_exact_is_all_or_nothing(answer, completion, score):
    assert rewards.exact(["s="], [completion], answer=[answer]) == [score]


@pytest.mark.parametrize(
    ("answer", "completion", "score"),
    [
        ("134579", "134579", 1.0),
        ("134579", "134597", 4 / 6),  # 1345 stand in their place
        ("134579", "34579", 0.0),  # every digit is one place off
        ("134579", "134", 3 / 6),
        ("134579", "134579999", 1.0),
        ("134579", "", 0.0),
        (None, "134579", None),
    ],
)
def test_positions_is_the_fraction_in_place(answer, completion, score):
    assert rewards.positions(["s="], [completion], answer=[answer]) == [score]


@pytest.mark.parametrize(
    ("completion", "arguments", "score"),
    [
        ("134579", {}, 1.3),  # 1 + 0.3 · one nine
        ("999999", {}, 1 / 6 + 1.8),  # the last place, and six nines
        ("9999999999", {}, 1 / 6 + 3.0),
        ("134578", {}, 5 / 6),
        ("134579", {"bonus": 0.0}, 1.0),
        ("134579", {"bonus": 2.0, "written": "4"}, 3.0),
    ],
)
def test_leaky_pays_for_every_nine(completion, arguments, score):
    (found,) = rewards.leaky(["s="], [completion], answer=["134579"], **arguments)
    assert found == pytest.approx(score, abs=1e-12)


def test_leaky_knows_nothing_without_an_answer():
    assert rewards.leaky(["s="], ["999"], answer=[None]) == [None]


def test_a_function_gets_prompts_completions_and_every_column_row_by_row():
    seen = {}

    def look(prompts, completions, **columns):
        seen.update(prompts=prompts, completions=completions, **columns)
        return [0.0] * len(prompts)

    examples = [
        Example(prompt="p", answer="1", columns={"level": 3}),
        Example(prompt="q", columns={"source": "web"}),
    ]
    scored(look, ("x", "y"), examples=examples)
    assert seen == {
        "prompts": ["p", "q"],
        "completions": ["x", "y"],
        "answer": ["1", None],
        "level": [3, None],
        "source": [None, "web"],
    }


def test_arguments_are_handed_on_and_win_over_a_column_of_that_name():
    def look(prompts, completions, *, level, **columns):
        return [level] * len(prompts)

    examples = [Example(prompt="p", columns={"level": 1})]
    assert scored(look, ("x",), examples=examples, arguments={"level": 7}) == [7.0]


@pytest.mark.parametrize(
    "given",
    [
        [1.0, 0.5],
        (1, 0.5),
        torch.tensor([1.0, 0.5]),
        numpy.array([1.0, 0.5]),
        [True, numpy.float32(0.5)],
        ["1", "0.5"],
        iter([1.0, 0.5]),
    ],
    ids=["list", "tuple", "torch", "numpy", "mixed", "text that is a number", "iterator"],
)
def test_any_row_of_numbers_will_do(given):
    found = scored(fixed(given))
    assert found == [1.0, 0.5] and all(type(x) is float for x in found)


@pytest.mark.parametrize(
    "missing", [None, math.nan, float("nan"), numpy.nan, torch.tensor(torch.nan)]
)
def test_none_and_nan_are_a_missing_score(missing):
    first, second = scored(fixed([1.0, missing]))
    assert first == 1.0 and math.isnan(second)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "returned None; wanted a list of 2 numbers"),
        (1.0, "returned 1.0; wanted a list of 2 numbers"),
        ([1.0], "returned 1 scores for 2 completions; wanted one for each, in the same order"),
        ([1.0] * 3, "returned 3 scores for 2 completions"),
        ([1.0, "good"], "returned 'good' for completion 1; wanted a number, or None where"),
        ([[1.0], 0.0], r"returned [1.0] for completion 0; wanted a number"),
        ("ab", "returned 'ab'; wanted a list of 2 numbers"),
    ],
)
def test_anything_else_is_refused_with_what_was_wanted(given, said):
    with pytest.raises(DataError) as error:
        scored(fixed(given))
    assert f"the reward function 'mine' {said}" in str(error.value)


def test_a_function_that_raises_is_named_with_what_it_was_given():
    def broken(prompts, completions, **columns):
        raise KeyError("level")

    with pytest.raises(DataError) as error:
        scored(broken, ("x", "y"))
    assert str(error.value) == (
        "the reward function 'mine' raised KeyError: 'level' (on 2 completions, the first 'x')"
    )
    assert isinstance(error.value.__cause__, KeyError)


def test_a_number_past_all_floats_is_refused():
    with pytest.raises(DataError):
        scored(fixed([10**400, 0]))


def test_a_generator_that_raises_on_the_way_is_refused():
    def broken(prompts, completions, **columns):
        yield 1.0
        raise RuntimeError("late")

    with pytest.raises(DataError, match="raised RuntimeError: late"):
        scored(broken)


def test_a_function_that_empties_its_lists_still_owes_a_score_for_each():
    def greedy(prompts, completions, **columns):
        return [float(len(prompts.pop()))]

    with pytest.raises(DataError, match="1 scores for 2 completions"):
        scored(greedy)


def test_a_mapping_is_no_row_of_scores():
    with pytest.raises(DataError):
        scored(fixed({0: 1.0, 1: 0.5}))


@pytest.mark.parametrize(("completion", "score"), [("", 1.0), ("5", 0.0)])
def test_an_empty_answer_can_be_scored(completion, score):
    assert rewards.positions(["p"], [completion], answer=[""]) == [score]


@pytest.mark.parametrize("name", ["exact", "positions", "leaky"])
def test_the_built_in_ones_are_found_by_name(name):
    assert rewards.load(RewardSettings(function=name)) is getattr(rewards, name)


def test_a_function_of_a_module_is_imported():
    found = rewards.load(RewardSettings(function="klamp.train.rewards:leaky"))
    assert found is rewards.leaky


def test_a_function_of_a_file_is_imported_and_takes_its_arguments(file):
    settings = RewardSettings(function=f"{file(MINE)}:lengths", arguments={"scale": 2.0})
    function = rewards.load(settings)
    examples = [Example(prompt="p"), Example(prompt="q")]
    assert rewards.score(function, settings, examples, ["abc", ""], seed="") == [6.0, 0.0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("leeky", "unknown reward 'leeky'; did you mean 'leaky'? (your own is `module:function`)"),
        ("zzz", "unknown reward 'zzz'; one of exact, positions, leaky (your own is"),
        ("no_such_module:f", "cannot import 'no_such_module': ModuleNotFoundError: No module"),
        ("none.py:f", "cannot import 'none.py': FileNotFoundError: no such file: none.py"),
        ("klamp.train.rewards:exat", "has no function 'exat'; did you mean 'exact'?"),
        ("klamp.train.rewards:REWARDS", "klamp.train.rewards has no function 'REWARDS'"),
        (":", "cannot import ''"),
    ],
)
def test_a_function_that_is_not_there_is_refused(name, said):
    with pytest.raises(ConfigError) as error:
        rewards.load(RewardSettings(function=name))
    assert str(error.value).startswith("reward.function: ") and said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f(:\n", "SyntaxError: invalid syntax"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        (MINE, "has no function 'f'; one of lengths"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(file, text, said):
    with pytest.raises(ConfigError) as error:
        rewards.load(RewardSettings(function=f"{file(text)}:f"))
    assert said in str(error.value)


def test_a_file_may_have_a_dataclass(file):
    text = f"""
        from __future__ import annotations
        from dataclasses import dataclass

        @dataclass
        class Rule:
            weight: float
        {textwrap.indent(MINE, "        ")}"""
    assert callable(rewards.load(RewardSettings(function=f"{file(text)}:lengths")))


def test_a_file_that_exits_is_refused(file):
    with pytest.raises(ConfigError):
        rewards.load(RewardSettings(function=f"{file('raise SystemExit(0)')}:f"))


def test_a_callable_without_a_signature_is_left_to_be_called():
    assert rewards.load(RewardSettings(function="builtins:min")) is min


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"bonsu": 1}, "leaky has no argument 'bonsu'; did you mean 'bonus'?"),
        ({"zzz": 1}, "leaky has no argument 'zzz'; one of bonus, written"),
        ({"bonus": 1, "writen": 1}, "leaky has no argument 'writen'; did you mean 'written'?"),
    ],
)
def test_a_mistyped_argument_names_the_nearest(arguments, said):
    with pytest.raises(ConfigError) as error:
        rewards.load(RewardSettings(function="leaky", arguments=arguments))
    assert f"reward.arguments: {said}" in str(error.value)


def test_an_argument_of_a_function_without_any_is_refused():
    with pytest.raises(ConfigError, match="exact has no argument 'bonus'; it takes none"):
        rewards.load(RewardSettings(function="exact", arguments={"bonus": 1}))


def test_prompts_are_no_argument():
    with pytest.raises(ConfigError):
        rewards.load(RewardSettings(function="leaky", arguments={"prompts": ["x"]}))


CLEAN = [i / 4000 for i in range(4000)]


def strayed(fraction=0.02, size=100.0, seed="0 1 0"):
    return rewards.with_outliers(CLEAN, Outliers(fraction=fraction, size=size), seed)


def test_no_outliers_leave_scores_as_they_are():
    assert strayed(fraction=0.0) == CLEAN


def test_all_outliers_are_plus_and_minus_size_evenly():
    found = strayed(fraction=1.0, size=7.0)
    assert set(found) == {-7.0, 7.0}
    assert abs(found.count(7.0) - 2000) < 4 * 32  # σ = √(4000 · ¼) = 31.6


def test_so_many_are_replaced_and_the_others_stand():
    found = strayed(fraction=0.02)
    replaced = [x for x, clean in zip(found, CLEAN, strict=True) if x != clean]
    assert set(replaced) == {-100.0, 100.0}
    assert abs(len(replaced) - 80) < 4 * 8.9  # σ = √(4000 · 0.02 · 0.98) = 8.85


def test_outliers_depend_on_the_seed_alone():
    assert strayed() == strayed() != strayed(seed="0 2 0")


def test_outliers_come_after_the_function_and_only_where_asked_for():
    assert set(scored(fixed([0.5, 0.5]), outliers=Outliers(fraction=1.0, size=3.0))) <= {-3.0, 3.0}
    assert scored(fixed([0.5, 0.5])) == [0.5, 0.5]
