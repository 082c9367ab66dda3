"""The scenarios, each a table of variants: a config and what is put over it."""

from dataclasses import dataclass

GRPO = ("sampling.prompts=32", "sampling.samples_per_prompt=8")
LONG = "runs/experiments/recite-reference"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is run, how often, and what the result is to be read for."""

    title: str
    variants: dict[str, tuple[str, tuple[str, ...]]]
    seeds: int = 5
    reading: str = ""
    """What the committed results say; to be read again when they are made again."""


def gradients() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Three gradients × three first coefficients under the adaptive controller, one fixed."""
    found = {}
    for gradient in ("value", "token", "sequence"):
        for coef in (0.1, 0.5, 1.0):
            changes = (f"objective.kl.gradient={gradient}", f"objective.kl_coef={coef}")
            found[f"{gradient}, from {coef}"] = ("configs/kl-gradient.yaml", changes)
        fixed = (*changes[:1], "objective.kl_coef=0.5", "objective.kl_target=null")
        found[f"{gradient}, fixed 0.5"] = ("configs/kl-gradient.yaml", fixed)
    return found


def long_responses() -> dict[str, tuple[str, tuple[str, ...]]]:
    """The three gradients and KL in the reward on responses of 111 tokens."""
    kinds = {
        "value": ("objective.kl.gradient=value",),
        "token": ("objective.kl.gradient=token",),
        "sequence": ("objective.kl.gradient=sequence",),
        "in the reward": ("objective.kl={gradient: value, estimator: k1, where: reward}",),
    }
    return {name: ("configs/kl-gradient-long.yaml", changes) for name, changes in kinds.items()}


def outliers() -> dict[str, tuple[str, tuple[str, ...]]]:
    """PPO with and without clipped scores, GRPO with and without the group's deviation."""
    file = "configs/outliers.yaml"
    kl = "kl_coef: 0.1, kl_target: 1.0, kl_horizon: 512"
    centred = "stages: [{type: NormaliseScores, mean: group, std: null}]"
    return {
        "PPO, scores clipped to ±1": (file, ()),
        "PPO, not clipped": (file, ("objective.cliprange_reward=null",)),
        "GRPO with std, not clipped": (
            file,
            (f"objective={{preset: klamp, score_clip: null, {kl}}}", *GRPO),
        ),
        "GRPO without std, not clipped": (
            file,
            (f"objective={{preset: klamp, score_clip: null, {kl}, {centred}}}", *GRPO),
        ),
    }


def difficulty() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Mask, weights, both, neither."""
    file = "configs/difficulty.yaml"
    return {
        "neither": (file, ("objective.difficulty=null",)),
        "mask": (file, ()),
        "weights": (
            file,
            ("objective.difficulty={low: null, high: null, weigh_difficulty: true}",),
        ),
        "mask and weights": (file, ("objective.difficulty.weigh_difficulty=true",)),
    }


def configs(*names: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Configs as they are."""
    return {name: (f"configs/{name}.yaml", ()) for name in names}


OFF = ("objective.kl=null", "model.reference=copy")

SCENARIOS = {
    "default": Scenario(
        title="The leaky reward: KL held (GRPO, PPO) and off",
        variants={**configs("default", "ppo"), "KL off": ("configs/default.yaml", OFF)},
        reading="A constructed case of reward hacking. With the KL off the reward climbs to 3.1 "
        "and no answer is right; with it held at 0.85 nats the policy learns the task.",
    ),
    "clean": Scenario(
        title="The clean reward, and every system's preset on it",
        variants=configs("clean", "open-instruct", "openrlhf", "roll", "trlx"),
        seeds=3,
        reading="Every preset with its system's defaults. ROLL's has no KL, hence no reference and "
        "0.00; OpenRLHF's is per token; trlx's is not a KL (docs/kl-gradient.md).",
    ),
    "kl-gradient": Scenario(
        title="One KL, three gradients, on a leaky reward", variants=gradients()
    ),
    "kl-gradient-long": Scenario(
        title="The same on responses of 111 tokens", variants=long_responses(), seeds=3
    ),
    "outliers": Scenario(
        title="Two rewards in a hundred are ±100",
        variants=outliers(),
        reading="From 37 %: PPO learns the task with clipped scores and next to nothing without. "
        "GRPO that divides by the group's deviation needs no clip: one outlier spoils its own "
        "group only. Without the deviation it drowns the batch. Nothing falls to 0 here. The "
        "reward's mean and PPO's KL (trlx's watch) are themselves full of outliers.",
    ),
    "difficulty": Scenario(
        title="Prompts of mixed difficulty",
        variants=difficulty(),
        seeds=3,
        reading="The weights learn sooner (34 % of samples right at step 20 against 27 % without, "
        "46 against 41 % at step 30, means of three seeds) and end level within the spread. The "
        "mask gains nothing: a prompt that is always or never right has no advantage under group "
        "normalisation anyway.",
    ),
}
