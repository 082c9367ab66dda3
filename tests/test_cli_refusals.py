"""What the commands refuse: one sentence on stderr, exit code 2, and never a traceback."""

import json
import os
import shutil

import pytest

from command import TINY, klamp, log_of, process, sets, train
from klamp.train import config as configs
from klamp.train.tasks.task import is_for_evaluation

pytestmark = pytest.mark.usefixtures("as_users_run_it")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run; a test that changes it takes a copy."""
    place = tmp_path_factory.mktemp("runs") / "finished"
    assert train(place, flags=["--quiet"]).code == 0
    return place


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "copied")


@pytest.fixture
def refused(tmp_path):
    """Train with overrides; the sentence that is said instead."""

    def run(*overrides, config=()):
        return train(tmp_path / "run", *overrides, config=config).refusal

    return run


def written(place, content, name="given.yaml"):
    path = place / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# Keys and values.


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("step=3", "unknown key 'step'; did you mean 'steps'?"),
        ("sampling.promts=3", "unknown key 'sampling.promts'; did you mean 'prompts'?"),
        ("model.lora.rnk=3", "unknown key 'model.lora.rnk'; did you mean 'rank'?"),
        ("objective.kl_taget=1", "no setting 'kl_taget'; did you mean 'kl_target'?"),
        ("objective.redction=x", "no setting 'redction'; did you mean 'reduction'?"),
        ("objective.preset=klmp", "unknown preset 'klmp'; did you mean 'klamp'?"),
        ("objective=opnrlhf", "unknown preset 'opnrlhf'; did you mean 'openrlhf'?"),
        ("reward.function=leeky", "unknown reward 'leeky'; did you mean 'leaky'?"),
        ("reward.arguments.bonsu=1", "no argument 'bonsu'; did you mean 'bonus'?"),
    ],
)
def test_a_mistyped_name_gets_the_nearest_right_one(refused, override, said):
    assert said in refused(override)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("objective.kl.gradiant=token", "has no setting 'gradiant'; "),
        ("objective.stages=[{type: ClipScoers}]", "unknown type 'ClipScoers'; "),
        ("objective.stages=[{low: 1}]", "unknown type None; "),
        ("objective.surrogate={type: GSPO}", "unknown type 'GSPO'; "),
        ("objective.kl.control.type=PIContrl", "unknown type 'PIContrl'; "),
        ("objective.kl.estimator=k9", "estimator must be one of k1, k2, k3, abs"),
        ("objective.reduction=mean", "reduction must be one of token_mean, sequence_mean"),
        ("objective.entropy_coef=abc", "entropy_coef must be a finite number, got 'abc'"),
        ("objective=3", "must be a mapping or a preset's name, got 3"),
        ("steps=abc", "steps: input should be a valid integer"),
        ("optimizer.lr=[1]", "optimizer.lr: input should be a valid number, got [1]"),
        ("sampling=3", "sampling: input should be a valid dictionary"),
        ("task.lengths=[1]", "task.lengths must be at least 2, got 1"),
        ("task.lengths=[]", "task.lengths must be between 1 and 12 digits, got []"),
        ("steps", "--set takes key=value such as optimizer.lr=1e-4, got 'steps'"),
        ("steps=[1", "not valid YAML at line 1, column 3"),
        ("model.path=/no/such/model", "model.path: cannot load '/no/such/model' (no such dir"),
        ("model.reference=none", "model.reference: none, but the objective has a KL term"),
        ("model.reference=adapter-off", "model.reference: adapter-off needs model.lora"),
        ("sampling.samples_per_prompt=1", "needs at least 2 samples per group, got group 0"),
    ],
)
def test_a_value_that_cannot_be_is_refused(refused, override, said):
    assert said in refused(override)


def test_a_value_loss_without_a_value_function_is_refused(refused):
    said = refused("objective=trlx", "model.value=none")
    assert said.startswith("model.value: none, but the objective has a value loss; use own or sh")


def test_a_device_that_is_not_here_is_refused(refused):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    said = refused("model.device=cuda")
    assert said.startswith("model.device: cuda is not available here; there is cpu")


def test_a_directory_that_is_no_model_is_refused(refused, tmp_path):
    said = refused(f"model.path={tmp_path}")
    assert said.startswith(f"model.path: cannot load '{tmp_path}' (is it a Hugging Face model?)")


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_names_the_extra(refused, tracker):
    from importlib.util import find_spec

    if find_spec(tracker):
        pytest.skip(f"{tracker} is installed here")
    said = refused(f"tracking.{tracker}=project")
    assert said == f"tracking.{tracker} needs {tracker}; `pip install klamp[{tracker}]`"


# The config file.


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("steps: 3\n  x: 1\n", "{path}: not valid YAML at line 2, column 4: "),
        (
            "seed: 1\nsteps: 1\nseed: 2\n",
            "{path}: the key 'seed' is given twice (line 3); keep one",
        ),
        ("- steps\n", "{path} holds a list, wanted a mapping such as `steps: 60`"),
        ("steps: many\n", "{path}: steps: input should be a valid integer"),
        ("stepps: 3\n", "{path}: unknown key 'stepps'; did you mean 'steps'?"),
        ("1: 2\n", "{path}: "),
        (b"\xff\xfe", "cannot read {path}: not a text file"),
    ],
    ids=["indent", "twice", "list", "word", "mistyped", "number", "bytes"],
)
def test_a_config_file_with_a_mistake_is_refused_by_its_name(tmp_path, content, said):
    path = written(tmp_path, content)
    found = klamp("train", path, "--out", tmp_path / "run").refusal
    assert found.startswith(said.format(path=path))


def test_a_config_file_that_is_not_there_is_refused(tmp_path):
    path = tmp_path / "none.yaml"
    said = klamp("train", path, "--out", tmp_path / "run").refusal
    assert said == f"cannot read {path}: No such file or directory; give the path of a YAML file"
    assert not (tmp_path / "run").exists()


# Prompts.


def prompts(place, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    return ["task.name=file", f"task.file={written(place, chr(10).join(lines), 'p.jsonl')}"]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "{path} has no prompts; wanted lines such as"),
        (["", " "], "{path} has no prompts; wanted lines such as"),
        ([{"prompt": "a"}, "nope"], "{path} line 2 is not JSON ("),
        ([{"prompt": "a"}, "", {"promt": "b"}], "{path} line 3 has no text under `prompt`: "),
        ([{"prompt": "s12="}], "{path} leaves no prompt for evaluation (1 in all, one in ten"),
    ],
    ids=["empty", "blank", "no JSON", "no prompt", "no evaluation"],
)
def test_prompts_with_a_mistake_are_refused_by_file_and_line(refused, tmp_path, rows, said):
    assert not is_for_evaluation("s12=")
    found = refused(*prompts(tmp_path, *rows))
    assert found.startswith(said.format(path=tmp_path / "p.jsonl"))


def test_an_empty_evaluation_file_is_refused(refused, tmp_path):
    empty = written(tmp_path, "", "empty.jsonl")
    some = prompts(tmp_path, {"prompt": "s12="}, {"prompt": "s34="})
    assert refused(*some, f"task.evaluation_file={empty}").startswith(f"{empty} has no prompts")


def test_prompts_that_are_not_there_are_refused(refused, tmp_path):
    said = refused("task.name=file", f"task.file={tmp_path / 'none.jsonl'}")
    assert said.startswith(f"cannot read the prompts of {tmp_path / 'none.jsonl'}: ")


def test_a_task_file_without_its_name_is_refused(refused):
    assert "task.name: file and task.file: PATH go together; give both" in refused("task.name=file")


# Rewards.


def mine(place, body):
    text = f"def f(prompts, completions, **columns):\n    {body}\n"
    return f"reward.function={written(place, text, 'mine.py')}:f"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('boom')", "raised RuntimeError: boom (on 16 completions, the first"),
        ("return [1.0]", "returned 1 scores for 16 completions; wanted one for each, in the same"),
        ("return None", "returned None; wanted a list of 16 numbers"),
        ("return 1.0", "returned 1.0; wanted a list of 16 numbers"),
        ("return ['good'] * len(prompts)", "returned 'good' for completion 0; wanted a number, or"),
    ],
)
def test_a_reward_that_is_none_is_refused_by_its_name(refused, tmp_path, body, said):
    name = f"{tmp_path / 'mine.py'}:f"
    assert refused(mine(tmp_path, body)).startswith(f"the reward function '{name}' {said}")


def test_a_reward_that_is_right_in_evaluation_and_wrong_in_a_step_is_refused(tmp_path):
    # An evaluation has 16 completions, a step 8.
    run = train(tmp_path / "run", mine(tmp_path, "return [1.0] * 16"))
    assert "returned 16 scores for 8 completions" in run.refusal


def test_an_infinite_score_is_refused(refused, tmp_path):
    said = refused(mine(tmp_path, "return [float('inf')] * len(prompts)"))
    assert "scores is inf at row 0; a score must be finite, or NaN where it is missing" in said


def test_a_missing_score_is_refused_where_the_objective_says_so(refused, tmp_path):
    none = mine(tmp_path, "return [None] * len(prompts)")
    assert 'which missing_scores="refuse" forbids' in refused(
        none, "objective.missing_scores=refuse"
    )


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("no_such_module:f", "reward.function: cannot import 'no_such_module': ModuleNotFound"),
        ("none.py:f", "reward.function: cannot import 'none.py': FileNotFoundError"),
        ("klamp.train.rewards:exat", "has no function 'exat'; did you mean 'exact'?"),
    ],
)
def test_a_reward_that_cannot_be_imported_is_refused(refused, function, said):
    assert said in refused(f"reward.function={function}")


# Directories.


def test_an_out_that_holds_a_run_is_refused_and_left_alone(finished):
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}
    said = train(finished).refusal
    assert said.startswith(f"{finished} already holds a run; go on with it by `klamp train --res")
    assert {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()} == before


def test_a_resume_of_what_is_no_run_is_refused(tmp_path):
    for place in (tmp_path, tmp_path / "none"):
        said = klamp("train", "--resume", place).refusal
        assert said == f"{place} is not a run to resume: it has no config.yaml"


@pytest.mark.parametrize("extra", [["other.yaml"], ["--out", "other"]], ids=["config", "out"])
def test_a_resume_takes_neither_a_config_nor_an_out(finished, extra):
    said = klamp("train", *extra, "--resume", finished).refusal
    assert said.startswith(f"--resume {finished} goes on with that run's own config") and (
        f"drop {extra[0]} " in said
    )


def test_a_report_of_what_is_no_run_is_refused(tmp_path):
    for place in (tmp_path, tmp_path / "none"):
        said = klamp("report", place).refusal
        assert said.startswith(f"{place} has no metrics.jsonl: not the directory of a run")


def test_a_run_given_twice_is_refused(finished):
    assert (
        "is given twice; name each run of a report once"
        in klamp("report", finished, finished).refusal
    )


def test_eval_of_a_run_without_a_model_says_how_to_finish_it(copied):
    shutil.rmtree(copied / "model")
    said = klamp("eval", copied).refusal
    assert said == (
        f"{copied} has no model yet: the run is not finished; `klamp train --resume {copied}`"
    )


def test_eval_of_no_model_is_refused(tmp_path):
    assert klamp("eval", tmp_path).refusal.startswith(f"model.path: cannot load '{tmp_path}'")
    assert "cannot load '/no/such/model'" in klamp("eval", "/no/such/model").refusal


def test_eval_refuses_as_train_does(finished):
    assert "did you mean 'steps'?" in klamp("eval", finished, *sets("step=3")).refusal
    assert "cannot read none.yaml" in klamp("eval", finished, "--config", "none.yaml").refusal


def test_an_unknown_preset_names_the_nearest():
    assert klamp("presets", "klmp").refusal == "unknown preset 'klmp'; did you mean 'klamp'?"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["train", "--nope"], "No such option: --nope"),
        (["train", "--threads", "0"], "Invalid value for '--threads'"),
        (["train", "a.yaml", "b.yaml"], "unexpected extra argument"),
        (["report"], "Missing argument"),
        (["eval"], "Missing argument"),
    ],
)
def test_words_that_make_no_command_are_refused_with_the_way_to_help(words, said):
    found = klamp(*words)
    assert found.code == 2 and said in found.err and "-h' for help" in found.err


# As a shell sees it: the exit code, and a stderr with one line.


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sampling.promts=3", "unknown key 'sampling.promts'; did you mean 'prompts'?"),
        ("reward.function=leeky", "unknown reward 'leeky'; did you mean 'leaky'?"),
    ],
    ids=["when the config is read", "when the run is set up"],
)
def test_a_process_refuses_in_one_line_on_stderr(tmp_path, override, said):
    found = process("train", "--out", tmp_path / "run", *sets(*TINY, override))
    assert said in found.refusal


# After a refusal.


def test_a_run_that_was_refused_before_its_first_step_can_be_started_again(tmp_path):
    assert train(tmp_path / "run", "reward.function=leeky").code == 2
    assert train(tmp_path / "run", flags=["-q"]).code == 0
    assert len(log_of(tmp_path / "run")) == 1


def test_a_refused_run_leaves_no_numbered_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert klamp("train", *sets(*TINY, "reward.function=leeky")).code == 2
    assert not os.path.exists("runs") or os.listdir("runs") == []


def test_a_refused_resume_leaves_the_run_as_it_was(copied):
    before = configs.load(copied / "config.yaml")
    assert klamp("train", "--resume", copied, *sets("reward.function=leeky", "steps=2")).code == 2
    assert configs.load(copied / "config.yaml") == before
    assert klamp("train", "--resume", copied, "--quiet", *sets("steps=2")).code == 0


def test_a_resume_with_another_kind_of_objective_is_refused(copied):
    assert klamp("train", "--resume", copied, *sets("steps=2", "objective=trlx")).refusal


def test_a_run_resumed_with_fewer_steps_than_it_has_made_is_done_or_refused(copied):
    assert klamp("train", "--resume", copied, "--quiet", *sets("steps=2")).code == 0
    assert klamp("train", "--resume", copied, *sets("steps=1")).code in (0, 2)


@pytest.mark.parametrize("inner", ["", "inner"])
def test_an_out_that_is_a_file_is_refused(tmp_path, inner):
    assert train(written(tmp_path, "x", "file") / inner).refusal


def test_an_interrupt_says_how_to_go_on(tmp_path):
    said = train(tmp_path / "run", mine(tmp_path, "raise KeyboardInterrupt"))
    assert said.code == 130 and "klamp train --resume" in said.err


def test_a_reward_that_raises_at_length_is_still_one_sentence(refused, tmp_path):
    assert "boom" in refused(mine(tmp_path, "raise ValueError('boom\\nand more')"))


@pytest.mark.parametrize(
    "content",
    ["{[1]: 2}\n", "objective: {preset: klamp, 1: 2}\n", "objective: {preset: [klamp]}\n"],
)
def test_a_key_or_a_name_of_another_kind_is_refused(tmp_path, content):
    assert klamp("train", written(tmp_path, content), "--out", tmp_path / "run").refusal
