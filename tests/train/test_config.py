import copy
from pathlib import Path

import pytest
from pydantic import ValidationError

from klamp import presets
from klamp.errors import ConfigError
from klamp.objective.objective import Objective
from klamp.train import config as configs
from klamp.train import yamlfile
from klamp.train.config import Config, load, overridden
from klamp.train.settings import LoraSettings, Outliers

FILES = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def refusal(*overrides, path=None):
    with pytest.raises(ConfigError) as said:
        load(path, overrides)
    return str(said.value)


def test_there_are_configs_to_check():
    assert {"default", "ppo", "clean", "outliers"} <= {path.stem for path in FILES}


def test_the_packaged_default_is_the_file_in_configs():
    shown = next(path for path in FILES if path.stem == "default")
    assert configs.DEFAULT.read_bytes() == shown.read_bytes()
    assert load() == load(shown)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_config_is_read_back_from_what_is_written_into_its_run(path, tmp_path):
    config = load(path)
    (tmp_path / "config.yaml").write_text(configs.dump(config))
    again = load(tmp_path / "config.yaml")
    assert again == config and again.goal == config.goal


def test_an_empty_file_is_the_config_of_all_defaults(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    assert load(tmp_path / "empty.yaml") == Config()
    assert Config().goal == presets.load("klamp")


def test_what_is_written_is_fully_resolved():
    written = yamlfile.parse(configs.dump(load()))
    assert list(written) == list(Config.model_fields)
    for name, field in Config.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            assert list(written[name]) == list(field.annotation.model_fields)
    assert "preset" not in written["objective"]
    assert Objective.from_dict(written["objective"]) == load().goal


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_preset_as_printed_can_be_pasted_under_objective(name, tmp_path):
    path = tmp_path / "pasted.yaml"
    path.write_text(yamlfile.dump({"objective": presets.load(name).to_dict()}))
    assert load(path).goal == presets.load(name)


def test_a_config_cannot_be_changed():
    with pytest.raises(ValidationError):
        load().steps = 3
    with pytest.raises(ValidationError):
        load().sampling.prompts = 3


@pytest.mark.parametrize(
    ("override", "found", "value"),
    [
        ("steps=3", lambda c: c.steps, 3),
        ("optimizer.lr=1e-4", lambda c: c.optimizer.lr, 1e-4),
        ("optimizer.max_grad_norm=null", lambda c: c.optimizer.max_grad_norm, None),
        ("optimizer.betas=[0.8, 0.9]", lambda c: c.optimizer.betas, (0.8, 0.9)),
        ("task.lengths=[3,4]", lambda c: c.task.lengths, (3, 4)),
        ("reward.arguments.written=a=b", lambda c: c.reward.arguments, {"written": "a=b"}),
        ("reward.outliers.size=5", lambda c: c.reward.outliers, Outliers(size=5.0)),
        ("model.lora={}", lambda c: c.model.lora, LoraSettings()),
        ("model.lora.rank=3", lambda c: c.model.lora, LoraSettings(rank=3)),
        ("objective.kl=null", lambda c: c.goal.kl, None),
        ("objective.kl.control.target=2", lambda c: c.goal.kl.control.target, 2),
        ("objective=trlx", lambda c: c.goal, presets.load("trlx")),
    ],
)
def test_an_override_is_put_in_its_place_and_changes_nothing_else(override, found, value):
    config, before = load(None, [override]), load()
    assert found(config) == value != found(before)
    section = override.partition("=")[0].split(".")[0]
    others = set(Config.model_fields) - {section}
    assert config.model_dump(include=others) == before.model_dump(include=others)


def test_a_mapping_is_put_in_place_of_what_was_there():
    data = {"reward": {"arguments": {"bonus": 1.0, "written": "8"}}}
    found = overridden(data, "reward.arguments={bonus: 2.0}")
    assert found == {"reward": {"arguments": {"bonus": 2.0}}}


def test_the_last_override_of_a_key_wins():
    assert load(None, ["steps=3", "seed=1", "steps=4"]).steps == 4


def test_an_override_goes_into_a_preset_that_is_given_by_its_name(tmp_path):
    path = tmp_path / "named.yaml"
    path.write_text("objective: trlx\n")
    wanted = presets.load("trlx", target=1.0)
    assert load(path, ["objective.target=1.0"]).goal == wanted


def test_an_override_leaves_its_input_alone():
    data = {"sampling": {"prompts": 2, "top_k": 3}, "seed": 0}
    before = copy.deepcopy(data)
    found = overridden(data, "sampling.prompts=5")
    assert found == {"sampling": {"prompts": 5, "top_k": 3}, "seed": 0}
    assert data == before


@pytest.mark.parametrize("override", ["nonsense", "=3", "a..b=3", ".a=3", "a.=3", ""])
def test_an_override_without_a_key_or_a_value_is_refused(override):
    said = refusal(override)
    assert said == f"--set takes key=value such as optimizer.lr=1e-4, got {override!r}"


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("step=3", "steps"),
        ("optimiser.lr=3", "optimizer"),
        ("sampling.promts=3", "prompts"),
        ("sampling.samples_per_promt=3", "samples_per_prompt"),
        ("evaluation.evry=3", "every"),
        ("reward.fnction=exact", "function"),
        ("reward.outliers.fractoin=0.1", "fraction"),
        ("model.lora.rnk=3", "rank"),
        ("tracking.tensorbord=true", "tensorboard"),
        ("objective.preset=klmp", "klamp"),
        ("objective=klmp", "klamp"),
        ("objective.kl_taget=1", "kl_target"),
    ],
)
def test_a_mistyped_key_names_the_nearest_right_one(override, meant):
    assert f"did you mean '{meant}'?" in refusal(override)


def test_a_mistyped_key_is_named_with_its_place():
    assert "unknown key 'sampling.promts'; did" in refusal("sampling.promts=3")
    assert "unknown key 'reward.outliers.fractoin'; did" in refusal("reward.outliers.fractoin=1")


def test_a_key_near_nothing_gets_all_that_there_are():
    assert "one of seed, steps, task, reward" in refusal("zzz=1")
    assert "one of prompts, samples_per_prompt, max_new_tokens" in refusal("sampling.zzz=1")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("steps=abc", "steps: input should be a valid integer, unable to parse string as an"),
        ("steps=1.5", "steps: input should be a valid integer"),
        ("steps=null", "steps: input should be a valid integer, got None"),
        ("steps=0", "steps: input should be greater than or equal to 1, got 0"),
        ("threads=0", "threads: input should be greater than or equal to 1, got 0"),
        ("max_skipped=0", "max_skipped: input should be greater than or equal to 1, got 0"),
        ("sampling.prompts=0", "sampling.prompts: input should be greater than or equal to 1"),
        ("sampling.temperature=0", "sampling.temperature: input should be greater than 0, got 0"),
        ("sampling.top_p=0", "sampling.top_p: input should be greater than 0, got 0"),
        ("sampling.top_p=1.1", "sampling.top_p: input should be less than or equal to 1, got 1.1"),
        ("sampling.top_k=0", "sampling.top_k: input should be greater than or equal to 1, got 0"),
        ("optimizer.lr=hello", "optimizer.lr: input should be a valid number"),
        ("optimizer.lr=0", "optimizer.lr: input should be greater than 0, got 0"),
        ("optimizer.lr=.inf", "optimizer.lr: input should be a finite number, got inf"),
        ("optimizer.lr=.nan", "optimizer.lr: input should be a finite number, got nan"),
        ("optimizer.betas=[0.9, 0.9, 0.9]", "optimizer.betas: tuple should have at most 2 items"),
        ("optimizer.max_grad_norm=0", "optimizer.max_grad_norm: input should be greater than 0"),
        ("optimizer.epochs=0", "optimizer.epochs: input should be greater than or equal to 1"),
        ("optimizer.schedule=cosin", "optimizer.schedule: input should be 'constant', 'linear' or"),
        ("evaluation.every=0", "evaluation.every: input should be greater than or equal to 1"),
        ("evaluation.prompts=0", "evaluation.prompts: input should be greater than or equal to 1"),
        ("checkpoints.keep=0", "checkpoints.keep: input should be greater than or equal to 1"),
        ("reward.outliers.fraction=2", "reward.outliers.fraction: input should be less than or"),
        ("task.name=sorting", "task.name: input should be 'sort', 'reverse', 'add', 'recite' or"),
        ("task.lengths=6", "task.lengths: input should be a valid tuple, got 6"),
        ("model.device=tpu", "model.device: input should be 'auto', 'cpu', 'cuda' or 'mps'"),
        ("sampling=3", "sampling: input should be a valid dictionary"),
        ("objective=3", "must be a mapping or a preset's name, got 3"),
        ("task.name=file", "task.name: file and task.file: PATH go together; give both"),
        ("task.file=x.jsonl", "task.name: file and task.file: PATH go together; give both"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_key(override, said):
    assert said in refusal(override)


def test_every_mistake_is_named_at_once():
    said = refusal("steps=0", "seed=x", "sampling.promts=1")
    assert "steps: " in said and "seed: " in said and "'sampling.promts'" in said


def test_a_refusal_says_which_file_it_is_about(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("stps: 3\n")
    assert refusal(path=path) == f"{path}: unknown key 'stps'; did you mean 'steps'?"
    assert refusal("stps=3").startswith("the built-in config: ")


def test_names_keep_their_letters(as_users_run_it):
    assert "KLTerm has no setting 'gradiant'" in refusal("objective.kl.gradiant=token")


@pytest.mark.parametrize("override", ["objective=3", "objective=klmp"])
def test_what_was_given_is_said_once(override):
    said, given = refusal(override), override.partition("=")[2]
    assert said.count(given) == 1


def test_an_override_that_is_bad_yaml_is_named():
    assert "steps=[1" in refusal("seed=1", "steps=[1")


def test_an_evaluation_file_for_a_built_in_task_is_refused():
    assert "evaluation_file" in refusal("task.evaluation_file=held_out.jsonl")
