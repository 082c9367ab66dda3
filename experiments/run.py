"""Run scenarios over seeds and write docs/results/NAME.json, NAME.svg and README.md.

    python -m experiments.run                 # all of them: hours
    python -m experiments.run outliers        # one
    python -m experiments.run --plots         # only draw what is there already

Runs stay in runs/experiments/, so that what was interrupted goes on where it was.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from experiments import plots
from experiments.runs import Job, commit, run_all, write_json
from experiments.scenarios import LONG, SCENARIOS, Scenario

RESULTS, SCRATCH = Path("docs/results"), Path("runs/experiments")


def run(name: str, scenario: Scenario, seeds: int) -> None:
    """One scenario, every variant under every seed."""
    if name == "kl-gradient-long":
        make_long_reference()
    made_with = commit()
    jobs = [
        Job(variant=variant, config=config, overrides=overrides, seed=seed)
        for seed in range(seeds)
        for variant, (config, overrides) in scenario.variants.items()
    ]
    runs = run_all(jobs, SCRATCH / name)
    RESULTS.mkdir(parents=True, exist_ok=True)
    found = {
        "scenario": name,
        "title": scenario.title,
        "command": f"python -m experiments.run {name} --seeds {seeds}",
        "commit": made_with,
        "runs": runs,
    }
    write_json(RESULTS / f"{name}.json", found)


def make_long_reference() -> None:
    """The reference of the long task, which does not ship with klamp."""
    if not (Path(LONG) / "model.safetensors").exists():
        made = f"--task recite --start builtin --lr 1e-3 --steps 300 --rows 32 --out {LONG}"
        subprocess.run(
            [sys.executable, "-m", "klamp.train.tasks.pretrain", *made.split()], check=True
        )


def table(found: dict) -> str:
    """One scenario as a Markdown table: ranges over seeds."""
    lines = [
        f"## {found['title']}",
        "",
        f"`{found['command']}` at commit `{found['commit']}`; ![](./{found['scenario']}.svg)",
        "",
        "| variant | seeds | true accuracy, sampled | mean | greedy | reward | KL at the end |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for variant in dict.fromkeys(run["variant"] for run in found["runs"]):
        runs = [run for run in found["runs"] if run["variant"] == variant]
        cells = [
            variant,
            str(len(runs)),
            spread([100 * r["accuracy"] for r in runs], 0, " %"),
            f"{100 * statistics.mean(r['accuracy'] for r in runs):.0f} %",
            spread([100 * r["greedy"] for r in runs], 0, " %"),
            spread([r["score"] for r in runs], 2),
            spread([r["kl"] for r in runs], 2),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    reading = SCENARIOS[found["scenario"]].reading
    return "\n".join([*lines, *(["", reading] if reading else [])]) + "\n"


def spread(numbers: list[float], digits: int, unit: str = "") -> str:
    """Smallest to largest."""
    low, high = f"{min(numbers):.{digits}f}", f"{max(numbers):.{digits}f}"
    return f"{low}{unit}" if low == high else f"{low}–{high}{unit}"


def draw() -> None:
    """Plots and the table of everything that has results."""
    parts = [
        "# Results",
        "",
        "Written by `make experiments`; every number is of the runs listed "
        "in the JSON file beside it. Ranges are over seeds.",
        "",
    ]
    for name in SCENARIOS:
        path = RESULTS / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            plots.draw(found, RESULTS / f"{name}.svg")
            parts.append(table(found))
    (RESULTS / "README.md").write_text("\n".join(parts))


def main() -> None:
    """The command line."""
    parse = argparse.ArgumentParser(description="Many-seed scenarios.")
    parse.add_argument("names", nargs="*", help=f"of {', '.join(SCENARIOS)}; none means all")
    parse.add_argument("--seeds", type=int, help="how many seeds; default the scenario's own")
    parse.add_argument("--plots", action="store_true", help="only draw")
    given = parse.parse_args()
    for name in [] if given.plots else given.names or SCENARIOS:
        run(name, SCENARIOS[name], given.seeds or SCENARIOS[name].seeds)
    draw()


if __name__ == "__main__":
    main()
