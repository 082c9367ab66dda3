"""Every recorded call of the four seed systems: equal where upstream is finite; always finite."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from klamp.objective.reduce import shares, weighted_sum
from klamp.presets import open_instruct, openrlhf, roll, trlx

DATA = np.load(Path(__file__).with_name("seeds.npz"))
CASES = json.loads(bytes(DATA["index"]).decode())


def load(case, kind):
    return {n: torch.tensor(DATA[f"{case['id']}/{kind}/{n}"]) for n in case[f"{kind}"]}


def grad(value, x):
    return torch.autograd.grad(value.sum(), x)[0]


def estimate_kl(x):
    return {"kl": open_instruct.estimate_kl(**x)}


def grpo_loss(x, *, beta, aggregate, **settings):
    mask = x.pop("mask").bool()
    x["logprobs"].requires_grad_()
    policy, clipped, kl = open_instruct.grpo_loss(**x, **settings)
    loss = weighted_sum(policy + beta * kl, shares(mask))
    found = {"policy_loss": policy, "clipped": clipped, "kl": kl, "loss": loss}
    return found | {"grad": grad(loss, x["logprobs"])}


def approx_kl(module):
    def run(x, **settings):
        x["log_probs"].requires_grad_()
        kl = module.compute_approx_kl(**x, **settings)
        return {"kl": kl, "grad": grad(kl, x["log_probs"])}

    return run


def policy_loss(x, **settings):
    x["log_probs"].requires_grad_()
    loss, clip_ratio, ppo_kl, _ = openrlhf.PolicyLoss(**settings)(**x)
    found = {"loss": loss, "clip_ratio": clip_ratio, "ppo_kl": ppo_kl}
    return found | {"grad": grad(loss, x["log_probs"])}


def value_loss(x, **settings):
    x["values"].requires_grad_()
    loss = openrlhf.ValueLoss(**settings)(**x)
    return {"loss": loss, "grad": grad(loss, x["values"])}


def pair(function):
    def run(x, **settings):
        return dict(zip(("advantages", "returns"), function(**x, **settings), strict=True))

    return run


def running_norm(x, **settings):
    ctrl = {"domain": roll.RunningMoments()}
    found = {
        f"normalised_{i}": roll.reward_norm(rewards, running_ctrl=ctrl, **settings)
        for i, rewards in enumerate(x.values())
    }
    state = ctrl["domain"]
    return found | {k: torch.tensor(getattr(state, k)) for k in ("mean", "std", "count")}


def clip_fraction(x, *, clip_max, clip_min):
    fraction = roll.compute_clip_fraction(**x, clip_max=clip_max, clip_min=clip_min)
    return {"fraction": fraction, "clipped": x["values"].clamp(clip_min, clip_max)}


def adaptive(x, *, n_steps, **settings):
    controller = trlx.AdaptiveKLController(**settings)
    values = []
    for current in x["current"].tolist():
        controller.update(current, n_steps)
        values.append(controller.value)
    return {"values": torch.tensor(values)}


def rollout_kl(x):
    return dict(zip(("kl", "mean_kl_per_token", "mean_kl"), trlx.rollout_kl(**x), strict=True))


def running_moments(x):
    running = trlx.RunningMoments()
    rows = [(*running.update(xs), running.mean, running.std) for xs in x.values()]
    return {"per_update": torch.tensor(rows)}


def ppo_loss(x, **settings):
    x["logprobs"].requires_grad_()
    x["values"].requires_grad_()
    loss, stats = trlx.ppo_loss(**x, **settings)
    by_logprobs, by_values = torch.autograd.grad(loss, (x["logprobs"], x["values"]))
    return {
        "loss": loss,
        "policy_loss": torch.tensor(stats["losses/policy_loss"]),
        "value_loss": torch.tensor(stats["losses/value_loss"]),
        "clipfrac": torch.tensor(stats["policy/clipfrac"]),
        "approx_kl": torch.tensor(stats["policy/approx_kl"]),
        "grad_logprobs": by_logprobs,
        "grad_values": by_values,
    }


def named(name, function):
    return lambda x, **settings: {name: function(**x, **settings)}


def trlx_gae(x, **settings):
    length = x["values"].shape[1]
    return pair(trlx.get_advantages_and_returns)(x, response_length=length, **settings)


FUNCTIONS = {
    ("open_instruct", "estimate_kl"): estimate_kl,
    ("open_instruct", "grpo_loss"): grpo_loss,
    ("openrlhf", "compute_approx_kl"): approx_kl(openrlhf),
    ("openrlhf", "compute_reward"): named("reward", openrlhf.compute_reward),
    ("openrlhf", "PolicyLoss"): policy_loss,
    ("openrlhf", "ValueLoss"): value_loss,
    ("openrlhf", "get_advantages_and_returns"): pair(openrlhf.get_advantages_and_returns),
    ("openrlhf", "get_cumulative_returns"): named("returns", openrlhf.get_cumulative_returns),
    ("roll", "compute_approx_kl"): approx_kl(roll),
    ("roll", "reward_norm"): named("rewards", roll.reward_norm),
    ("roll", "reward_norm_running"): running_norm,
    ("roll", "compute_clip_fraction"): clip_fraction,
    ("roll", "difficulty_mask"): named("mask", roll.difficulty_mask),
    ("roll", "compute_sample_weights"): named("weights", roll.compute_sample_weights),
    ("roll", "agg_loss"): named("loss", roll.agg_loss),
    ("roll", "masked_whiten"): named("whitened", roll.masked_whiten),
    ("roll", "compute_gae_advantage_return"): pair(roll.compute_gae_advantage_return),
    ("roll", "compute_reinforce_return"): pair(roll.compute_reinforce_return),
    ("trlx", "AdaptiveKLController"): adaptive,
    ("trlx", "rollout_kl"): rollout_kl,
    ("trlx", "RunningMoments"): running_moments,
    ("trlx", "get_advantages_and_returns"): trlx_gae,
    ("trlx", "PPOConfig.loss"): ppo_loss,
}


def test_there_are_as_many_cases_as_were_recorded():
    assert len(CASES) == 638
    assert {(c["system"], c["function"]) for c in CASES} == set(FUNCTIONS)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['id']}-{c['system']}-{c['function']}")
def test_equal_to_upstream(case):
    function = FUNCTIONS[case["system"], case["function"]]
    found = function(load(case, "inputs"), **case["kwargs"])
    expected = load(case, "outputs")
    assert set(expected) <= set(found)
    for name, want in expected.items():
        got = found[name].detach()
        finite = want.isfinite()
        assert got.isfinite().all(), f"{name} is not finite"
        assert got.shape == want.shape, name
        # The recorded calls are float32, so this is the accuracy they have themselves.
        torch.testing.assert_close(
            got[finite].double(),
            want[finite].double(),
            rtol=1e-4,
            atol=1e-5,
            msg=name,
        )
