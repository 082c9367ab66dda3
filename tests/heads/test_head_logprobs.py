"""Label log-probs and entropies: those of the plain form, with its gradients, from tiles."""

import itertools

import pytest
import torch
from plain_head import (
    CountedProducts,
    LargestTensor,
    assert_same_gradients,
    logprobs_and_entropy,
    small_tiles,
    wide,
)

from helpers import assert_close
from klamp.errors import ConfigError, DataError
from klamp.heads import tiles
from klamp.heads.logprobs import label_logprobs

ROWS, WIDTH, FEATURES, VOCABULARY = 3, 4, 6, 29


def inputs(*, bias=False, frozen=False, dtype=torch.float32):
    hidden = torch.randn(ROWS, WIDTH, FEATURES).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, FEATURES).to(dtype).requires_grad_(not frozen)
    b = torch.randn(VOCABULARY).to(dtype).requires_grad_(not frozen) if bias else None
    return hidden, weight, b, torch.randint(VOCABULARY, (ROWS, WIDTH))


def learning(*tensors):
    return [x for x in tensors if x is not None and x.requires_grad]


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch):
    small_tiles(monkeypatch)


def test_by_hand():
    # logits (log 3, 0): p = (¾, ¼), H = −¾ log ¾ − ¼ log ¼
    weight = torch.tensor([[3.0], [1.0]]).log()
    logprobs, entropy = label_logprobs(torch.ones(2, 1), weight, torch.tensor([0, 1]))
    assert_close(logprobs, torch.tensor([0.75, 0.25]).log())
    assert_close(entropy, torch.full((2,), 0.5623351))


CASES = list(
    itertools.product([1, 5, None], [False, True], [1.0, 0.7], [False, True], [False, True])
)


@pytest.mark.parametrize(("chunk", "bias", "temperature", "frozen", "entropy_grad"), CASES)
def test_values_and_gradients_of_the_plain_form(chunk, bias, temperature, frozen, entropy_grad):
    hidden, weight, b, labels = inputs(bias=bias, frozen=frozen)
    by_logprobs, by_entropy = torch.randn(2, ROWS, WIDTH)
    by_entropy = by_entropy * entropy_grad
    found = label_logprobs(
        hidden,
        weight,
        labels,
        bias=b,
        temperature=temperature,
        entropy_grad=entropy_grad,
        chunk=chunk,
    )
    leaves = wide(hidden, weight, b)
    plain = logprobs_and_entropy(*leaves[:2], labels, leaves[2], temperature)
    for got, wanted in zip(found, plain, strict=True):
        assert got.dtype == torch.float32
        assert_close(got, wanted.float())
    assert found[1].requires_grad == entropy_grad
    loss = (found[0] * by_logprobs).sum() + (found[1] * by_entropy).sum()
    wanted = (plain[0] * by_logprobs).sum() + (plain[1] * by_entropy).sum()
    assert_same_gradients(
        torch.autograd.grad(loss, learning(hidden, weight, b)),
        torch.autograd.grad(wanted, learning(*leaves)),
    )


def test_a_gradient_of_the_entropy_alone():
    hidden, weight, _, labels = inputs()
    _, entropy = label_logprobs(hidden, weight, labels, entropy_grad=True)
    leaves = wide(hidden, weight)
    _, plain = logprobs_and_entropy(*leaves, labels)
    assert_same_gradients(
        torch.autograd.grad(entropy.sum(), (hidden, weight)),
        torch.autograd.grad(plain.sum(), leaves),
    )


def test_tiles_of_the_size_that_is_used(monkeypatch):
    monkeypatch.undo()
    hidden = torch.randn(1500, 8, requires_grad=True)  # two blocks of rows
    weight = torch.randn(3001, 8, requires_grad=True)  # two tiles, the last one narrower
    labels = torch.randint(3001, (1500,))
    assert len(tiles.columns_of(3001, 750)) == 2
    g = torch.randn(1500)
    logprobs, entropy = label_logprobs(hidden, weight, labels)
    leaves = wide(hidden, weight)
    plain = logprobs_and_entropy(*leaves, labels)
    assert_close(logprobs, plain[0].float())
    assert_close(entropy, plain[1].float())
    assert_same_gradients(
        torch.autograd.grad(logprobs, (hidden, weight), g),
        torch.autograd.grad(plain[0], leaves, g.double()),
    )


@pytest.mark.parametrize("frozen", [False, True])
def test_no_rows(frozen):
    hidden = torch.randn(0, FEATURES, requires_grad=True)
    weight = torch.randn(VOCABULARY, FEATURES).requires_grad_(not frozen)
    logprobs, entropy = label_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long))
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert hidden.grad.shape == (0, FEATURES)
    if not frozen:
        assert (weight.grad == 0).all()


@pytest.mark.parametrize("frozen", [False, True])
def test_half_precision_is_only_that_of_the_inputs(frozen):
    hidden, weight, b, labels = inputs(bias=True, frozen=frozen, dtype=torch.bfloat16)
    logprobs, entropy = label_logprobs(hidden, weight, labels, bias=b)
    leaves = wide(hidden, weight, b)
    plain = logprobs_and_entropy(*leaves[:2], labels, leaves[2])
    assert_close(logprobs, plain[0].float())  # no rounding but that of the inputs
    assert_close(entropy, plain[1].float())
    got = torch.autograd.grad(logprobs.sum(), learning(hidden, weight, b))
    assert all(g.dtype == torch.bfloat16 for g in got)
    wanted = torch.autograd.grad(plain[0].sum(), learning(*leaves))
    assert_same_gradients(got, wanted, tolerance=2**-8)


def test_gradients_that_float16_cannot_hold_are_its_largest():
    hidden, weight, _, labels = inputs(dtype=torch.float16)
    logprobs, _ = label_logprobs(hidden, weight, labels)
    by_hidden, by_weight = torch.autograd.grad(
        logprobs, (hidden, weight), torch.full_like(logprobs, 1e6)
    )
    assert by_hidden.isfinite().all() and by_weight.isfinite().all()
    assert by_hidden.abs().max() == 65504


def test_products_in_half_precision_where_the_device_makes_them_so(monkeypatch):
    monkeypatch.setattr(tiles.Head, "product", property(lambda head: head.hidden.dtype))
    hidden, weight, _, labels = inputs(dtype=torch.bfloat16)
    logprobs, _ = label_logprobs(hidden, weight, labels, entropy_grad=True)
    assert logprobs.dtype == torch.float32
    leaves = wide(hidden, weight)
    plain, _ = logprobs_and_entropy(*leaves, labels)
    torch.testing.assert_close(logprobs, plain.float(), rtol=2**-7, atol=2**-6)
    assert_same_gradients(
        torch.autograd.grad(logprobs.sum(), (hidden, weight)),
        torch.autograd.grad(plain.sum(), leaves),
        tolerance=2**-6,
    )


@pytest.mark.parametrize("frozen", [False, True])
def test_autocast_does_not_reach_the_products(frozen):
    hidden, weight, _, labels = inputs(frozen=frozen)
    leaves = learning(hidden, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = label_logprobs(hidden, weight, labels)
        by_cast = torch.autograd.grad(cast.sum(), leaves)
    logprobs, _ = label_logprobs(hidden, weight, labels)
    assert_close(cast, logprobs)
    assert_same_gradients(by_cast, torch.autograd.grad(logprobs.sum(), leaves))


def test_a_weight_that_is_also_the_embedding_gets_both_gradients():
    _, weight, _, labels = inputs()
    ids = torch.randint(VOCABULARY, (ROWS, WIDTH))
    logprobs, _ = label_logprobs(weight[ids].tanh(), weight, labels)
    (leaf,) = wide(weight)
    plain, _ = logprobs_and_entropy(leaf[ids].tanh(), leaf, labels)
    assert_same_gradients(
        torch.autograd.grad(logprobs.sum(), weight), torch.autograd.grad(plain.sum(), leaf)
    )


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_junk_at_a_position_without_a_gradient_stays_there(frozen, entropy_grad):
    hidden, weight, b, labels = inputs(bias=True, frozen=frozen)
    mask = torch.ones(ROWS, WIDTH, dtype=torch.bool)
    mask[1, 2] = mask[2, 0] = False
    dirty = torch.where(mask[..., None], hidden.detach(), torch.nan).requires_grad_()
    parts = []
    for h in (hidden, dirty):
        found = label_logprobs(h, weight, labels, bias=b, entropy_grad=entropy_grad)
        kept = torch.where(mask, found[0] + found[1], 0.0)
        parts.append((kept, *torch.autograd.grad(kept.sum(), learning(h, weight, b))))
    assert parts[1][1][1, 2].eq(0).all()
    for clean, junk in zip(*parts, strict=True):
        assert_close(junk, clean)


def test_logits_of_ten_thousand():
    hidden, weight, _, labels = inputs()
    with torch.no_grad():
        hidden.copy_(hidden.round())
        weight.copy_((weight * 10).round() * 1024)  # whole numbers: no rounding but the softmax's
    logprobs, entropy = label_logprobs(hidden, weight, labels, entropy_grad=True)
    leaves = wide(hidden, weight)
    plain = logprobs_and_entropy(*leaves, labels)
    assert plain[0].min() < -1e4
    assert_close(logprobs, plain[0].float())
    assert_close(entropy, plain[1].float())
    assert_same_gradients(
        torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight)),
        torch.autograd.grad((plain[0] + plain[1]).sum(), leaves),
    )


def test_near_ties_at_ten_thousand_keep_their_precision():
    # 10000, 10001, 10000.5: as 0, 1, 0.5
    weight = torch.tensor([[10000.0], [10001.0], [10000.5]])
    labels = torch.tensor([0, 1, 2])
    logprobs, entropy = label_logprobs(torch.ones(3, 1), weight, labels)
    p = torch.tensor([0.0, 1.0, 0.5]).softmax(dim=0)
    assert_close(logprobs, p.log())
    assert_close(entropy, -(p * p.log()).sum().expand(3))


def test_a_bias_of_minus_infinity_takes_tokens_out():
    hidden, weight, b, labels = inputs(bias=True)
    with torch.no_grad():
        b[17:] = -torch.inf  # two tiles and a part of one
    labels = labels % 17
    logprobs, entropy = label_logprobs(hidden, weight, labels, bias=b, entropy_grad=True)
    leaves = wide(hidden, weight, b)
    plain = logprobs_and_entropy(leaves[0], leaves[1][:17], labels, leaves[2][:17])
    assert_close(logprobs, plain[0].float())
    assert_close(entropy, plain[1].float())
    got = torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight, b))
    wanted = torch.autograd.grad((plain[0] + plain[1]).sum(), leaves)
    assert_same_gradients(got, wanted)


def test_a_head_that_learns_makes_logits_twice_and_a_frozen_one_once(monkeypatch):
    count = {}
    for frozen in (False, True):
        counted = CountedProducts(monkeypatch)
        hidden, weight, _, labels = inputs(frozen=frozen)
        label_logprobs(hidden, weight, labels)[0].sum().backward()
        count[frozen] = counted.made
        assert (weight.grad is None) == frozen
    tiles_in_all = len(tiles.columns_of(VOCABULARY, ROWS * WIDTH))
    assert count == {False: 2 * tiles_in_all, True: tiles_in_all}


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_no_tensor_of_tokens_times_vocabulary(entropy_grad, monkeypatch):
    small_tiles(monkeypatch, columns=64)
    hidden = torch.randn(40, FEATURES, requires_grad=True)
    weight = torch.randn(640, FEATURES, requires_grad=True)
    with LargestTensor() as largest:
        found = label_logprobs(hidden, weight, torch.zeros(40).long(), entropy_grad=entropy_grad)
        sum(found).sum().backward()
    assert largest.numel == weight.numel() < 40 * 640 / 6


def test_nothing_is_kept_without_gradients():
    hidden, weight, _, labels = inputs()
    with torch.no_grad():
        logprobs, entropy = label_logprobs(hidden, weight, labels)
    assert not logprobs.requires_grad and not entropy.requires_grad
    assert_close(logprobs, logprobs_and_entropy(hidden, weight, labels)[0].detach())


def test_a_second_derivative_is_refused():
    hidden, weight, _, labels = inputs()
    logprobs, _ = label_logprobs(hidden, weight, labels)
    upstream = torch.ones_like(logprobs).requires_grad_()
    (once,) = torch.autograd.grad(logprobs, hidden, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


def test_what_is_refused():
    hidden, weight, _, labels = inputs()
    with pytest.raises(DataError, match="labels go from -100 to"):
        label_logprobs(hidden, weight, torch.where(labels == labels[0, 0], -100, labels))
    with pytest.raises(DataError, match="to 29 but the vocabulary has 29 tokens"):
        label_logprobs(hidden, weight, torch.full_like(labels, 29))
    with pytest.raises(ConfigError, match="chunk must be at least 1 row, got 0"):
        label_logprobs(hidden, weight, labels, chunk=0)
    with pytest.raises(ConfigError, match="temperature must be above 0, got 0"):
        label_logprobs(hidden, weight, labels, temperature=0.0)
