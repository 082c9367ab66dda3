"""A policy small enough to enumerate: a table of logits for every prefix, and all its sequences."""

from itertools import product

import torch

from klamp.types import Batch

VOCABULARY, LENGTH = 3, 3
SEQUENCES = torch.tensor(list(product(range(VOCABULARY), repeat=LENGTH)))
NODES = sum(VOCABULARY**t for t in range(LENGTH))  # every prefix shorter than a whole sequence


def node_of(t):
    """The row of the table that each sequence stands at before its t-th token."""
    code = torch.zeros(len(SEQUENCES), dtype=torch.long)
    for s in range(t):
        code = code * VOCABULARY + SEQUENCES[:, s]
    return sum(VOCABULARY**s for s in range(t)) + code


def random_logits(scale=1.0):
    return scale * torch.randn(NODES, VOCABULARY, dtype=torch.float64)


def logprobs_of(logits):
    """log π of each token of each sequence."""
    table = logits.log_softmax(-1)
    return torch.stack([table[node_of(t), SEQUENCES[:, t]] for t in range(LENGTH)], dim=1)


def conditional_kl(logits, ref_logits):
    """The exact KL of the next token, at each prefix of each sequence."""
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    table = (p.exp() * (p - q)).sum(-1)
    return torch.stack([table[node_of(t)] for t in range(LENGTH)], dim=1)


def sequence_kl(logits, ref_logits):
    """KL(π ‖ ref) of whole sequences, by enumeration."""
    logp, ref = logprobs_of(logits).sum(1), logprobs_of(ref_logits).sum(1)
    return (logp.exp() * (logp - ref)).sum()


def sum_of_conditional_kls(logits, ref_logits):
    """The same number, but with the prefixes held fixed when it is differentiated."""
    kl = conditional_kl(logits, ref_logits)
    total = torch.zeros((), dtype=torch.float64)
    logp = logprobs_of(logits).detach()
    for t in range(LENGTH):
        reach = logp[:, :t].sum(1).exp()  # of the prefix; each prefix stands in V^(T−t) rows
        total = total + (reach * kl[:, t]).sum() / VOCABULARY ** (LENGTH - t)
    return total


def batch_of(old_logits, ref_logits, repeat=None):
    """Every sequence as a row; with ``repeat``, row i of the batch is sequence repeat[i]."""
    rows = torch.arange(len(SEQUENCES)) if repeat is None else repeat
    old, ref = logprobs_of(old_logits)[rows], logprobs_of(ref_logits)[rows]
    return Batch(
        mask=torch.ones(len(rows), LENGTH, dtype=torch.bool),
        scores=torch.zeros(len(rows)),
        groups=torch.arange(len(rows)),
        old_logprobs=old.detach(),
        ref_logprobs=ref.detach(),
        exact_kl=conditional_kl(old_logits, ref_logits)[rows].detach(),
    )
