"""The loop: sample → score → prepare → shares → loss → update → log.

One loop for one process and for many. Every line of ``one_step`` is a function in the file that its
name suggests, and there is no maths here.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from klamp.inspect import runlog
from klamp.inspect.runlog import Evaluation, Step
from klamp.objective.objective import Objective
from klamp.train import checkpoint, journal, loading, rewards, rollout, seeds
from klamp.train.checkpoint import Progress
from klamp.train.comm import Comm
from klamp.train.config import Config
from klamp.train.evaluation import Examiner, decoding_of
from klamp.train.journal import Outcome
from klamp.train.models import Models
from klamp.train.rollout import Observed, Samples
from klamp.train.tasks import catalogue
from klamp.train.tasks.task import Task
from klamp.train.tracking import Tracker, trackers
from klamp.train.update import Learner, anywhere, first_bad, optimizer_of, rate

Watch = Callable[[Step, Sequence[str]], None]
"""Sees every line of the log, with what there is to be warned of."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A run that is set up: everything that stays the same from step to step."""

    config: Config
    place: Path
    comm: Comm
    task: Task
    reward: rewards.RewardFunction
    models: Models
    objective: Objective
    learner: Learner
    examiner: Examiner


def train(run: Run, progress: Progress, watch: Watch, stop: Callable[[], bool]) -> Progress:
    """From where the run is to its last step, or until asked to stop."""
    config, comm, stopping = run.config, run.comm, False
    if progress.step == 0:
        evaluate(run, 0)
    plain, first = config.model_dump(mode="json"), progress.step + 1
    sinks = trackers(config.tracking, run.place, plain, first) if comm.rank == 0 else []
    try:
        while progress.step < config.steps and not stopping:
            progress = one_step(run, progress, watch, sinks)
            stopping = bool(comm.max(torch.tensor(int(stop()))))  # all together, or none
            if stopping or due(progress.step, config.checkpoints.every, config.steps):
                save(run, progress)
    finally:
        for sink in sinks:
            sink.close()
    return progress


def one_step(run: Run, progress: Progress, watch: Watch, sinks: Sequence[Tracker]) -> Progress:
    """One batch, from prompts to a line in the log."""
    step, config, comm = progress.step + 1, run.config, run.comm
    seeds.everything(config.seed, step, comm.rank)
    began = time.perf_counter()
    samples = sample(run, step)
    sampled = time.perf_counter()
    observed = observe(run, samples)
    scores = score(run, samples, step)
    outcome = learn(run, progress, samples, observed, scores)
    if outcome.problem is not None and comm.rank == 0:
        journal.record(run.place, step, samples, observed, scores, progress.state, outcome.problem)

    seconds = time.perf_counter() - began
    metrics = {
        **outcome.metrics,
        **journal.sample_metrics(samples, comm),
        **journal.speeds(samples, comm, seconds, sampled - began),
        **(evaluate(run, step).metrics if due(step, config.evaluation.every, config.steps) else {}),
    }
    line = Step(step=step, seconds=seconds, metrics=journal.complete(metrics))
    if comm.rank == 0:
        runlog.append(run.place, line)
    for sink in sinks:
        sink.log(step, line.metrics)
    watch(line, journal.warnings(line, outcome.problem, rounded=run.models.autocast is not None))
    journal.stop_if_lost(outcome, step, config.max_skipped, run.place)
    return Progress(step=step, state=outcome.state, skipped=outcome.skipped)


def learn(
    run: Run, progress: Progress, samples: Samples, observed: Observed, scores: Sequence[float]
) -> Outcome:
    """prepare → shares → loss → update; nothing of it where the models' numbers are not finite."""
    step, config, comm = progress.step + 1, run.config, run.comm
    problem = anywhere(comm, first_bad(vars(observed), samples.tokens.mask))
    if problem is not None:
        return Outcome(
            state=progress.state,
            metrics=journal.of_skipped(scores, progress.state),
            skipped=progress.skipped + 1,
            problem=problem,
        )
    batch = rollout.batch(samples, observed, scores)
    targets, state = run.objective.prepare(batch, progress.state, comm)
    set_rate(run, step)
    order = seeds.generator(run.models.device, "order", config.seed, step, comm.rank)
    learnt = run.learner.learn(samples.tokens, batch, targets, order, progress.skipped)
    return Outcome(
        state=state,
        metrics={
            **targets.metrics,
            **learnt.metrics,
            "actor/ratio_at_step0": journal.ratio_at_step0(learnt.first),
            "actor/lr": run.learner.optimizer.param_groups[0]["lr"],
        },
        skipped=learnt.skipped,
        problem=learnt.problem,
    )


def sample(run: Run, step: int) -> Samples:
    """This process's share of the step's prompts, completed."""
    config, comm = run.config, run.comm
    mine = config.sampling.prompts // comm.size
    start = (step - 1) * config.sampling.prompts + comm.rank * mine
    return rollout.sample(
        run.models,
        run.task.train(config.seed, start, mine),
        decoding_of(config.sampling),
        samples_per_prompt=config.sampling.samples_per_prompt,
        generator=seeds.generator(run.models.device, "sample", config.seed, step, comm.rank),
    )


def observe(run: Run, samples: Samples) -> Observed:
    """What the policy, the reference and the value function say of the samples."""
    known = rollout.as_trained(run.models, decoding_of(run.config.sampling))
    return rollout.observe(
        run.models,
        run.objective,
        samples.tokens,
        temperature=run.config.sampling.temperature,
        micro_tokens=run.config.optimizer.micro_tokens,
        known=samples.sampler_logprobs if known else None,
    )


def score(run: Run, samples: Samples, step: int) -> list[float]:
    """What the samples are worth."""
    config, seed = run.config, f"{run.config.seed} {step} {run.comm.rank}"
    return rewards.score(run.reward, config.reward, samples.examples, samples.texts, seed=seed)


def set_rate(run: Run, step: int) -> None:
    """The learning rate of this step."""
    for group in run.learner.optimizer.param_groups:
        group["lr"] = group["base"] * rate(run.config.optimizer, step, run.config.steps)


def evaluate(run: Run, step: int) -> Evaluation:
    """The policy on held-out prompts; every process does the same, one writes it down."""
    found = run.examiner.evaluate(run.models, run.reward, step)
    if run.comm.rank == 0:
        runlog.write_evaluation(run.place, found)
    return found


def save(run: Run, progress: Progress) -> None:
    """A checkpoint, by the first process; the others hold the same weights."""
    if run.comm.rank == 0:
        checkpoint.save(
            run.place,
            run.models,
            run.learner.optimizer,
            progress,
            keep=run.config.checkpoints.keep,
        )
    run.comm.wait()


def due(step: int, every: int | None, last: int) -> bool:
    """Whether something that happens every so often, and at the end, happens now."""
    return step == last or (every is not None and step % every == 0)


def set_up(config: Config, place: Path, comm: Comm) -> Run:
    """Models, task, reward, optimizer; nothing has been sampled yet."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    seeds.everything(config.seed, "set-up")  # the same weights on every process
    task, reward = catalogue.load(config.task), rewards.load(config.reward)
    objective = config.goal
    models = loading.load(config.model, objective)
    learner = Learner(
        models=models,
        objective=objective,
        optimizer=optimizer_of(models, config.optimizer),
        settings=config.optimizer,
        temperature=config.sampling.temperature,
        comm=comm,
    )
    examiner = Examiner(
        examples=task.evaluation(config.evaluation.prompts),
        sampling=config.sampling,
        reward=config.reward,
        shown=config.evaluation.shown,
        seed=config.seed,
    )
    return Run(
        config=config,
        place=place,
        comm=comm,
        task=task,
        reward=reward,
        models=models,
        objective=objective,
        learner=learner,
        examiner=examiner,
    )


def resume(run: Run) -> Progress:
    """The state of the last checkpoint, the log cut back to it; or the beginning."""
    last = checkpoint.latest(run.place)
    progress = Progress(step=0, state=run.objective.init())
    if last is not None:
        progress = checkpoint.restore(last, run.models, run.learner.optimizer)
    if run.comm.rank == 0:
        runlog.cut(run.place, progress.step)
    run.comm.wait()
    return progress
