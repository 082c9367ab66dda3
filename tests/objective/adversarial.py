"""Batches that break implementations: junk where it must not matter, extremes where it may."""

import torch
from hypothesis import strategies as st

JUNK = [float("nan"), float("inf"), float("-inf"), 1e30, -1e30, 0.0]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIZES = [0.0, 0.1, 3.0, 30.0, 100.0, 1e3, 1e4]


@st.composite
def masks(draw, rows, width):
    """Rows that are full, empty, cut, or holed; at least one active token in all."""
    kind = st.sampled_from(["full", "empty", "prefix", "holes", "one"])
    mask = torch.zeros(rows, width, dtype=torch.bool)
    for i in range(rows):
        match draw(kind):
            case "full":
                mask[i] = True
            case "prefix":
                mask[i, : draw(st.integers(1, width))] = True
            case "holes":
                bits = draw(st.lists(st.booleans(), min_size=width, max_size=width))
                mask[i] = torch.tensor(bits)
            case "one":
                mask[i, draw(st.integers(0, width - 1))] = True
    if not mask.any():
        mask[0, -1] = True
    return mask


@st.composite
def per_token(draw, mask, size, around=None):
    """Random numbers of a size and dtype around a tensor; junk wherever the mask is False."""
    dtype = draw(st.sampled_from(FLOATS))
    gen = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = size * torch.randn(mask.shape, generator=gen, dtype=torch.float64)
    x = x if around is None else x + around.double()
    x = x.clamp(-6e4, 6e4) if dtype == torch.float16 else x
    junk = draw(st.sampled_from(JUNK))
    return torch.where(mask, x, junk).to(dtype)


@st.composite
def scores(draw, rows):
    """Ordinary, equal, huge or missing scores."""
    one = st.one_of(
        st.sampled_from([0.0, 1.0, 0.5, 1e30, -1e30, float("nan")]),
        st.floats(-5, 5, width=32),
    )
    if draw(st.booleans()):
        values = [draw(one)] * rows
    else:
        values = draw(st.lists(one, min_size=rows, max_size=rows))
    return torch.tensor(values, dtype=draw(st.sampled_from([torch.float32, torch.float64])))


@st.composite
def batches(draw):
    """The fields of a batch, and what the current policy and critic say of it."""
    rows, width = draw(st.integers(2, 6)), draw(st.integers(1, 6))
    mask = draw(masks(rows, width))
    optional = st.booleans()
    clean = torch.where(mask, -torch.ones(mask.shape), 0.0)
    old = draw(per_token(mask, draw(st.sampled_from([0.5, 3.0, 1e3])), clean))
    size = st.sampled_from(SIZES)
    base = torch.where(mask, old.float(), 0.0)
    exact = draw(per_token(mask, 1.0)).abs()
    fields = {
        "mask": mask,
        "scores": draw(scores(rows)),
        "groups": torch.tensor([7, 7, 3, 3, 3, 7][:rows] if rows != 3 else [5, 5, 5]),
        "old_logprobs": old,
        "ref_logprobs": draw(per_token(mask, draw(size), base)),
        "sampler_logprobs": draw(per_token(mask, draw(size), base)) if draw(optional) else None,
        "values": draw(per_token(mask, draw(st.sampled_from([1.0, 1e4])))),
        "exact_kl": exact,
        "components": torch.stack([draw(scores(rows)).double() for _ in range(2)], dim=1),
        "domains": torch.arange(rows) % 2 if draw(optional) else None,
        "truncated": torch.tensor(draw(st.lists(optional, min_size=rows, max_size=rows))),
        "difficulty": torch.linspace(0, 1, rows) if draw(optional) else None,
    }
    logprobs = draw(per_token(mask, draw(size), base))
    values = draw(per_token(mask, draw(st.sampled_from([1.0, 1e4]))))
    return fields, logprobs, values, draw(per_token(mask, 1.0)).abs()
