"""Scores normalised by group: 1,000,000 of them, in shuffled ragged groups of 1 to 16."""

import numpy as np
import torch

from benchmarks.timing import Line, Result, faster, interleaved
from klamp.objective.moments import wide
from klamp.objective.normalise import NormaliseScores
from klamp.types import Batch

ROWS, EPS = 1_000_000, 1e-6
CLOSE = 1e4, 1e-2  # mean and spread of scores that raw squares cannot tell apart


def verl(scores, ids):
    """verl's vectorised GRPO: sums and raw squares by index_add, float32, ids numbered from 0."""
    n = int(ids.max()) + 1
    count, total, squares = (
        torch.zeros(n).index_add_(0, ids, x)
        for x in (torch.ones_like(scores), scores, scores * scores)
    )
    mean = total / count.clamp_min(1.0)
    variance = (squares - total * total / count.clamp_min(1.0)) / (count - 1.0).clamp_min(1.0)
    std = variance.clamp(min=EPS).sqrt()
    alone = count <= 1.0
    if alone.any():
        mean[alone], std[alone] = 0.0, 1.0
    return (scores - mean[ids]) / (std[ids] + EPS)


def exact(scores, ids, floor):
    """Each score less the mean, over std + eps, in 80-bit floats; variance at least the floor."""
    order = np.argsort(ids.numpy(), kind="stable")
    x = scores.numpy()[order].astype(np.longdouble)
    starts = np.flatnonzero(np.diff(ids.numpy()[order], prepend=-1))
    sizes = np.diff(starts, append=len(x))
    centred = x - np.repeat(np.add.reduceat(x, starts) / sizes, sizes)
    variance = np.add.reduceat(centred**2, starts) / np.maximum(sizes - 1, 1)
    z = centred / (np.repeat(np.sqrt(np.maximum(variance, floor)), sizes) + EPS)
    found = np.empty(len(x))
    found[order] = z
    return torch.from_numpy(found)


def error(found, expected, ids):
    """The largest, where a score has siblings: what one without gets is a choice."""
    siblings = torch.bincount(ids)[ids] > 1
    return (found.double() - expected)[siblings].abs().max().item()


def run():
    torch.manual_seed(0)
    ids = torch.repeat_interleave(torch.randint(1, 17, (ROWS // 4,)))[:ROWS]
    ids, scores = ids[torch.randperm(ROWS)], torch.randn(ROWS)
    far_apart = ids * 10**9
    column, stage = torch.zeros(ROWS, 1), NormaliseScores(group_of_one="zero", eps=EPS)

    def ours(scores, ids):
        batch = Batch(mask=column == 0, scores=scores, groups=ids, old_logprobs=column)
        return lambda: stage(wide(scores), batch, stage.init()).scores

    seconds = interleaved(
        {
            "verl": lambda: verl(scores, ids),
            "exact": ours(scores, ids),
            "exact, ids far apart": ours(scores, far_apart),
        },
        rounds=31,
    )
    work = f"{ROWS:,} scores by group"
    close = CLOSE[0] + CLOSE[1] * torch.randn(ROWS)
    wrong = error(ours(close, ids)(), exact(close, ids, floor=0.0), ids)
    lines = [
        *faster(work, seconds, "exact", {"verl": "≥ 1"}),
        *faster(work, seconds, "exact, ids far apart", {"verl": ""}),
        Line(
            work, "exact", "80-bit floats", "largest error, in units of 1e-6", wrong / 1e-6, "≤ 1"
        ),
    ]
    theirs = error(verl(close, ids), exact(close, ids, floor=EPS), ids)
    notes = (
        f"scores of {CLOSE[0]:g} ± {CLOSE[1]:g} normalised to about ±1: our largest error is "
        f"{wrong:.1e}, that of verl's form {theirs:.1e} (raw squares in float32, against the same "
        "formula in 80-bit floats)."
    )
    return Result(lines, notes)


if __name__ == "__main__":
    print(run())
