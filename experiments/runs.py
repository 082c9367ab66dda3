"""Runs of the real command, two at a time, one thread each, and what is kept of them."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from klamp.inspect import runlog

LAST = 10


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: a variant of a scenario under one seed."""

    variant: str
    config: str
    overrides: tuple[str, ...]
    seed: int


def command(arguments: list[str]) -> None:
    """`klamp …` in a process of its own."""
    subprocess.run([sys.executable, "-m", "klamp.cli", *arguments], check=True)


def next_place(name: str) -> Path:
    """The next free runs/name-N."""
    number = 1
    while (place := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return place


def run_all(jobs: list[Job], scratch: Path) -> list[dict]:
    """The summaries of all jobs, in order; what is finished in ``scratch`` is not run again."""
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(lambda job: summary_of(job, scratch), jobs))


def summary_of(job: Job, scratch: Path) -> dict:
    """What is kept of one run: the ends, and the course of four metrics."""
    place = scratch / f"{job.variant}-seed{job.seed}"
    if not (place / "model").is_dir():
        sets = [f"seed={job.seed}", *job.overrides]
        flags = [part for one in sets for part in ("--set", one)]
        where = (
            ["--resume", str(place)]
            if (place / "config.yaml").exists()
            else [job.config, "--out", str(place), *flags]
        )
        command(["train", *where, "--threads", "1", "--quiet"])
    kept = summary(place)
    print(f"{place.name:<44} accuracy {kept['accuracy']:.3f}  KL {kept['kl']:.2f}", flush=True)
    return {"variant": job.variant, "seed": job.seed, "overrides": list(job.overrides), **kept}


def summary(place: Path) -> dict:
    """Numbers of a finished run, from its own log."""
    log = runlog.read(place)
    first, last = log.evaluations[0].metrics, log.evaluations[-1].metrics
    course = {
        name: [round(value, 4) for _, value in log.series(name)]
        for name in ("task/accuracy", "critic/score/mean", "critic/kl", "critic/kl_coef")
    }
    return {
        "accuracy_before": first["eval/accuracy"],
        "accuracy": last["eval/accuracy"],
        "greedy": last["eval/accuracy_greedy"],
        "score": mean(course["critic/score/mean"][-LAST:]),
        "kl": mean(course["critic/kl"][-LAST:]),
        "kl_target": log.steps[-1].metrics["critic/kl_target"],
        "kl_coef": course["critic/kl_coef"][-1],
        "course": course,
    }


def mean(numbers: list[float]) -> float:
    """The mean."""
    return sum(numbers) / len(numbers)


def commit() -> str:
    """The commit that the results were made with; `+` where the tree had changes."""
    head = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    changed = subprocess.check_output(["git", "status", "--porcelain", "src", "configs"], text=True)
    return head + ("+" if changed.strip() else "")


def write_json(path: Path, value: dict) -> None:
    """One run a line, so that a change of results reads well."""
    runs = ",\n".join("  " + json.dumps(run) for run in value["runs"])
    head = json.dumps({k: v for k, v in value.items() if k != "runs"}, indent=1)[:-2]
    path.write_text(f'{head},\n "runs": [\n{runs}\n ]\n}}\n')
