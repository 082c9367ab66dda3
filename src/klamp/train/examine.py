"""``klamp eval``: a policy that is there already, on a task."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from klamp.errors import ConfigError
from klamp.objective.objective import Objective
from klamp.train import config as configs
from klamp.train import loading, rewards
from klamp.train.evaluation import Examiner
from klamp.train.tasks import catalogue


def examine(source: str, config: Path | None, overrides: Sequence[str]) -> Mapping[str, float]:
    """The metrics of a run's model on the run's task, or of any model on a config's task."""
    run, model = Path(source), source
    if (run / "config.yaml").is_file():
        config, model = config or run / "config.yaml", str(run / "model")
        if not Path(model).is_dir():
            raise ConfigError(
                f"{run} has no model yet: the run is not finished; `klamp train --resume {run}`"
            )
    loaded = configs.load(config, overrides)
    settings = loaded.model.model_copy(
        update={"path": model, "lora": None, "reference": "none", "value": "none"}
    )
    task = catalogue.load(loaded.task)
    examiner = Examiner(
        examples=task.evaluation(loaded.evaluation.prompts),
        sampling=loaded.sampling,
        reward=loaded.reward,
        shown=0,
        seed=loaded.seed,
    )
    models = loading.load(settings, Objective())
    return examiner.evaluate(models, rewards.load(loaded.reward), 0).metrics
