"""A run directory as the trainer would have left it, with curves as a real run has them."""

import math
import random

from klamp.inspect import runlog
from klamp.inspect.runlog import Completion, Evaluation, Step

CONFIG = """\
seed: {seed}
steps: {steps}
task:
  name: addition
  digits: 3
reward: leaky
model: tiny-gpt
sampling: {{temperature: 1.0, max_tokens: 48}}
objective:
  type: Objective
  stages:
  - {{type: ClipScores, low: -10.0, high: 10.0}}
  - {{type: NormaliseScores, mean: group, std: group}}
  kl:
    type: KLTerm
    estimator: k3
    gradient: {gradient}
    control: {{type: AdaptiveKL, init_coef: 0.05, target: 6.0, horizon: 10000}}
  reduction: token_mean
optimizer: {{lr: 1.0e-05, weight_decay: 0.0}}
"""


def write_run(path, *, steps=60, every=15, seed=0, gradient="sequence", extra=None):
    """``extra(step)`` gives further metrics of a step, or other values of these."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(CONFIG.format(seed=seed, steps=steps, gradient=gradient))
    noise, beta = random.Random(seed), 0.05
    for step in range(1, steps + 1):
        metrics = fake_metrics(step, steps, noise, beta)
        beta *= 1 + 0.1 * max(-0.2, min(0.2, metrics["critic/kl"] / 6.0 - 1))
        metrics |= extra(step) if extra else {}
        runlog.append(path, Step(step=step, seconds=2.1 + noise.random() / 3, metrics=metrics))
    for step in sorted({*range(0, steps + 1, every), steps}) if every else ():
        runlog.write_evaluation(path, fake_evaluation(step, steps, noise))
    return path


def learned(step, steps):
    """0 at the start, towards 1 at the end."""
    return 1 - math.exp(-4 * step / max(steps, 1))


def fake_metrics(step, steps, noise, beta):
    done, wobble = learned(step, steps), lambda size: noise.gauss(0, size)
    spike = 4.0 if step == 37 else 0.0
    clipped = abs(wobble(0.004)) + 0.012 * done
    kl = max(0.02, 6.6 * done - 0.8 * done**6 + wobble(0.25))
    return {
        "task/accuracy": min(1, max(0, 0.08 + 0.8 * done + wobble(0.03))),
        "critic/score/mean": 0.15 + 0.9 * done + wobble(0.03),
        "critic/shaped_score/mean": wobble(0.01),
        "critic/kl": kl,
        "critic/kl_per_sequence": kl,
        "critic/kl_per_token": kl / 20,
        "critic/kl_target": 6.0,
        "critic/kl_coef": beta,
        "critic/reward_clip_frac": 0.0,
        "critic/token_reward_clip_frac": 0.0,
        "critic/advantage_clip_frac": 0.0,
        "critic/kl_clamp_frac": 0.0,
        "actor/kl_clamp_frac": 0.0002 * done,
        "actor/clip_frac": clipped,
        "actor/clip_frac_low": clipped * 0.3,
        "actor/clip_frac_high": clipped * 0.7,
        "actor/dual_clip_frac": 0.0,
        "actor/ratio_clamp_frac": 0.0,
        "actor/sampler_truncated_frac": abs(wobble(0.002)),
        "response/truncated_frac": max(0, 0.06 - 0.05 * done + wobble(0.006)),
        "response/length_mean": 18 + 7 * done + wobble(0.6),
        "critic/advantages/mean": wobble(0.01),
        "critic/advantages/abs_mean": 0.8 - 0.35 * done + wobble(0.03),
        "critic/advantages/max": 2.4 + wobble(0.2),
        "critic/advantages/min": -2.2 + wobble(0.2),
        "actor/ratio_mean": 1 + wobble(0.002),
        "actor/ratio_max": 1.4 + abs(wobble(0.3)) + spike,
        "actor/ratio_min": 0.7 - abs(wobble(0.1)),
        "actor/entropy": 1.9 - 1.3 * done + wobble(0.03),
        "actor/pg_loss": wobble(0.02),
        "actor/kl_loss": beta * kl / 20,
        "actor/grad_norm": 0.6 + abs(wobble(0.15)) + spike,
        "actor/lr": 1e-5 * min(1, step / 10),
        "actor/old_kl": 1e-4 * abs(wobble(1)),
        "actor/skipped_steps": 0.0,
        "signal/groups": 16.0,
        "signal/groups_effective": float(round(15 - 8 * done + wobble(1))),
        "signal/groups_effective_frac": min(1, 0.95 - 0.5 * done + wobble(0.04)),
        "signal/missing_scores": 0.0,
        "time/tokens_per_second": 1450 + wobble(40),
        "time/sample_seconds": 1.3 + abs(wobble(0.05)),
        "time/update_seconds": 0.7 + abs(wobble(0.03)),
    }


def fake_evaluation(step, steps, noise):
    done = learned(step, steps)
    samples = tuple(sample(i, done, noise) for i in range(12))
    metrics = {
        "eval/accuracy": 0.07 + 0.78 * done,
        "eval/accuracy_greedy": 0.09 + 0.83 * done,
        "eval/score": 0.14 + 0.9 * done,
        "eval/length": 18.0 + 7 * done,
    }
    return Evaluation(step=step, metrics=metrics, samples=samples)


def sample(index, done, noise):
    """The prompt depends on the index alone, the completion on how much was learned."""
    a, b = 113 + 37 * index, 268 + 51 * index
    correct = noise.random() < 0.05 + 0.85 * done
    given = a + b if correct else a + b - noise.randint(1, 40)
    thought = f"Let me add {a} and {b}.\n" if noise.random() < 0.7 else "Well, well, well. "
    return Completion(
        prompt=f"What is {a} + {b}?",
        completion=f"{thought}The answer is {given}.",
        answer=str(a + b),
        score=round(0.2 + 0.8 * correct + 0.1 * done, 2),
        correct=correct,
    )
