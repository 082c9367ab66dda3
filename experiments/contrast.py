"""`make train-contrast`: the default with and without its KL, overlaid in one report."""

from pathlib import Path

from experiments.runs import command, next_place


def main() -> None:
    """Train both (the default only if there is no finished run of it), then report."""
    held = latest_default()
    if held is None:
        held = next_place("default")
        command(["train", "--out", str(held)])
    free = next_place("without-kl")
    off = ["--set", "objective.kl=null", "--set", "model.reference=copy"]
    command(["train", "--out", str(free), *off])
    command(["report", str(free), str(held)])
    print(f"overlaid: {free / 'report.html'} (KL off) against {held} (KL held)")


def latest_default() -> Path | None:
    """The newest finished run of the default config."""
    found = [p.parent for p in Path("runs").glob("default-*/model")]
    return max(found, key=lambda p: p.stat().st_mtime, default=None)


if __name__ == "__main__":
    main()
