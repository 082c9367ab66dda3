import pytest
import torch
from test_moments import together

from helpers import assert_close, make_batch, tensor
from klamp.objective.kl import KLTerm
from klamp.objective.watch import (
    advantage_metrics,
    explained_variance,
    observe_kl,
    score_metrics,
)
from klamp.types import ALONE

NAN = float("nan")
# log π_old − log π_ref of two, one and no active tokens; the rest is padding.
D = tensor([1.0, 2.0, 9.0], [9.0, 6.0, 9.0], [9.0, 9.0, 9.0])
MASK = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]]).bool()


def batch_of(d=D, **changes):
    zeros = torch.zeros(3, 3)
    fields = {"mask": MASK, "old_logprobs": d, "ref_logprobs": zeros, "values": zeros}
    return make_batch(rows=3, group=3, **(fields | {"sampler_logprobs": zeros} | changes))


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("token_mean", 3.0),  # (1 + 2 + 6) / 3 tokens
        ("sequence_sum", 4.5),  # (3 + 6) / 2 sequences: the empty one is none
        ("sequence_mean", 3.75),  # (3/2 + 6/1) / 2
    ],
)
def test_the_kl_in_every_unit_by_hand(unit, expected):
    found = observe_kl(KLTerm(estimator="k1", watch_reduction=unit), batch_of(), ALONE)
    assert found.watched == pytest.approx(expected)
    assert (found.per_token, found.per_sequence) == pytest.approx((3.0, 4.5))
    assert_close(found.tokens, torch.where(MASK, D, 0.0))


def test_the_controller_may_watch_another_estimator():
    term = KLTerm(estimator="k1", watch="k2", where="reward")
    found = observe_kl(term, batch_of(), ALONE)
    assert_close(found.tokens, torch.where(MASK, D, 0.0))
    assert found.watched == pytest.approx((0.5 + 2.0 + 18.0) / 2)  # ½ d², per sequence


def test_the_watched_kl_is_clamped_and_counted_as_the_term_is():
    found = observe_kl(KLTerm(estimator="k1", clamp_log_ratio=1.5), batch_of(), ALONE)
    assert found.watched == pytest.approx((1.0 + 1.5 + 1.5) / 2)
    assert found.clamped.tolist() == [[False, True, False], [False, True, False], [False] * 3]


@pytest.mark.parametrize("junk", [NAN, float("inf"), -float("inf"), 1e30])
def test_padding_is_not_watched(junk):
    dirty = observe_kl(KLTerm(estimator="k3"), batch_of(torch.where(MASK, D, junk)), ALONE)
    clean = observe_kl(KLTerm(estimator="k3"), batch_of(), ALONE)
    assert dirty[2:] == clean[2:]
    assert_close(dirty.tokens, clean.tokens)


def test_the_kl_of_policies_that_are_far_apart_is_a_finite_number():
    for estimator in ("k1", "k2", "k3", "k3_reversed"):
        found = observe_kl(KLTerm(estimator=estimator), batch_of(-1e4 * D), ALONE)
        assert abs(found.watched) < float("inf")


def test_two_workers_watch_one_kl():
    batch = batch_of()
    term = KLTerm(estimator="k3", watch_reduction="sequence_mean")
    parts = together(
        lambda w: observe_kl(term, batch.select([0]), w)[2:],
        lambda w: observe_kl(term, batch.select([1, 2]), w)[2:],
    )
    assert parts[0] == parts[1] == pytest.approx(observe_kl(term, batch, ALONE)[2:])


def test_explained_variance_by_hand():
    on, returns = torch.ones(1, 3, dtype=torch.bool), tensor([1.0, 2.0, 3.0])

    def of(*values):
        return float(explained_variance(tensor(values), returns, on, ALONE))

    assert of(1.0, 2.0, 3.0) == pytest.approx(1.0)
    assert of(7.0, 7.0, 7.0) == pytest.approx(0.0)  # a constant explains nothing
    assert of(1.0, 2.0, 2.0) == pytest.approx(2 / 3)  # errors 0, 0, 1: 1 − (2/3) / 2
    assert of(3.0, 2.0, 1.0) == pytest.approx(-3.0)  # errors −2, 0, 2: 1 − 8 / 2


def test_explained_variance_sees_active_tokens_and_stays_finite():
    mask = torch.tensor([[True, True, False]])
    found = explained_variance(tensor([1, 2, 9]), tensor([1, 2, NAN]), mask, ALONE)
    assert float(found) == pytest.approx(1.0)
    for returns in (tensor([5.0, 5.0, 5.0]), tensor([1e30, -1e30, 0.0]), tensor([0.0, 1e-20, 0.0])):
        found = float(explained_variance(tensor([1e30, 0.0, 0.0]), returns, mask, ALONE))
        assert abs(found) < float("inf")
    flat = explained_variance(tensor([1.0, 2.0, 3.0]), tensor([5.0, 5.0, 5.0]), mask, ALONE)
    assert float(flat) == 0


def test_scores_are_shown_raw_and_shaped():
    raw, shaped = torch.tensor([1.0, 3.0, NAN]), torch.tensor([-1.0, 1.0, NAN])
    found = {name: float(m) for name, m in score_metrics(raw, shaped).items()}
    assert found == {"critic/score/mean": 2.0, "critic/shaped_score/mean": 0.0}


def test_advantages_are_shown_by_mean_and_size():
    mask = torch.tensor([[True, True, False]])
    found = advantage_metrics(tensor([1.0, -3.0, 99.0]), mask)
    assert {k: float(m) for k, m in found.items()} == {
        "critic/advantages/mean": -1.0,
        "critic/advantages/abs_mean": 2.0,
    }
