"""One picture per scenario: where the runs ended, and how they got there."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#a0522d"]


def family(found: dict, variant: str) -> str:
    """What shares a colour: in the gradient scenario, one gradient from several coefficients."""
    return variant.split(",")[0] if found["scenario"] == "kl-gradient" else variant


def draw(found: dict, path: Path) -> None:
    """Accuracy of every seed on the left; the course of accuracy and KL on the right."""
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "klamp", "svg.fonttype": "path"})
    variants = list(dict.fromkeys(run["variant"] for run in found["runs"]))
    families = list(dict.fromkeys(family(found, variant) for variant in variants))
    figure, (ends, course, kl) = plt.subplots(
        1, 3, figsize=(13, max(3.2, 0.34 * len(variants) + 1.4)), layout="constrained"
    )
    for place, variant in enumerate(variants):
        colour = COLOURS[families.index(family(found, variant)) % len(COLOURS)]
        runs = [run for run in found["runs"] if run["variant"] == variant]
        ends.plot([100 * r["accuracy"] for r in runs], [place] * len(runs), "o", color=colour)
        for run in runs:
            steps = range(1, len(run["course"]["task/accuracy"]) + 1)
            accuracy = [100 * x for x in run["course"]["task/accuracy"]]
            course.plot(steps, accuracy, color=colour, alpha=0.55, linewidth=0.9)
            watched = [max(x, 1e-3) for x in run["course"]["critic/kl"]]
            kl.plot(steps, watched, color=colour, alpha=0.55, linewidth=0.9)
    targets = {run["kl_target"] for run in found["runs"] if run["kl_target"]}
    for target in targets:
        kl.axhline(target, color="#888888", linestyle="--", linewidth=0.8)
    ends.set(yticks=range(len(variants)), yticklabels=variants, xlim=(-2, 102))
    ends.set(xlabel="true accuracy at the end, % (a dot per seed)")
    ends.invert_yaxis()
    ends.grid(axis="x", alpha=0.3)
    course.set(xlabel="step", ylabel="true accuracy of samples, %", ylim=(-2, 102))
    kl.set(xlabel="step", ylabel="KL to the reference (dashed: target)", yscale="log")
    figure.suptitle(found["title"])
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
