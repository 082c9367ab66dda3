"""Full-vocabulary KL: finite where the vocabulary is padded, nothing made that is not needed."""

import pytest
import torch

from helpers import assert_close
from klamp.errors import ConfigError, DataError
from klamp.objective.exact import exact_kl


def test_by_hand():
    # ½ log(½/¼) + ½ log(½/¾) = ½ log 2 + ½ log ⅔
    p = torch.tensor([[[0.5, 0.5]]]).log()
    q = torch.tensor([[[0.25, 0.75]]]).log()
    assert_close(exact_kl(p, q), torch.tensor([[0.5 * torch.tensor(4 / 3).log().item()]]))


def test_a_token_that_neither_can_produce_adds_nothing():
    logits = torch.randn(1, 2, 4)
    padded = torch.cat([logits, torch.full((1, 2, 3), -torch.inf)], dim=-1).log_softmax(-1)
    other = torch.cat([torch.randn(1, 2, 4), torch.full((1, 2, 3), -torch.inf)], -1).log_softmax(-1)
    leaf = padded.clone().requires_grad_()
    kl = exact_kl(leaf, other)
    assert_close(kl.detach(), exact_kl(padded[..., :4], other[..., :4]))
    kl.sum().backward()
    assert leaf.grad.isfinite().all()


def test_a_token_that_the_reference_cannot_produce_is_finite_and_can_be_clamped_away():
    leaf = torch.randn(1, 1, 3).log_softmax(-1).requires_grad_()
    ref = torch.tensor([[[-0.7, -0.7, -torch.inf]]])
    kl = exact_kl(leaf, ref)
    assert kl.isfinite().all()
    kl.clamp(max=10.0).sum().backward()
    assert (leaf.grad == 0).all()


def test_junk_at_a_position_without_a_gradient_stays_there():
    leaf = torch.randn(1, 3, 4).log_softmax(-1)
    leaf[0, 2] = torch.nan
    leaf.requires_grad_()
    mask = torch.tensor([[True, True, False]])
    torch.where(mask, exact_kl(leaf, torch.randn(1, 3, 4).log_softmax(-1)), 0.0).sum().backward()
    assert (leaf.grad[0, 2] == 0).all()
    assert leaf.grad.isfinite().all()


def test_a_frozen_reference_gets_no_gradient_and_a_live_one_gets_minus_pi():
    p, q = (torch.randn(2, 3, 5).log_softmax(-1).requires_grad_() for _ in range(2))
    exact_kl(p, q).sum().backward()
    assert_close(q.grad, -p.detach().exp())
    frozen = q.detach()
    exact_kl(p, frozen, chunk=2).sum().backward()
    assert frozen.grad is None


def test_half_precision_and_what_is_refused():
    p = torch.randn(2, 3, 5).log_softmax(-1)
    assert exact_kl(p.bfloat16(), p.bfloat16()).dtype == torch.float32
    with pytest.raises(ConfigError, match="chunk must be at least 1 token, got 0"):
        exact_kl(p, p, chunk=0)
    with pytest.raises(DataError, match=r"\[2, 3, 5\] and ref_logprobs \[2, 3, 4\]"):
        exact_kl.__wrapped__(p, p[..., :4])
