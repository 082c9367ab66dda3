"""Two real processes over gloo give the gradient, the state and the metrics of one."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_invariance import VARIANTS, same

from helpers import loss_and_grads, make_batch

ROWS, WIDTH, GROUP = 12, 7, 4


class Gloo:
    """The Workers protocol over torch.distributed."""

    def sum(self, x):
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.SUM)
        return x

    def max(self, x):
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x


def data():
    torch.manual_seed(0)
    batch = make_batch(rows=ROWS, width=WIDTH, group=GROUP, domains=torch.arange(ROWS) % 3)
    batch = replace(batch, scores=torch.rand(ROWS) * 0.8 + 0.1, difficulty=torch.rand(ROWS))
    logprobs = batch.old_logprobs + 0.2 * torch.randn(ROWS, WIDTH)
    return batch, logprobs, batch.values + torch.randn(ROWS, WIDTH)


def run(objective, batch, logprobs, values, *workers):
    targets, state = objective.prepare(batch, objective.init(), *workers)
    shares = objective.shares(targets.mask, targets.weights, *workers)
    out, grads = loss_and_grads(objective, batch, targets, shares, logprobs, values)
    return out.loss.detach(), grads, state.to_dict(), targets.metrics


def work(rank, port, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    batch, logprobs, values = data()
    rows = torch.arange(ROWS)[:8] if rank == 0 else torch.arange(ROWS)[8:]  # uneven on purpose
    # The second worker's rows are short: its tensors are narrower, as they would be.
    width = WIDTH if rank == 0 else int(batch.mask[rows].any(0).sum())
    cut = batch.select(rows)
    narrow = {
        name: x[:, :width]
        for name, x in vars(cut).items()
        if isinstance(x, torch.Tensor) and x.ndim == 2
    }
    cut = replace(cut, **narrow)
    found = [
        run(v.values[0], cut, logprobs[rows, :width], values[rows, :width], Gloo())
        for v in VARIANTS
    ]
    results[rank] = (rows, width, found)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_workers():
    with mp.Manager() as manager:
        results = manager.dict()
        port = 29_000 + torch.randint(0, 2000, ()).item()
        mp.spawn(work, args=(port, results), nprocs=2)
        return [results[0], results[1]]


@pytest.mark.parametrize("index", range(len(VARIANTS)), ids=[v.id for v in VARIANTS])
def test_two_workers_are_one(two_workers, index):
    objective = VARIANTS[index].values[0]
    loss, grads, state, metrics = run(objective, *data())
    parts = [torch.zeros_like(g) for g in grads]
    total = 0.0
    for rows, width, found in two_workers:
        part_loss, part_grads, part_state, part_metrics = found[index]
        total = total + part_loss
        for whole, g in zip(parts, part_grads, strict=True):
            whole[rows, :width] = g
        assert part_state.keys() == state.keys()
        same(numbers(part_state), numbers(state))
        assert part_metrics.keys() == metrics.keys()
        same([torch.tensor(part_metrics[k]) for k in metrics], map(torch.tensor, metrics.values()))
    same([total, *parts], [loss, *grads])


def numbers(x):
    """Every number of a nested plain value, in order."""
    if isinstance(x, dict):
        return [n for v in x.values() for n in numbers(v)]
    if isinstance(x, list | tuple):
        return [n for v in x for n in numbers(v)]
    return [torch.tensor(float(x))] if isinstance(x, int | float) else []
