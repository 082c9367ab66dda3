"""What the loop knows of other processes: nothing changes with one, and two are one."""

from dataclasses import replace

import pytest
import torch
from trainer_parts import CONFIGS, nudge, one_batch, precise, tiny_run
from trainer_processes import ranks

from helpers import assert_close
from klamp.train import launch
from klamp.train.comm import Comm, OneProcess
from klamp.train.states import head_of
from klamp.types import Workers

FILES = {"grpo": None, "ppo": CONFIGS / "ppo.yaml", "roll": CONFIGS / "roll.yaml"}
SHARES = ([0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15])  # uneven, groups of four


def test_one_process_is_the_identity():
    comm, x = OneProcess(), torch.randn(3)
    assert (comm.rank, comm.size) == (0, 1)
    assert comm.sum(x) is x and comm.max(x) is x
    comm.wait()
    assert isinstance(comm, Comm) and isinstance(comm, Workers)


def exchange(rank):
    """Sums and maxima of what differs between ranks."""
    with launch.processes() as comm:
        assert isinstance(comm, Comm) and isinstance(comm, Workers)
        x = torch.tensor([1.0, 5.0 - 4.0 * rank, 7.0 * rank], dtype=torch.float64)
        found = {"rank": comm.rank, "size": comm.size, "sum": comm.sum(x), "max": comm.max(x)}
        comm.wait()
        return found | {"x": x}


def test_two_processes_add_up_and_keep_what_is_theirs(tmp_path):
    one, two = ranks(exchange, tmp_path)
    assert (one["rank"], two["rank"], one["size"], two["size"]) == (0, 1, 2, 2)
    assert one["x"].tolist() == [1.0, 5.0, 0.0] and two["x"].tolist() == [1.0, 1.0, 7.0]
    for found in (one, two):
        assert found["sum"].tolist() == [2.0, 6.0, 7.0]
        assert found["max"].tolist() == [1.0, 5.0, 7.0]
        assert found["sum"].dtype == torch.float64


def update_of(rows, place, file, comm):
    """The gradient of one update on some rows of a fixed batch, and its metrics."""
    torch.manual_seed(0)
    run = tiny_run(place, "optimizer.max_grad_norm=null", file=file, comm=OneProcess())
    precise(run.models)
    nudge(run.models.policy)
    samples, batch, _, _ = one_batch(run)
    rows = torch.tensor(rows)
    batch = batch.select(rows)
    targets, state = run.objective.prepare(batch, run.objective.init(), comm)
    nudge(run.models.policy, 0.01)
    found = []
    optimizer = run.learner.optimizer
    optimizer.register_step_pre_hook(
        lambda o, a, k: found.extend(p.grad.clone() for g in o.param_groups for p in g["params"])
    )
    metrics, problem = replace(run.learner, comm=comm).update(
        samples.tokens.select(rows), batch, targets, torch.arange(len(rows))
    )
    return {"gradient": found, "metrics": metrics, "problem": problem, "state": state.to_dict()}


def share(rank, place):
    with launch.processes() as comm:
        return {k: update_of(SHARES[rank], place, f, comm) for k, f in FILES.items()}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    place = tmp_path_factory.mktemp("ranks")
    return ranks(share, place, place)


@pytest.mark.parametrize("kind", FILES)
def test_an_update_by_two_processes_is_that_of_one_on_all_rows(two_processes, tmp_path, kind):
    alone = update_of(range(16), tmp_path, FILES[kind], OneProcess())
    for found in (rank[kind] for rank in two_processes):
        for a, b in zip(found["gradient"], alone["gradient"], strict=True):
            assert_close(a, b)
        assert found["metrics"] == pytest.approx(alone["metrics"], rel=1e-5, abs=1e-6)
        assert found["problem"] is None
    assert two_processes[0][kind]["state"] == two_processes[1][kind]["state"]
    pairs = zip(*(rank[kind]["gradient"] for rank in two_processes), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def constant_nan(module, args, out):
    """Log-probs that are not numbers, and have no gradient."""
    return out.index_fill(1, torch.tensor([2]), torch.nan)


def poisoned(rank, place, what):
    """Only the second process has a gradient, or only a loss, that is not finite."""
    with launch.processes() as comm:
        torch.manual_seed(0)
        run = tiny_run(place, comm=comm)
        samples, batch, targets, _ = one_batch(run)
        if rank == 1 and what == "loss":
            head_of(run.models.policy).register_forward_hook(constant_nan)
        if rank == 1 and what == "gradient":
            last = list(run.models.policy.parameters())[-1]
            last.register_hook(lambda g: torch.full_like(g, torch.inf))
        before = [p.clone() for p in run.models.policy.parameters()]
        rows = torch.arange(len(batch.mask))
        metrics, problem = run.learner.update(samples.tokens, batch, targets, rows)
        after = run.models.policy.parameters()
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return {"same": same, "problem": problem, "skipped": metrics["actor/skipped_updates"]}


@pytest.mark.parametrize(
    ("what", "here", "there"),
    [
        ("gradient", "the gradient of policy parameter", "the gradient of policy parameter"),
        ("loss", "a tensor on another process", "logprobs at row"),
    ],
)
def test_what_is_not_finite_on_one_process_is_skipped_on_all(tmp_path, what, here, there):
    one, two = ranks(poisoned, tmp_path, tmp_path, what)
    assert one["same"] and two["same"]
    assert one["skipped"] == two["skipped"] == 1.0
    assert one["problem"].startswith(here) and two["problem"].startswith(there)
