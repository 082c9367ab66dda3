"""The plain readable form of everything in heads/, in float64 with all logits in memory."""

import torch

from klamp.heads import tiles


def small_tiles(monkeypatch, columns=8):
    """Tiles so narrow that a vocabulary of a few dozen tokens has several."""
    monkeypatch.setattr(tiles, "TILE_BYTES", 0)
    monkeypatch.setattr(tiles, "NARROWEST", columns)
    monkeypatch.setattr(tiles, "ALIGNED", 1)


def distribution(hidden, weight, bias=None, temperature=1.0):
    """log softmax((h Wᵀ + b) / temperature)."""
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    return (logits / temperature).log_softmax(dim=-1)


def logprobs_and_entropy(hidden, weight, labels, bias=None, temperature=1.0):
    logp = distribution(hidden, weight, bias, temperature)
    chosen = logp.gather(-1, labels[..., None]).squeeze(-1)
    return chosen, -(logp.exp() * logp).sum(dim=-1)


def kl(logp, logq):
    return (logp.exp() * (logp - logq)).sum(dim=-1)


def wide(*tensors):
    """The same numbers in float64, as leaves that need a gradient where the originals do."""
    return [
        None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in tensors
    ]


def assert_same_gradients(got, wanted, tolerance=1e-5):
    """‖got − wanted‖ ≤ tolerance · ‖wanted‖, tensor by tensor."""
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        error = (a.double() - b.double()).norm()
        assert error <= tolerance * b.double().norm() + 1e-12, f"off by {error / b.norm():.1e}"


class CountedProducts:
    """How often logits are made while it is installed."""

    def __init__(self, monkeypatch):
        self.made = 0
        original = tiles.Head.logits

        def counted(head, w, columns, out):
            self.made += 1
            return original(head, w, columns, out)

        monkeypatch.setattr(tiles.Head, "logits", counted)


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements that any operation gave."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out
