"""One tolerance for the whole suite, so that no test can be loosened in passing; and batches."""

from functools import partial

import torch

from klamp.types import Batch

assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float32)


def prefix_mask(lengths, width):
    return torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]


def make_batch(rows=8, width=6, group=4, **changes):
    """A clean batch with everything in it; lengths differ, groups are of equal size."""
    old = -torch.rand(rows, width) * 3
    fields = {
        "mask": prefix_mask(torch.randint(1, width + 1, (rows,)).tolist(), width),
        "scores": torch.rand(rows),
        "groups": torch.arange(rows) // group,
        "old_logprobs": old,
        "ref_logprobs": old + 0.3 * torch.randn(rows, width),
        "sampler_logprobs": old + 0.1 * torch.randn(rows, width),
        "values": torch.randn(rows, width),
    }
    return Batch(**(fields | changes))


def loss_and_grads(objective, batch, targets, shares, logprobs, values=None):
    """The loss, and its gradient with respect to log-probs and values."""
    logprobs = logprobs.detach().clone().requires_grad_()
    values = None if values is None else values.detach().clone().requires_grad_()
    out = objective.loss(logprobs, batch, targets, shares, values=values)
    out.loss.backward()
    grads = [logprobs.grad] + ([] if values is None or values.grad is None else [values.grad])
    return out, grads
