import pytest
import torch

from helpers import assert_close
from klamp.objective.scan import CHUNK_TOKENS, Scratch, discounted_sums, powers, row_chunks, whole


def by_loop(x, decay):
    y, out = torch.zeros(len(x), dtype=torch.float64), torch.empty(x.shape, dtype=torch.float64)
    for t in reversed(range(x.shape[1])):
        y = x[:, t].double() + decay * y
        out[:, t] = y
    return out


def test_discounted_sums_by_hand():
    # 4, then 2 + ½·4, then 1 + ½·4
    found = discounted_sums(torch.tensor([[1.0, 2.0, 4.0]]), 0.5)
    assert_close(found, torch.tensor([[3.0, 4.0, 4.0]]))


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("length", [0, 1, 2, 33, 63, 64, 65, 80, 1024, 1025, 1040, 8192])
def test_blocks_give_what_the_loop_gives(length, decay):
    x = torch.randn(3, length)
    assert_close(discounted_sums(x.double(), decay), by_loop(x, decay))
    # Sums to 8192 terms in float32: compared where rounding cannot show, on small whole numbers.
    whole = torch.randint(-3, 4, (3, length)).float()
    assert_close(discounted_sums(whole, decay).double(), by_loop(whole, decay))


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.999, 1.0])
def test_nothing_overflows_however_long_the_row_is(decay):
    """Dividing by decayᵗ would: 0.9⁸¹⁹² is 0 in float64."""
    x = torch.full((1, 8192), 1e30)
    found = discounted_sums(x, decay)
    assert found.isfinite().all()
    limit = 1e30 * (8192 if decay == 1.0 else (1 - decay**8192) / (1 - decay))
    assert_close(found[0, 0], torch.tensor(limit))


@pytest.mark.parametrize("length", [3, 32, 64, 70, 96, 1040])
def test_the_past_does_not_see_itself(length):
    """y at t holds x from t on: what stands before changes nothing, not even 1e30."""
    x = torch.randn(2, length)
    loud = torch.cat([torch.full((2, 1), 1e30), x[:, 1:]], dim=1)
    assert torch.equal(discounted_sums(loud, 0.9)[:, 1:], discounted_sums(x, 0.9)[:, 1:])


@pytest.mark.parametrize("length", [5, 33, 64, 1025])
def test_the_result_can_be_written_in_place(length):
    x = torch.randn(3, length)
    out = torch.empty_like(x)
    discounted_sums(x, 0.9, out=out)
    assert_close(out, discounted_sums(x, 0.9))


@pytest.mark.parametrize("length", [5, 33, 64, 1024])
def test_the_memory_layout_does_not_matter(length):
    x = torch.randn(length, 3)
    assert_close(discounted_sums(x.t(), 0.9), discounted_sums(x.t().contiguous(), 0.9))


@pytest.mark.parametrize("length", [5, 64, 65, 96, 1025])
def test_what_is_summed_stays_unless_it_may_be_overwritten(length):
    x = torch.randn(3, length)
    kept, expected = x.clone(), discounted_sums(x, 0.9)
    assert torch.equal(x, kept)
    assert_close(discounted_sums(x, 0.9, overwrite=True), expected)
    strided = kept.t().contiguous().t()
    assert_close(discounted_sums(strided, 0.9, overwrite=True), expected)


@pytest.mark.parametrize("length", [5, 96, 1025])
def test_neither_autocast_nor_matmul_precision_makes_it_coarser(length):
    x = 1000 + torch.randn(3, length)
    expected = by_loop(x, 0.9).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(discounted_sums(x, 0.9), expected)
    torch.set_float32_matmul_precision("medium")
    try:
        assert_close(discounted_sums(x, 0.9, out=torch.empty_like(x)), expected)
        assert_close(discounted_sums(x.clone(), 0.9, overwrite=True), expected)
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("width", [0, 1, 63, 64, 65, 80, 1023, 1024, 1025, 8194, 300_000])
def test_a_whole_width_needs_no_padding(width, monkeypatch):
    found = whole(width)
    assert width <= found <= 1.3 * width + 16
    assert whole(found) == found
    monkeypatch.setattr(torch.nn.functional, "pad", None)
    assert discounted_sums(torch.zeros(1, found), 0.5).shape == (1, found)


def test_scratch_memory_is_made_once_and_cut_to_size():
    scratch, like = Scratch(), torch.empty(4, 2)
    first = scratch.take("x", like, 8)
    assert first.shape == (4, 8)
    assert scratch.take("x", like[:3], 8).data_ptr() == first.data_ptr()
    assert scratch.take("x", like[:3], 8).shape == (3, 8)
    assert scratch.take("y", like, 8).data_ptr() != first.data_ptr()
    assert scratch.take("x", like, 9).shape == (4, 9)
    assert scratch.take("z", like, 8, torch.int64).dtype == torch.int64
    assert scratch.take("x", torch.empty(7, 2), 9).shape == (7, 9)


def test_powers_by_hand():
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.25, 0.5, 1.0]])
    assert_close(powers(3, 0.5, torch.float32, torch.device("cpu")), expected)


@pytest.mark.parametrize("shape", [(0, 4), (1, 0), (7, 3), (5, CHUNK_TOKENS), (600, 1000)])
def test_chunks_cover_every_row_once(shape):
    x = torch.empty(shape, device="meta")
    rows = [i for chunk in row_chunks(x) for i in range(shape[0])[chunk]]
    assert rows == list(range(shape[0]))
