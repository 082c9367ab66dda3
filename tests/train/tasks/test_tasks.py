import itertools
import json
import re

import pytest

from klamp.errors import ConfigError, DataError
from klamp.train.settings import TaskSettings
from klamp.train.tasks import catalogue, files
from klamp.train.tasks.digits import DIGIT_TASKS, MAX_LENGTH, RECITALS, DigitTask
from klamp.train.tasks.task import Example, Task, is_for_evaluation, is_right

NAMES = list(DIGIT_TASKS)
SOLUTIONS = {
    "s": lambda x: "".join(sorted(x)),
    "r": lambda x: x[::-1],
    "a": lambda x: str(sum(map(int, x.split("+")))),
    "c": lambda x: ",".join(["".join(sorted(x))] * 16),
}
every_task = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def prompts(tmp_path):
    """A file of prompts: of texts as they are, of rows as JSON."""

    def write(*rows, name="prompts.jsonl"):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


def numbered(count, start=0):
    return [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(start, start + count)]


# Which prompts are for evaluation.


def test_one_prompt_in_ten_is_held_out_by_its_text():
    held = sum(is_for_evaluation(f"s{i:06d}=") for i in range(20_000))
    assert abs(held - 2000) < 4 * 43  # σ = √(20000 · 0.09) = 42.4


@pytest.mark.parametrize(
    ("answer", "completion", "right"),
    [
        ("12", "12", True),
        ("12", " 12\n", True),
        ("12 ", "12", True),
        ("12", "123", False),
        ("12", "1 2", False),
        ("", "", True),
        (None, "12", None),
    ],
)
def test_an_answer_is_right_up_to_space_around_it(answer, completion, right):
    assert is_right(Example(prompt="s21=", answer=answer), completion) is right


# Tasks on digits.


@every_task
def test_the_answer_is_the_solution_of_the_prompt(name):
    task = DigitTask(name=name, lengths=(2, 6, 9))
    for example in task.train(3, 0, 100) + task.evaluation(20):
        kind, given = re.fullmatch(r"([srac])(.+)=", example.prompt).groups()
        assert kind == {"recite": "c"}.get(name, name[0])
        assert example.answer == SOLUTIONS[kind](given)


def test_the_long_task_has_an_answer_of_a_hundred_characters_and_more():
    (example,) = DigitTask(name="recite").train(0, 0, 1)
    assert len(example.answer) == RECITALS * 7 - 1 == 111


@every_task
def test_training_never_meets_an_evaluation_prompt_whatever_the_seed(name):
    task = DigitTask(name=name, lengths=(2, 6))
    held_out = {e.prompt for e in task.evaluation(300)}
    trained = {e.prompt for seed in range(5) for e in task.train(seed, 0, 400)}
    assert held_out and trained and not held_out & trained
    assert all(map(is_for_evaluation, held_out)) and not any(map(is_for_evaluation, trained))


@every_task
def test_the_stream_is_addressed_by_number_alone(name):
    task = DigitTask(name=name, lengths=(3, 6))
    whole = task.train(7, 0, 40)
    assert task.train(7, 0, 13) + task.train(7, 13, 20) + task.train(7, 33, 7) == whole
    assert DigitTask(name=name, lengths=(3, 6)).train(7, 25, 1) == whole[25:26]
    assert task.train(8, 0, 40) != whole


@every_task
def test_evaluation_prompts_do_not_repeat_and_are_the_same_each_time(name):
    task = DigitTask(name=name)
    found = task.evaluation(256)
    assert len({e.prompt for e in found}) == len(found) == 256
    assert task.evaluation(256) == found
    assert task.evaluation(64) == found[:64]


def test_a_small_task_gives_what_it_has():
    # Of two-digit sums there are 90 · 90 prompts; these are all that evaluation owns.
    sums = (f"a{a}+{b}=" for a, b in itertools.product(range(10, 100), repeat=2))
    owned = set(filter(is_for_evaluation, sums))
    found = {e.prompt for e in DigitTask(name="add").evaluation(2000)}
    assert found == owned


@pytest.mark.parametrize("name", ["sort", "reverse", "recite"])
def test_the_shortest_prompts_still_have_some_for_either_side(name):
    """Else a draw would never end."""
    start = {"recite": "c"}.get(name, name[0])
    held = [is_for_evaluation(f"{start}{a}{b}=") for a, b in itertools.product(range(10), repeat=2)]
    assert 0 < sum(held) < len(held)
    assert len(DigitTask(name=name, lengths=(2,)).evaluation(512)) == sum(held)


def test_lengths_are_drawn_evenly():
    found = DigitTask(lengths=(3, 8)).train(0, 0, 1000)
    sizes = [len(e.prompt) - 2 for e in found]
    assert set(sizes) == {3, 8}
    assert abs(sizes.count(3) - 500) < 4 * 16  # σ = √(1000 · ¼) = 15.8


@pytest.mark.parametrize("lengths", [(), (0,), (1,), (6, 1), (MAX_LENGTH + 1,), (-1,)])
def test_lengths_that_cannot_be_are_refused(lengths):
    with pytest.raises(ConfigError, match=r"task\.lengths must be"):
        DigitTask(lengths=lengths)
    assert DigitTask(lengths=(2, MAX_LENGTH)).train(0, 0, 1)


# Prompts from a file.


def test_a_file_is_read_row_by_row_with_its_columns(prompts):
    path = prompts(
        {"prompt": "2+2=", "answer": 4, "level": 1, "tags": ["a"]},
        "",
        {"prompt": "Why β?"},
        {"prompt": "x", "answer": None},
    )
    assert files.read(path) == [
        Example(prompt="2+2=", answer="4", columns={"level": 1, "tags": ["a"]}),
        Example(prompt="Why β?"),
        Example(prompt="x"),
    ]


def test_a_file_is_cut_by_the_text_of_its_prompts(prompts):
    rows = numbered(200)
    task = files.load(prompts(*rows))
    assert all(is_for_evaluation(e.prompt) for e in task.held_out)
    assert not any(is_for_evaluation(e.prompt) for e in task.training)
    assert {e.prompt for e in task.held_out + task.training} == {r["prompt"] for r in rows}
    assert 0 < len(task.held_out) < 60


def test_an_evaluation_file_owns_its_prompts_wherever_else_they_are(prompts):
    held_out = prompts(*numbered(5), name="held_out.jsonl")
    task = files.load(prompts(*numbered(50)), held_out)
    assert [e.prompt for e in task.held_out] == [r["prompt"] for r in numbered(5)]
    assert [e.prompt for e in task.training] == [r["prompt"] for r in numbered(45, start=5)]


def test_each_pass_has_every_prompt_once_in_an_order_of_its_own(prompts):
    task = files.load(prompts(*numbered(40)), prompts(*numbered(3, 100), name="other.jsonl"))
    first, second = task.train(0, 0, 40), task.train(0, 40, 40)
    assert len({e.prompt for e in first}) == len({e.prompt for e in second}) == 40
    assert first != second and first != list(task.training)
    assert task.train(1, 0, 40) != first


def test_the_stream_of_a_file_is_addressed_by_number_alone(prompts):
    path = prompts(*numbered(30))
    task = files.load(path)
    whole = task.train(5, 0, 100)
    assert task.train(5, 0, 37) + task.train(5, 37, 63) == whole
    assert files.load(path).train(5, 61, 2) == whole[61:63]


def test_evaluation_takes_the_first_of_those_held_out(prompts):
    task = files.load(prompts(*numbered(200)))
    assert task.evaluation(3) == list(task.held_out[:3])
    assert task.evaluation(10_000) == list(task.held_out)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], r"has no prompts; wanted lines such as {\"prompt\": \"2\+2=\"}"),
        (["", "  "], "has no prompts"),
        ([{"prompt": "a"}, "nope"], r"line 2 is not JSON \(.*\): 'nope'"),
        ([{"prompt": "a"}, "", {"promt": "x"}], "line 3 has no text under `prompt`: '.*promt"),
        ([{"prompt": ""}], "line 1 has no text under `prompt`"),
        ([{"prompt": 3}], "line 1 has no text under `prompt`"),
        (["[1]"], "line 1 has no text under `prompt`"),
    ],
)
def test_a_mistake_in_a_file_is_named_by_its_line(prompts, rows, said):
    with pytest.raises(DataError, match=said):
        files.read(prompts(*rows))


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"cannot read the prompts of .*none\.jsonl: "):
        files.read(tmp_path / "none.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"cannot read the prompts of .*bytes\.jsonl: "):
        files.read(tmp_path / "bytes.jsonl")


def test_a_file_with_nothing_left_to_train_on_is_refused(prompts):
    path = prompts(*numbered(5))
    with pytest.raises(DataError, match="has no prompt to train on: 5 read, and all of them are"):
        files.load(path, path)


def test_half_a_character_in_a_prompt_is_refused_or_read(prompts):
    path = prompts('{"prompt": "a\\ud800"}', *numbered(40))
    try:
        assert files.load(path).training
    except DataError as error:
        assert "line 1" in str(error)


# The task that a config names.


@every_task
def test_a_digit_task_is_found_by_its_name(name):
    assert catalogue.load(TaskSettings(name=name, lengths=(3,))) == DigitTask(
        name=name, lengths=(3,)
    )


def test_a_file_is_a_task_too(prompts):
    path = prompts(*numbered(100))
    found = catalogue.load(TaskSettings(name="file", file=path))
    assert found == files.load(path) and isinstance(found, Task)
    assert isinstance(catalogue.load(TaskSettings()), Task)


def test_a_file_without_a_prompt_for_evaluation_is_refused(prompts):
    rows = [r for r in numbered(20) if not is_for_evaluation(r["prompt"])]
    said = rf"leaves no prompt for evaluation \({len(rows)} in all, one in ten .*give task"
    with pytest.raises(DataError, match=said):
        catalogue.load(TaskSettings(name="file", file=prompts(*rows)))
