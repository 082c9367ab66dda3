"""The task that a config names."""

from klamp.errors import DataError
from klamp.train.settings import TaskSettings
from klamp.train.tasks import files
from klamp.train.tasks.digits import DigitTask
from klamp.train.tasks.task import Task


def load(settings: TaskSettings) -> Task:
    """The task of the settings, with something to evaluate on."""
    if settings.file is None:
        return DigitTask(name=settings.name, lengths=settings.lengths)
    task = files.load(settings.file, settings.evaluation_file)
    if not task.held_out:
        raise DataError(
            f"{settings.file} leaves no prompt for evaluation ({len(task.training)} in all, one in "
            "ten is held out by its text); give task.evaluation_file, or more prompts"
        )
    return task
