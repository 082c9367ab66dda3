"""Random numbers that depend on (seed, step, rank, purpose) alone, so that a run can be resumed."""

import hashlib
import random

import torch


def number(*parts: int | str) -> int:
    """A well-mixed 63-bit seed."""
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def generator(device: torch.device, *parts: int | str) -> torch.Generator:
    """A generator of its own on the device."""
    return torch.Generator(device).manual_seed(number(*parts))


def everything(*parts: int | str) -> None:
    """Python's and torch's global generators: what a model or a reward function may draw from."""
    random.seed(number(*parts))
    torch.manual_seed(number(*parts))
