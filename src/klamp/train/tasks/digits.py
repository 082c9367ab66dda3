"""Tasks on digits, made from a seed: sort, reverse, add, and one with a long answer.

s394571=  →  134579          sort
r394571=  →  175493          reverse
a37+48=   →  85              add
c394571=  →  134579,134579,… recite: the sorted digits sixteen times, 111 characters
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from klamp.errors import ConfigError
from klamp.train.tasks.task import Example, is_for_evaluation

RECITALS = 16
MAX_LENGTH = 12


def sort_digits(rng: Random, length: int) -> Example:
    """Digits to put in ascending order."""
    digits = _digits(rng, length)
    return Example(prompt=f"s{digits}=", answer="".join(sorted(digits)))


def reverse_digits(rng: Random, length: int) -> Example:
    """Digits to write backwards."""
    digits = _digits(rng, length)
    return Example(prompt=f"r{digits}=", answer=digits[::-1])


def add_numbers(rng: Random, length: int) -> Example:
    """Two numbers of two digits to add; ``length`` has no say in it."""
    a, b = rng.randrange(10, 100), rng.randrange(10, 100)
    return Example(prompt=f"a{a}+{b}=", answer=str(a + b))


def recite_digits(rng: Random, length: int) -> Example:
    """Digits to sort, and to write that down sixteen times."""
    digits = _digits(rng, length)
    return Example(prompt=f"c{digits}=", answer=",".join(["".join(sorted(digits))] * RECITALS))


DIGIT_TASKS: dict[str, Callable[[Random, int], Example]] = {
    "sort": sort_digits,
    "reverse": reverse_digits,
    "add": add_numbers,
    "recite": recite_digits,
}


@dataclass(frozen=True, kw_only=True)
class DigitTask:
    """A digit task as a source of prompts; lengths are drawn evenly where several are given."""

    name: str = "sort"
    lengths: tuple[int, ...] = (6,)

    def __post_init__(self) -> None:
        if not self.lengths or not all(1 <= n <= MAX_LENGTH for n in self.lengths):
            raise ConfigError(
                f"task.lengths must be between 1 and {MAX_LENGTH} digits, got {list(self.lengths)}"
            )
        # Of ten prompts of one digit, evaluation may own none: nothing could be drawn for it.
        if self.name != "add" and min(self.lengths) < 2:
            raise ConfigError(
                f"task.lengths must be at least 2, got {min(self.lengths)}: prompts of one digit "
                "are too few to keep training and evaluation apart"
            )

    def train(self, seed: int, start: int, count: int) -> list[Example]:
        """The stream of a seed, without prompts that evaluation owns."""
        return [self._draw(f"train {seed} {start + i}", False) for i in range(count)]

    def evaluation(self, count: int) -> list[Example]:
        """The held-out prompts, without repeats, the same for every seed of a run."""
        found: dict[str, Example] = {}
        for i in range(4 * count):  # small tasks have fewer prompts than asked for
            example = self._draw(f"evaluation {i}", True)
            found.setdefault(example.prompt, example)
            if len(found) == count:
                break
        return list(found.values())

    def _draw(self, seed: str, held_out: bool) -> Example:
        rng = Random(seed)
        while True:
            example = DIGIT_TASKS[self.name](rng, rng.choice(self.lengths))
            if is_for_evaluation(example.prompt) == held_out:
                return example


def _digits(rng: Random, length: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(length))
