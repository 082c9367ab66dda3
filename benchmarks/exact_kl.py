"""The exact KL of two heads from their hidden states: against both logits in memory, and TRL."""

import torch
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from benchmarks.head import MANY, PRODUCTS, SIZES, WIDTHS, compared, inputs, padded, products
from benchmarks.timing import Result
from klamp.heads.exact import head_kl, head_kl_sum

REVERSE = 1.0
"""TRL's beta for KL(policy ‖ reference)."""


def naive_kl(hidden, weight, ref_hidden, ref_weight):
    """Two logits, two log-softmaxes, and their sum over the vocabulary."""
    logp = (hidden @ weight.t()).log_softmax(dim=-1)
    with torch.no_grad():
        logq = (ref_hidden @ ref_weight.t()).log_softmax(dim=-1)
    return (logp.exp() * (logp - logq)).sum(dim=-1)


def trl_kl(hidden, weight, ref_hidden, ref_weight):
    flat = (hidden.flatten(0, 1), weight, None)
    ref = (ref_hidden.flatten(0, 1), ref_weight, None)
    return ChunkedDivergenceFunction.apply(*flat, *ref, REVERSE)[0].view(hidden.shape[:2])


def lines(vocabulary, features, lengths, said):
    data = inputs(vocabulary, features)
    width = data.labels.shape[1]
    ref_hidden = data.hidden.detach() + 0.1 * torch.randn_like(data.hidden)
    ref_weight = data.weight.detach() + 0.005 * torch.randn_like(data.weight)
    given = (data.hidden, data.weight, ref_hidden, ref_weight)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    weights = mask / mask.sum()
    variants = {
        "all logits": lambda: naive_kl(*given).backward(weights),
        "head_kl_sum": lambda: head_kl_sum(*given, weights)[0].backward(),
    }
    if (vocabulary, features) == MANY:
        variants["head_kl"] = lambda: head_kl(*given).backward(weights)
        variants["TRL"] = lambda: trl_kl(*given).backward(weights)
    if len(set(lengths)) == 1:
        variants[PRODUCTS] = products(given[:2], given[2:])
    work = f"exact KL of two heads, V = {vocabulary}, H = {features}, {said}"
    return compared(work, data, variants, "head_kl_sum", ("≤ 0.7", "≤ 0.15"))


def run():
    parts = []
    for features in WIDTHS:
        for vocabulary, (rows, width) in SIZES.items():
            parts.append(lines(vocabulary, features, [width] * rows, "no padding"))
    parts.append(lines(*MANY, padded(MANY[0]), "40 % padding"))
    found = [line for part, _ in parts for line in part]
    return Result(found, " ".join([NOTES, *(said for _, said in parts)]))


NOTES = (
    "float32, forward and backward to the policy's hidden states and weight. "
    "head_kl_sum knows the weight of each token beforehand and makes the gradient in the forward: "
    "four matrix products, as with all logits in memory. head_kl gives the KL of each token and "
    "makes both logits again: six. TRL is the installed package on a CPU, in its own tiles."
)
