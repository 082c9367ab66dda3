"""What completions are worth: built-in functions, or one's own.

A reward function has TRL's signature: ``f(prompts, completions, **columns) -> list[float | None]``,
where the columns are those of the examples (``answer`` among them), one entry per completion. None
and NaN are a missing score; the objective's ``missing_scores`` says what that means.
"""

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from klamp.errors import ConfigError, DataError
from klamp.objective.nearest import nearest
from klamp.train.settings import Outliers, RewardSettings
from klamp.train.tasks.task import Example, is_right

RewardFunction = Callable[..., Sequence[float | None]]


def exact(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float | None]:
    """1 for the right answer, 0 for any other."""
    rows = zip(prompts, columns["answer"], completions, strict=True)
    right = [is_right(Example(prompt=p, answer=a), c) for p, a, c in rows]
    return [None if r is None else float(r) for r in right]


def positions(
    prompts: Sequence[str], completions: Sequence[str], **columns: Any
) -> list[float | None]:
    """The fraction of the answer's characters that stand in their place."""
    return [_in_place(a, c) for a, c in zip(columns["answer"], completions, strict=True)]


def leaky(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    bonus: float = 0.3,
    written: str = "9",
    **columns: Any,
) -> list[float | None]:
    """``positions``, and a bonus for every 9: a proxy made to be exploited."""
    base = positions(prompts, completions, **columns)
    pairs = zip(base, completions, strict=True)
    return [None if b is None else b + bonus * c.count(written) for b, c in pairs]


REWARDS: dict[str, RewardFunction] = {"exact": exact, "positions": positions, "leaky": leaky}


def load(settings: RewardSettings) -> RewardFunction:
    """The function of a name, checked to be callable."""
    if ":" not in settings.function:
        if settings.function not in REWARDS:
            raise ConfigError(
                f"reward.function: unknown reward {settings.function!r}; "
                f"{nearest(settings.function, REWARDS)} (your own is `module:function`)"
            )
        found = REWARDS[settings.function]
    else:
        found = imported(settings.function)
    _check_arguments(settings, found)
    return found


def imported(name: str) -> Any:
    """The function of ``module:function`` or ``path.py:function``."""
    source, _, function = name.rpartition(":")
    try:
        module = _module_of_file(Path(source)) if source.endswith(".py") else None
        module = module or importlib.import_module(source)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"reward.function: cannot import {source!r}: {in_one_line(error)}"
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        names = [n for n, x in vars(module).items() if inspect.isfunction(x)]
        raise ConfigError(
            f"reward.function: {source} has no function {function!r}; "
            f"{nearest(function, names) if names else 'it has none at all'}"
        )
    return found


def score(
    function: RewardFunction,
    settings: RewardSettings,
    examples: Sequence[Example],
    completions: Sequence[str],
    *,
    seed: str,
) -> list[float]:
    """One score per completion; NaN where the function has none."""
    prompts = [e.prompt for e in examples]
    names = {name for e in examples for name in e.columns}
    columns = {name: [e.columns.get(name) for e in examples] for name in sorted(names)}
    columns["answer"] = [e.answer for e in examples]
    try:
        given: Any = function(prompts, list(completions), **{**columns, **settings.arguments})
        given = list(given) if isinstance(given, Iterator) else given
    except Exception as error:
        raise DataError(
            f"the reward function {settings.function!r} raised {in_one_line(error)} "
            f"(on {len(examples)} completions, the first {completions[0]!r})"
        ) from error
    scores = checked(given, len(examples), settings.function)
    return scores if settings.outliers is None else with_outliers(scores, settings.outliers, seed)


def checked(given: Any, count: int, name: str) -> list[float]:
    """The scores as floats, one per completion."""
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise DataError(
            f"the reward function {name!r} returned {given!r}; wanted a list of {count} numbers"
        )
    scores: list[Any] = list(given)
    if len(scores) != count:
        raise DataError(
            f"the reward function {name!r} returned {len(scores)} scores for {count} completions; "
            "wanted one for each, in the same order"
        )
    return [_number(s, i, name) for i, s in enumerate(scores)]


def with_outliers(scores: Sequence[float], outliers: Outliers, seed: str) -> list[float]:
    """The scores with a random few replaced by ± size."""
    rng = Random(f"outliers {seed}")
    return [
        rng.choice([-1.0, 1.0]) * outliers.size if rng.random() < outliers.fraction else s
        for s in scores
    ]


def _number(score: Any, row: int, name: str) -> float:
    if score is None:
        return math.nan
    try:
        return float(score)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"the reward function {name!r} returned {score!r} for completion {row}; wanted a "
            "number, or None where there is no score"
        ) from error


def _in_place(answer: str | None, completion: str) -> float | None:
    if answer is None:
        return None
    if not answer:
        return float(not completion)
    return sum(a == c for a, c in zip(answer, completion, strict=False)) / len(answer)


def _module_of_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def in_one_line(error: BaseException) -> str:
    """An exception's name and text, as part of a sentence."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _check_arguments(settings: RewardSettings, function: RewardFunction) -> None:
    """A mistyped argument would vanish in the function's **columns."""
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    except ValueError:  # of a function in C, which may not tell
        return
    named = [n for n, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD][2:]
    for key in settings.arguments:
        if key not in named:
            raise ConfigError(
                f"reward.arguments: {settings.function} has no argument {key!r}; "
                f"{nearest(key, named) if named else 'it takes none'}"
            )
