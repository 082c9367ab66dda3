"""What the commands do. What they refuse is in test_cli_refusals.py."""

import json
import os
import re
import shutil

import pytest

from command import TINY, in_terminal, klamp, log_of, plain, process, sets, train
from klamp import presets
from klamp.inspect import runlog
from klamp.train import config as configs

# DESIGN.md, section 3: in every line of the log, 0.0 when the thing is off.
CONTRACT = {
    "critic/reward_clip_frac",
    "critic/token_reward_clip_frac",
    "critic/advantage_clip_frac",
    "critic/kl",
    "critic/kl_coef",
    "critic/kl_target",
    "critic/score/mean",
    "task/accuracy",
}
COMMANDS = ("train", "report", "eval", "presets")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One finished run of one step, and what was said of it; to be looked at, not to be changed."""
    place = tmp_path_factory.mktemp("runs") / "finished"
    return place, train(place)


@pytest.fixture(scope="module")
def as_a_process(tmp_path_factory):
    """The same, as a shell would start it."""
    place = tmp_path_factory.mktemp("runs") / "process"
    return place, process("train", "--out", place, *sets(*TINY))


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A current directory of one's own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reward_file(place, body):
    path = place / "mine.py"
    path.write_text(f"import math\n\ndef f(prompts, completions, **columns):\n    {body}\n")
    return f"reward.function={path}:f"


# Help.


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_there_is_help_on_everything(command, flag):
    said = klamp(*([command] if command else []), flag)
    assert said.code == 0 and said.err == ""
    assert re.search(rf"Usage: .*{command or ''} \[OPTIONS\]", said.out)
    if command is None:
        assert all(re.search(rf"{name} +\S", said.out) for name in COMMANDS)


def test_every_option_of_train_is_explained():
    text = klamp("train", "--help").out
    for option in ("--set", "--out", "--resume", "--threads", "--quiet"):
        assert re.search(rf"{option}\b.*[A-Z]\w+", text), option


def test_without_a_word_the_help_is_shown():
    said = klamp()
    assert said.code == 2 and "Usage: " in said.out and "train" in said.out


# Presets.


def test_presets_are_listed_with_a_sentence_each():
    lines = klamp("presets").out.splitlines()
    assert [line.split()[0] for line in lines] == list(presets.PRESETS)
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_preset_is_printed_as_yaml_to_paste_under_objective(name, tmp_path):
    said = klamp("presets", name)
    pasted = "objective:\n" + "".join(f"  {line}\n" for line in said.out.splitlines())
    (tmp_path / "pasted.yaml").write_text(pasted)
    assert configs.load(tmp_path / "pasted.yaml").goal == presets.load(name)


# A run.


def test_a_run_leaves_what_the_contract_names(finished):
    place, _ = finished
    assert configs.load(place / "config.yaml") == configs.load(None, TINY)
    assert [line["step"] for line in log_of(place)] == [1]
    assert (place / "checkpoints" / "LATEST").read_text() == "step-000001\n"
    assert (place / "report.html").stat().st_size > 10_000
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(
        os.listdir(place / "model")
    )
    assert [e.step for e in runlog.read(place).evaluations] == [0, 1]


def test_a_run_says_what_it_is_then_plain_lines_then_three_last_ones(finished):
    place, said = finished
    assert said.code == 0 and said.err == ""
    headline, step, *last = said.out.splitlines()
    assert headline == f"klamp: builtin on sort, reward leaky, 1 steps of 2 × 4 samples → {place}"
    assert step.startswith("step 1/1  accuracy ") and "held out" in step and "tokens/s" in step
    assert len(last) == 3


def test_the_last_lines_agree_with_the_log(finished):
    place, said = finished
    improved, where, onwards = said.out.splitlines()[-3:]
    before, after = (e.metrics for e in runlog.read(place).evaluations)
    shown = [
        f"{100 * x:.1f} %"
        for name in ("eval/accuracy", "eval/accuracy_greedy")
        for x in (before[name], after[name])
    ]
    reward = log_of(place)[0]["metrics"]["critic/score/mean"]
    assert improved == (
        f"true accuracy {shown[0]} → {shown[1]} sampled, {shown[2]} → {shown[3]} greedy; "
        f"reward {reward:.2f} → {reward:.2f}"
    )
    assert where.startswith(f"run in {place}: report.html")
    assert "`make train-contrast`" in onwards


def test_quiet_says_nothing(tmp_path):
    said = train(tmp_path / "run", flags=["--quiet"])
    assert (said.code, said.out, said.err) == (0, "", "")
    assert (tmp_path / "run" / "report.html").exists()


def test_a_process_says_the_same_and_nothing_on_stderr(finished, as_a_process):
    (here, said), (there, other) = finished, as_a_process
    assert other.code == 0 and other.err == ""

    def comparable(text, place):
        return re.sub(r"\d+ tokens/s", "", text.replace(str(place), "RUN"))

    assert comparable(other.out, there) == comparable(said.out, here)


def test_a_process_writes_the_same_log(finished, as_a_process):
    """With the shape checks of our tests and without: the same numbers, timings aside."""

    def comparable(place):
        return [
            {k: v for k, v in line["metrics"].items() if not k.startswith("time/")}
            for line in log_of(place)
        ]

    assert comparable(finished[0]) == comparable(as_a_process[0])


def test_in_a_terminal_there_is_a_live_view(tmp_path):
    said = in_terminal("train", "--out", tmp_path / "run", *sets(*TINY))
    text = plain(said.out)
    assert said.code == 0 and "\x1b[" in said.out and "Traceback" not in text
    assert "starting: the policy is evaluated" in text and "step 1/1" in text
    assert "0:00 left" in text and "KL to the reference" in text
    assert text.rstrip().splitlines()[-3].startswith("true accuracy")


def test_without_an_out_runs_are_numbered_by_the_name_of_their_config(elsewhere):
    (elsewhere / "mine.yaml").write_text("reward: {function: exact}\n")
    said = [klamp("train", "mine.yaml", "--quiet", *sets(*TINY)) for _ in range(2)]
    said.append(klamp("train", "--quiet", *sets(*TINY)))
    assert [s.code for s in said] == [0, 0, 0]
    assert sorted(os.listdir("runs")) == ["default-1", "mine-1", "mine-2"]


def test_threads_are_part_of_the_config(tmp_path):
    klamp("train", "--threads", "1", "--quiet", "--out", tmp_path / "run", *sets(*TINY[:-1]))
    assert configs.load(tmp_path / "run" / "config.yaml").threads == 1


def test_a_run_can_be_made_longer(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    said = klamp("train", "--resume", tmp_path / "run", "--set", "steps=2")
    assert said.code == 0
    longer = log_of(tmp_path / "run")
    assert [line["step"] for line in longer] == [1, 2] and longer[0] == log_of(finished[0])[0]


# The metrics that others rely on.


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["objective.kl=null"],
        ["objective=trlx", "sampling.samples_per_prompt=1"],
        ["objective=roll", "reward.function=exact"],
    ],
    ids=["default", "no KL", "PPO", "ROLL"],
)
def test_every_line_has_the_names_of_the_contract(overrides, tmp_path):
    assert train(tmp_path / "run", "steps=2", *overrides, flags=["-q"]).code == 0
    lines = log_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert set(line) == {"step", "seconds", "metrics"} and line["seconds"] > 0
        assert line["metrics"].keys() >= CONTRACT
        assert all(isinstance(x, float) for x in line["metrics"].values())
    if "objective.kl=null" in overrides:
        off = {"critic/kl", "critic/kl_coef", "critic/kl_target"}
        assert all(line["metrics"][name] == 0.0 for line in lines for name in off)


def test_a_task_without_answers_has_the_names_too_and_no_accuracy_to_report(tmp_path):
    rows = "".join(json.dumps({"prompt": f"s{i}="}) + "\n" for i in range(100, 160))
    (tmp_path / "prompts.jsonl").write_text(rows)
    mine = reward_file(tmp_path, "return [float(len(c)) for c in completions]")
    task = ["task.name=file", f"task.file={tmp_path / 'prompts.jsonl'}"]
    said = train(tmp_path / "run", *task, mine)
    assert said.code == 0 and "accuracy" not in said.out
    (line,) = log_of(tmp_path / "run")
    assert line["metrics"].keys() >= CONTRACT and "eval/accuracy" not in line["metrics"]


@pytest.mark.parametrize("missing", ["None", "math.nan"])
def test_a_score_that_is_missing_for_some_is_counted_and_the_run_goes_on(tmp_path, missing):
    # Two prompts of four samples a step; every second one has no score.
    mine = reward_file(tmp_path, f"return [{missing} if i % 2 else i for i in range(len(prompts))]")
    said = train(tmp_path / "run", "steps=2", mine)
    assert said.code == 0
    for line in log_of(tmp_path / "run"):
        assert line["metrics"]["signal/missing_scores"] == 4.0
        assert line["metrics"]["critic/score/mean"] == 3.0  # of 0, 2, 4, 6


def test_tensorboard_has_what_the_log_has(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train(tmp_path / "run", "tracking.tensorboard=true", flags=["-q"]).code == 0
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    (line,) = log_of(tmp_path / "run")
    assert set(found.Tags()["scalars"]) == set(line["metrics"])
    for name, value in line["metrics"].items():
        (event,) = found.Scalars(name)
        assert (event.step, event.value) == (1, pytest.approx(value, rel=1e-6))


# Eval and report.


def test_eval_of_a_run_is_its_last_evaluation(finished):
    place, _ = finished
    said = klamp("eval", place, "--json")
    assert said.code == 0 and json.loads(said.out) == runlog.read(place).evaluations[-1].metrics


def test_eval_of_the_builtin_is_the_evaluation_before_training(finished):
    place, _ = finished
    said = klamp("eval", "builtin", "--config", place / "config.yaml", "--json")
    assert json.loads(said.out) == runlog.read(place).evaluations[0].metrics


def test_eval_prints_a_line_for_each_metric(finished):
    place, _ = finished
    found = dict(line.split() for line in klamp("eval", place).out.splitlines())
    last = runlog.read(place).evaluations[-1].metrics
    assert found == {name: f"{value:.4f}" for name, value in last.items()}


def test_eval_takes_another_task_and_fewer_prompts(finished):
    place, _ = finished
    said = klamp("eval", place, "--prompts", "3", "--json", *sets("task.name=reverse"))
    share = json.loads(said.out)["eval/accuracy"] * 3
    assert share == pytest.approx(round(share))


def test_eval_leaves_stray_rewards_out(finished):
    clean = klamp("eval", "builtin", "--prompts", "8", "--json")
    stray = klamp(
        "eval", "builtin", "--prompts", "8", "--json", *sets("reward.outliers.fraction=1")
    )
    assert clean.out == stray.out and clean.code == 0


@pytest.mark.parametrize(
    "settings", [["model.lora={}", "model.reference=adapter-off"], ["model.value=own"]]
)
def test_eval_needs_nothing_but_the_policy(settings):
    plain_one = klamp("eval", "builtin", "--prompts", "8", "--json")
    found = klamp("eval", "builtin", "--prompts", "8", "--json", *sets(*settings))
    assert found.code == 0 and found.out == plain_one.out


def test_eval_makes_no_file(finished, elsewhere):
    before = sorted(finished[0].rglob("*"))
    assert klamp("eval", finished[0]).code == 0
    assert os.listdir(elsewhere) == [] and sorted(finished[0].rglob("*")) == before


def test_report_says_what_it_wrote(finished, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(finished[0], tmp_path / name)
        (tmp_path / name / "report.html").unlink()
    said = klamp("report", tmp_path / "a")
    assert (said.code, said.out) == (0, f"wrote {tmp_path / 'a' / 'report.html'}\n")
    assert klamp("report", tmp_path / "b", tmp_path / "a").code == 0
    assert (tmp_path / "b" / "report.html").exists()
