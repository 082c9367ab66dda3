"""``load``: names, settings, and the defaults that the seeds have."""

import pytest

from klamp import presets
from klamp.errors import ConfigError
from klamp.objective.advantages import GAE, Returns
from klamp.objective.control import AdaptiveKL, FixedKL


def test_an_unknown_name_or_setting_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown preset 'verl'; one of open-instruct, openrlhf"):
        presets.load("verl")
    with pytest.raises(
        ConfigError, match=r"'trlx' has no setting 'beta'; one of init_kl_coef, tar"
    ):
        presets.load("trlx", beta=0.1)


def test_open_instruct_defaults():
    o = presets.load("open-instruct")
    assert (o.stages[0].mean, o.stages[0].std) == ("group", None)
    assert (o.surrogate.low, o.surrogate.high) == (0.2, 0.272)
    assert (o.kl.estimator, o.kl.where, o.kl.clamp_log_ratio) == ("k3", "loss", 40.0)
    assert o.kl.control == FixedKL(coef=0.05)
    assert o.reduction == "token_mean"


def test_openrlhf_defaults_and_the_target_that_makes_it_adaptive():
    o = presets.load("openrlhf")
    assert isinstance(o.advantage.estimator, GAE)
    assert (o.kl.estimator, o.kl.where, o.kl.clamp_value) == ("k1", "reward", 10.0)
    assert o.kl.control == FixedKL(coef=0.01)
    assert (o.stages[-1].low, o.stages[-1].high) == (-10.0, 10.0)
    adaptive = presets.load("openrlhf", kl_target=6.0).kl.control
    assert adaptive == AdaptiveKL(init_coef=0.01, target=6.0, horizon=10_000)
    assert isinstance(presets.load("openrlhf", estimator="rloo").advantage.estimator, Returns)


def test_roll_defaults():
    o = presets.load("roll")
    assert (o.stages[0].mean, o.stages[0].std) == ("group", "group")
    assert (o.stages[1].low, o.stages[1].high) == (-10.0, 10.0)
    assert (o.advantage.reward_clip, o.advantage.clip) == (10.0, 2.0)
    assert (o.difficulty.low, o.difficulty.high) == (0.1, 0.95)
    assert not o.difficulty.weigh_difficulty
    for level in ("batch", "group", "running", None):
        free = presets.load("roll", adv_estimator="reinforce", norm_mean_type=level)
        assert len(free.stages) == (1 if level is None else 2)


def test_trlx_defaults():
    o = presets.load("trlx")
    assert o.kl.control == AdaptiveKL(init_coef=0.05, target=6.0, horizon=10_000)
    assert (o.kl.watched, o.kl.watch_reduction) == ("k3_reversed", "sequence_sum")
    assert (o.stages[0].low, o.stages[0].high) == (-10.0, 10.0)
    assert presets.load("trlx", target=None).kl.control == FixedKL(coef=0.05)


def test_klamp_defaults():
    o = presets.load("klamp")
    assert [type(s).__name__ for s in o.stages] == ["ClipScores", "NormaliseScores"]
    assert (o.kl.estimator, o.kl.gradient, o.kl.where) == ("k3", "sequence", "loss")
    assert (o.kl.clamp_log_ratio, o.kl.clamp_gradient) == (20.0, "pass")
    assert isinstance(o.kl.control, AdaptiveKL)
    assert (o.reduction, o.entropy_coef) == ("token_mean", None)
    assert o.surrogate.high > o.surrogate.low
    assert (o.correction.level, o.correction.action) == ("token", "truncate")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("open-instruct", {"kl_estimator": 4}, r"kl_estimator must be 0, 1, 2 or 3, got 4"),
        ("open-instruct", {"loss_fn": "ppo"}, r"loss_fn must be dapo or cispo, got 'ppo'"),
        ("openrlhf", {"estimator": "grpo"}, r"estimator must be one of gae, reinforce, rloo"),
        (
            "openrlhf",
            {"is_correction_enable": True, "is_correction_type": "x"},
            r"must be tis, icepop or seq",
        ),
        ("roll", {"adv_estimator": "ppo"}, r"adv_estimator must be one of grpo, gae, reinforce"),
        ("roll", {"add_token_level_kl": True, "use_kl_loss": True}, r"one objective has one KL"),
        (
            "roll",
            {"loss_agg_mode": "seq-mean-token-sum-norm"},
            r"response_length=None; give the longest",
        ),
        ("trlx", {"scale_reward": "std"}, r"scale_reward must be running, ref or None"),
    ],
)
def test_wrong_settings_are_refused(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        presets.load(name, **settings)
