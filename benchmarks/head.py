"""From hidden states to log-probs, and to the loss: against all logits in memory, and peers."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from trl.kernels import ChunkedLogProbFunction

import klamp
from benchmarks.memory import peak
from benchmarks.timing import Line, Result, interleaved
from klamp.heads.fused import head_loss
from klamp.heads.logprobs import label_logprobs

WIDTHS, ROUNDS = (128, 512), 3
"""Features of the hidden states: peers' ratios on a CPU are those that are told of them at 128."""
SIZES = {32_000: (8, 128), 152_064: (8, 128)}
"""Vocabulary: sequences and their length."""
PRODUCTS = "its matrix products alone"
MANY = (32_000, 128)
"""Vocabulary and features at which every peer is measured: others take minutes."""
TRL_COLUMNS = 32768


class Inputs(NamedTuple):
    """Hidden states [B, T, H], the head's weight, the labels, and what comes back to log-probs."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    upstream: torch.Tensor


def inputs(vocabulary, features, *, frozen=False):
    torch.manual_seed(0)
    shape = SIZES[vocabulary]
    hidden = torch.randn(*shape, features, requires_grad=True)
    weight = (torch.randn(vocabulary, features) * 0.05).requires_grad_(not frozen)
    return Inputs(hidden, weight, torch.randint(vocabulary, shape), torch.randn(shape))


def naive_logprobs(hidden, weight, labels):
    """All logits, log-softmax, gather; the entropy is only looked at."""
    logits = (hidden @ weight.t()).float()
    distribution = logits.log_softmax(dim=-1)
    chosen = distribution.gather(-1, labels[..., None]).squeeze(-1)
    with torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return chosen, entropy


def trl_logprobs(hidden, weight, labels):
    """The installed package's, with its own tiles of 32768 columns."""
    flat, ids = hidden.flatten(0, 1), labels.reshape(-1)
    args = (flat, weight, None, ids, 1.0, TRL_COLUMNS, None, 1.0, ("log_probs", "entropy"))
    found = ChunkedLogProbFunction.apply(*args)
    return found[0].view(labels.shape), found[1].view(labels.shape).detach()


class VerlForm(torch.autograd.Function):
    """verl's fused linear for PPO, restated: chunks of 512 rows, logits made again in backward."""

    ROWS = 512

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        """Log-probs and entropy of each chunk."""
        ctx.save_for_backward(hidden, weight, labels)
        ctx.set_materialize_grads(False)
        parts = []
        for h, ids in zip(hidden.split(VerlForm.ROWS), labels.split(VerlForm.ROWS), strict=True):
            logits = (h @ weight.t()).float()
            p, logp = logits.softmax(dim=-1), logits.log_softmax(dim=-1)
            entropy = logits.logsumexp(dim=-1) - (p * logits).sum(dim=-1)
            parts.append((logp.gather(-1, ids[:, None]).squeeze(-1), entropy))
        return tuple(torch.cat(x) for x in zip(*parts, strict=True))

    @staticmethod
    def backward(ctx, by_logprobs, by_entropy):
        """The gradient of each chunk."""
        hidden, weight, labels = ctx.saved_tensors
        by_hidden, by_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for i in range(0, len(hidden), VerlForm.ROWS):
            rows = slice(i, i + VerlForm.ROWS)
            logits = (hidden[rows] @ weight.t()).float()
            p = logits.softmax(dim=-1)
            one_hot = torch.zeros_like(logits).scatter_(1, labels[rows, None], 1.0)
            slope = by_logprobs[rows, None] * (one_hot - p)
            by_hidden[rows] = slope @ weight
            by_weight += slope.t() @ hidden[rows]
        return by_hidden, by_weight, None


def verl_logprobs(hidden, weight, labels):
    found = VerlForm.apply(hidden.flatten(0, 1), weight, labels.reshape(-1))
    return found[0].view(labels.shape), found[1].view(labels.shape)


def cleared(data, run):
    """A call that leaves no gradients behind."""

    def call():
        run()
        data.hidden.grad = data.weight.grad = None

    return call


def scratch(data, run: Callable[[], object]) -> float:
    """Peak beyond what is there before, less the gradients of the inputs."""
    learn = [x for x in (data.hidden, data.weight) if x.requires_grad]
    return peak(run) - sum(x.numel() * x.element_size() for x in learn)


def products(*pairs):
    """h Wᵀ of every pair, and both gradients of the first: what no form can do without."""
    pairs = [(hidden.detach().flatten(0, 1), weight.detach()) for hidden, weight in pairs]

    def run():
        (hidden, weight), *others = pairs
        logits = hidden @ weight.t()
        for h, w in others:
            torch.mm(h, w.t(), out=logits)
        return logits @ weight, logits.t() @ hidden

    return run


def compared(work, data, variants, ours, goals):
    """Time and scratch of every variant relative to the first; goals belong to ours."""
    calls = {name: cleared(data, run) for name, run in variants.items()}
    seconds = interleaved(calls, rounds=ROUNDS)
    memory = {name: scratch(data, run) for name, run in calls.items() if name != PRODUCTS}
    first = next(iter(variants))
    lines = []
    for name in list(variants)[1:]:
        time_goal, memory_goal = goals if name == ours else ("", "")
        lines.append(Line(work, name, first, "time", seconds[name] / seconds[first], time_goal))
        if name in memory:
            size = memory[name] / memory[first]
            lines.append(Line(work, name, first, "scratch memory", size, memory_goal))
    said = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in memory.items())
    return lines, f"{work}: scratch {said}."


def logprobs_lines(vocabulary, features, *, frozen=False):
    data = inputs(vocabulary, features, frozen=frozen)
    forms = {"all logits": naive_logprobs, "label_logprobs": label_logprobs}
    if not frozen and (vocabulary, features) == MANY:
        forms |= {"TRL": trl_logprobs, "verl's form": verl_logprobs}

    def backward(form):
        return lambda: form(*data[:3])[0].backward(data.upstream)

    variants = {name: backward(form) for name, form in forms.items()}
    head = "a frozen head" if frozen else "the head learns"
    work = f"log-probs and entropy, V = {vocabulary}, H = {features}, {head}"
    return compared(work, data, variants, "label_logprobs", ("≤ 1.1", "≤ 0.1"))


def experience(data, lengths):
    """A batch whose old policy and reference are near the one at hand, and its targets."""
    rows, width = data.labels.shape
    with torch.no_grad():
        now, _ = naive_logprobs(*data[:3])
    batch = klamp.Batch(
        mask=torch.arange(width) < torch.tensor(lengths)[:, None],
        scores=torch.rand(rows),
        groups=torch.arange(rows) // 2,
        old_logprobs=now + 0.1 * torch.randn_like(now),
        ref_logprobs=now + 0.2 * torch.randn_like(now),
    )
    objective = klamp.presets.load("klamp")
    targets, _ = objective.prepare(batch, objective.init())
    return objective, batch, targets, objective.shares(targets.mask, targets.weights)


def loss_lines(vocabulary, features, lengths, said):
    data = inputs(vocabulary, features)
    objective, batch, targets, shares = experience(data, lengths)
    liger = LigerFusedLinearGRPOLoss(beta=0.05, compiled=False, use_ref_model=True, chunk_size=4)

    def naive():
        logprobs, entropy = naive_logprobs(*data[:3])
        objective.loss(logprobs, batch, targets, shares, entropy=entropy).loss.backward()

    def ours():
        head_loss(objective, *data[:3], batch, targets, shares).output.loss.backward()

    def ligers():
        known = {
            "ref_per_token_logps": batch.ref_logprobs,
            "old_per_token_logps": batch.old_logprobs,
        }
        args = (data.hidden, data.weight, data.labels, batch.mask.float(), targets.advantages[:, 0])
        liger(*args, **known)[0].backward()

    variants = {"all logits": naive, "head_loss": ours}
    if (vocabulary, features) == MANY:
        variants["Liger"] = ligers
    if len(set(lengths)) == 1:
        variants[PRODUCTS] = products((data.hidden, data.weight))
    work = f"hidden to loss, V = {vocabulary}, H = {features}, {said}"
    return compared(work, data, variants, "head_loss", ("≤ 0.8", "≤ 0.1"))


def padded(vocabulary):
    """Lengths spread evenly from a fifth of the longest to the longest: 60 % of the tokens."""
    rows, width = SIZES[vocabulary]
    return [round(width * (0.2 + 0.8 * i / (rows - 1))) for i in range(rows)]


def run():
    parts = []
    for features in WIDTHS:
        for vocabulary, (rows, width) in SIZES.items():
            parts.append(logprobs_lines(vocabulary, features))
            parts.append(loss_lines(vocabulary, features, [width] * rows, "no padding"))
    parts.append(loss_lines(*MANY, padded(MANY[0]), "40 % padding"))
    parts.append(logprobs_lines(*MANY, frozen=True))
    lines = [line for found, _ in parts for line in found]
    return Result(lines, " ".join([NOTES, *(said for _, said in parts)]))


NOTES = (
    "float32, forward and backward; "
    + ", ".join(f"V = {v}: [{b}, {t}] tokens" for v, (b, t) in SIZES.items())
    + ". Ratios of time and of scratch: below 1 is better. Scratch is the peak less the gradients "
    "of hidden states and weight. TRL and Liger (not compiled, 4 sequences at a time, no entropy) "
    "are the installed packages on a CPU, which is not what they are tuned for; verl's form is our "
    "re-statement. With a head that learns, log-probs alone take four matrix products against the "
    "three of all logits in memory, since the backward makes the logits again; hidden to loss "
    "takes three. The more features, the more of the time is products, and the nearer the ratios "
    "come to 4/3 and to 1: how far below 1 they can be is what the products alone take of the "
    "time. Large logits are also fresh memory on every call, which is in the time."
)
