"""The command line. Everything heavy is imported by the command that needs it."""

import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from klamp.errors import ConfigError, KlampError

app = typer.Typer(
    name="klamp",
    help="The stability layer of reinforcement-learning post-training, and a trainer built on it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Put over the config, e.g. optimizer.lr=1e-4."),
]


@app.command()
def train(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.yaml]", help="None: the built-in default.")
    ] = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; default runs/NAME-N.")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with a run, exactly where it was.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; 1 can be faster on a busy machine.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Warnings and errors only.")] = False,
) -> None:
    """Train a policy by reinforcement learning."""
    from klamp.inspect import runlog
    from klamp.train import config as configs
    from klamp.train import launch
    from klamp.train.closing import closing, interrupted
    from klamp.train.view import view_of

    given = [*(overrides or []), *([f"threads={threads}"] if threads else [])]
    if resume is not None:
        _refuse_with_resume(config, out, resume)
        place, loaded = resume, configs.load(resume / "config.yaml", given)
    else:
        loaded = configs.load(config, given)
        place = launch.new_place(out, config.stem if config else "default")
    try:
        with view_of(loaded, place, quiet=quiet or not launch.is_first()) as view:
            progress = launch.launch(loaded, place, view)
    except KlampError:
        if out is None and resume is None:
            launch.forget(place)
        raise
    except KeyboardInterrupt:
        _say_stopped(place)
    done = progress.step >= loaded.steps
    if not done and launch.is_first():
        print("\n".join(interrupted(place, progress.step, loaded.steps)))
    if not done:
        raise typer.Exit(130)
    if launch.is_first() and not quiet:
        print("\n".join(closing(loaded, runlog.read(place))))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN_B ...]")],
) -> None:
    """Write RUN/report.html; several runs are overlaid in the first one's."""
    from klamp.inspect import render

    print(f"wrote {render.write(runs)}")


@app.command(name="eval")
def evaluate(
    source: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run, a model, `builtin`.")],
    config: Annotated[Path | None, typer.Option(help="Task and reward; default the run's.")] = None,
    overrides: Overrides = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="How many held-out prompts.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Accuracy and score of a policy on held-out prompts of a task."""
    from klamp.train.examine import examine

    given = [*(overrides or []), *([f"evaluation.prompts={prompts}"] if prompts else [])]
    found = examine(source, config, given)
    if as_json:
        print(json.dumps(dict(found)))
        return
    for name, value in found.items():
        print(f"{name:<24}{value:.4f}")


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="None: list them.")] = None,
) -> None:
    """List the presets, or print one as YAML to paste under `objective:`."""
    if name is not None:
        from klamp.train import recipe, yamlfile

        print(yamlfile.dump(recipe.objective(name).to_dict()), end="")
        return
    from klamp import presets as known

    for key, make in known.PRESETS.items():
        print(f"{key:<16}{(make.__doc__ or '').strip().splitlines()[0]}")


def _say_stopped(place: Path) -> NoReturn:
    """A second Ctrl-C: nothing was saved since the last checkpoint."""
    again = f"`klamp train --resume {place}` goes on from the last checkpoint"
    print(f"klamp: stopped at once; {again}", file=sys.stderr)
    raise typer.Exit(130)


def _refuse_with_resume(config: Path | None, out: Path | None, resume: Path) -> None:
    if config is not None or out is not None:
        raise ConfigError(
            f"--resume {resume} goes on with that run's own config in its own directory; drop "
            f"{config or '--out'} (single settings can be changed with --set)"
        )
    if not (resume / "config.yaml").is_file():
        raise ConfigError(f"{resume} is not a run to resume: it has no config.yaml")


def main() -> None:
    """What the command `klamp` runs: one sentence and exit code 2 where klamp knows better."""
    try:
        app()
    except KlampError as error:
        print(f"klamp: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
