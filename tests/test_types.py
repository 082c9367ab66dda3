from dataclasses import FrozenInstanceError, replace

import jaxtyping
import pytest
import torch

from klamp.errors import DataError
from klamp.types import ALONE, Batch, Targets, Workers

NAN, INF = float("nan"), float("inf")
PER_TOKEN = ("old_logprobs", "ref_logprobs", "sampler_logprobs", "values", "exact_kl")


users = pytest.mark.usefixtures("as_users_run_it")


def make_batch(**changes):
    """Three rows: three tokens, one token, none."""
    fields = {
        "mask": torch.tensor([[1, 1, 1], [0, 1, 0], [0, 0, 0]], dtype=torch.bool),
        "scores": torch.arange(3.0),
        "groups": torch.tensor([0, 0, 1]),
        "old_logprobs": torch.arange(9.0).view(3, 3),
    }
    return Batch(**(fields | changes))


def make_targets(**changes):
    fields = {
        "mask": torch.tensor([[1, 1, 1], [0, 1, 0], [0, 0, 0]], dtype=torch.bool),
        "weights": torch.ones(3),
        "advantages": torch.arange(9.0).view(3, 3),
        "corrections": torch.ones(3, 3),
        "kl_coef": 0.05,
    }
    return Targets(**(fields | changes))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (torch.tensor([2, 0]), [2.0, 0.0]),
        ([2, 0], [2.0, 0.0]),
        (slice(1, 3), [1.0, 2.0]),
        (torch.tensor([True, False, True]), [0.0, 2.0]),
    ],
    ids=["tensor", "list", "slice", "bool"],
)
def test_select_takes_the_same_rows_of_everything(rows, expected):
    picked = torch.tensor(expected).long()
    batch = make_batch(components=torch.arange(6.0).view(3, 2), domains=torch.tensor([4, 5, 6]))
    part = batch.select(rows)
    assert part.scores.tolist() == expected
    assert torch.equal(part.old_logprobs, batch.old_logprobs[picked])
    assert torch.equal(part.mask, batch.mask[picked])
    assert torch.equal(part.components, batch.components[picked])
    assert part.domains.tolist() == [4 + int(e) for e in expected]
    assert part.ref_logprobs is None


def test_select_passes_on_what_is_not_a_tensor():
    targets = make_targets(metrics={"critic/kl": 1.5})
    part = targets.select([1])
    assert part.kl_coef == 0.05
    assert part.metrics == {"critic/kl": 1.5}
    assert torch.equal(part.advantages, targets.advantages[1:2])
    assert part.returns is None


def test_one_row_or_an_empty_row_may_be_selected():
    assert make_batch().select([1]).mask.sum() == 1
    empty = make_batch().select(slice(2, 3))
    assert empty.mask.shape == (1, 3)
    assert not empty.mask.any()
    assert len(make_batch().select([]).scores) == 0


def test_moving_a_batch_keeps_everything():
    batch = make_batch(truncated=torch.tensor([True, False, False]))
    moved = batch.to("cpu")
    assert torch.equal(moved.truncated, batch.truncated)
    assert moved.values is None


def test_data_is_frozen():
    with pytest.raises(FrozenInstanceError):
        make_batch().scores = torch.zeros(3)
    with pytest.raises(FrozenInstanceError):
        make_targets().kl_coef = 1.0


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
def test_what_stands_at_a_masked_position_does_not_matter(junk):
    mask = make_batch().mask
    dirty = torch.where(mask, torch.zeros(3, 3), junk)
    make_batch(**dict.fromkeys(PER_TOKEN, dirty))
    make_targets(advantages=dirty, returns=dirty, corrections=dirty, kl_to_come=dirty)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_non_finite_active_value_is_refused_by_tensor_row_and_position(name, bad):
    x = torch.zeros(3, 3)
    x[1, 1] = bad
    message = rf"Batch\.{name} is {bad} at row 1, position 1, .* set mask=False there"
    with pytest.raises(DataError, match=message):
        make_batch(**{name: x})


@pytest.mark.parametrize("name", ["advantages", "returns", "corrections", "kl_to_come"])
def test_a_non_finite_target_is_refused_by_tensor_row_and_position(name):
    x = torch.zeros(3, 3)
    x[0, 2] = NAN
    with pytest.raises(DataError, match=rf"Targets\.{name} is nan at row 0, position 2"):
        make_targets(**{name: x})


def test_a_score_may_be_missing_but_not_infinite():
    make_batch(scores=torch.tensor([NAN, 1.0, NAN]))
    with pytest.raises(DataError, match=r"Batch\.scores is -inf at row 1; .* return NaN"):
        make_batch(scores=torch.tensor([0.0, -INF, 0.0]))


@pytest.mark.parametrize("bad", [INF, -INF])
def test_a_component_may_be_missing_but_not_infinite(bad):
    make_batch(components=torch.tensor([[NAN, 1.0], [NAN, NAN], [1.0, bad]]))  # the last is empty
    with pytest.raises(DataError, match=rf"Batch\.components is {bad} at row 1.* NaN"):
        make_batch(components=torch.tensor([[NAN, 1.0], [0.0, bad], [1.0, 1.0]]))


def test_the_score_of_an_empty_row_is_nobodys():
    make_batch(scores=torch.tensor([0.0, 0.0, INF]))


@users
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": torch.ones(3, 3)}, r"Batch\.mask must be a bool .*\.float32 .* mask\.bool\(\)"),
        ({"mask": torch.ones(9, dtype=torch.bool)}, r"Batch\.mask must .* shape \[9\]"),
        (
            {"ref_logprobs": torch.zeros(3, 9)},
            r"Batch\.ref_logprobs has shape \[3, 9\] but Batch\.mask has shape \[3, 3\]",
        ),
        ({"values": torch.zeros(3)}, r"Batch\.values has shape \[3\] .* response positions only"),
        ({"values": [[0.0] * 3] * 3}, r"Batch\.values has type list"),
        ({"old_logprobs": torch.zeros(3, 3).int()}, r"old_logprobs is torch\.int32; use .*float"),
        ({"scores": torch.zeros(4)}, r"Batch\.scores has shape \[4\] but .* 3 rows; give a tensor"),
        ({"scores": torch.zeros(3).long()}, r"Batch\.scores is torch\.int64; use scores\.float"),
        ({"groups": torch.zeros(2).long()}, r"Batch\.groups has shape \[2\] but .* 3 rows"),
        ({"groups": [0, 0, 1]}, r"Batch\.groups has type list but Batch\.mask has 3 rows"),
        ({"components": torch.zeros(2, 2)}, r"Batch\.components has shape \[2, 2\]"),
        ({"domains": torch.zeros(2).long()}, r"Batch\.domains has shape \[2\]"),
        ({"truncated": torch.zeros(2).bool()}, r"Batch\.truncated has shape \[2\]"),
        ({"difficulty": torch.zeros(2)}, r"Batch\.difficulty has shape \[2\]"),
    ],
)
def test_a_batch_that_does_not_fit_together_is_refused(changes, message):
    with pytest.raises(DataError, match=message):
        make_batch(**changes)


@users
@pytest.mark.parametrize("name", ["scores", "groups", "domains", "truncated", "difficulty"])
def test_a_column_vector_is_not_one_entry_per_sequence(name):
    """[B, 1] against [B] would broadcast to [B, B] somewhere far from here."""
    dtype = {"groups": torch.long, "domains": torch.long, "truncated": torch.bool}.get(name)
    with pytest.raises(DataError, match=rf"Batch\.{name} has shape \[3, 1\]"):
        make_batch(**{name: torch.zeros(3, 1, dtype=dtype)})


@users
def test_components_are_a_table():
    with pytest.raises(DataError, match=r"Batch\.components has shape \[3\]"):
        make_batch(components=torch.zeros(3))


@users
@pytest.mark.parametrize(
    ("name", "wrong", "cast"),
    [
        ("truncated", torch.zeros(3, dtype=torch.long), "bool"),
        ("groups", torch.zeros(3), "long"),
        ("groups", torch.zeros(3, dtype=torch.bool), "long"),
        ("domains", torch.zeros(3), "long"),
        ("difficulty", torch.zeros(3, dtype=torch.long), "float"),
        ("components", torch.zeros(3, 2, dtype=torch.long), "float"),
    ],
)
def test_a_tensor_of_the_wrong_dtype_is_refused_with_its_remedy(name, wrong, cast):
    with pytest.raises(DataError, match=rf"Batch\.{name} is {wrong.dtype}; use {name}\.{cast}\(\)"):
        make_batch(**{name: wrong})


@users
@pytest.mark.parametrize("name", ["mask", "scores", "groups", "old_logprobs"])
def test_what_every_batch_needs_must_be_there(name):
    with pytest.raises(DataError, match=rf"Batch\.{name}"):
        make_batch(**{name: None})


@users
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": torch.ones(3, 3)}, r"Targets\.mask must be a bool tensor .* mask\.bool\(\)"),
        (
            {"weights": torch.ones(2)},
            r"Targets\.weights has shape \[2\] but .* 3 rows; give a tensor",
        ),
        ({"advantages": torch.ones(3, 2)}, r"Targets\.advantages has shape \[3, 2\] but Targets"),
        ({"corrections": torch.ones(3, 3).long()}, r"Targets\.corrections is torch\.int64"),
        (
            {"weights": torch.ones(3).long()},
            r"Targets\.weights is torch\.int64; use weights\.float",
        ),
        ({"advantages": None}, r"Targets\.advantages has type NoneType"),
        ({"corrections": None}, r"Targets\.corrections has type NoneType"),
        ({"weights": None}, r"Targets\.weights has type NoneType"),
    ],
)
def test_targets_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(DataError, match=message):
        make_targets(**changes)


def test_shapes_are_checked_while_testing():
    with pytest.raises(jaxtyping.TypeCheckError, match="scores"):
        make_batch(scores=torch.zeros(4))


def test_replace_checks_again():
    with pytest.raises(DataError, match="row 0, position 1"):
        replace(make_batch(), values=torch.tensor([[0.0, NAN, 0.0]] * 3))


def test_alone_is_the_identity():
    assert isinstance(ALONE, Workers)
    x = torch.randn(3)
    assert torch.equal(ALONE.sum(x), x)
    assert torch.equal(ALONE.max(x), x)


def test_columns_cut_what_is_per_token_and_nothing_else():
    batch = Batch(
        mask=torch.tensor([[True, True, False], [True, False, False]]),
        scores=torch.zeros(2),
        groups=torch.tensor([0, 0]),
        old_logprobs=torch.arange(6.0).view(2, 3),
        values=torch.ones(2, 3),
        components=torch.zeros(2, 3),  # as many columns as tokens, by chance
    )
    cut = batch.columns(2)
    assert cut.mask.tolist() == [[True, True], [True, False]]
    assert cut.old_logprobs.tolist() == [[0.0, 1.0], [3.0, 4.0]]
    assert cut.values.shape == (2, 2) and cut.ref_logprobs is None
    assert cut.components.shape == (2, 3) and cut.scores.shape == (2,)
    targets = Targets(
        mask=batch.mask,
        weights=torch.ones(2),
        advantages=torch.ones(2, 3),
        corrections=torch.ones(2, 3),
        returns=torch.ones(2, 3),
        kl_coef=0.1,
        kl_to_come=torch.ones(2, 3),
    ).columns(1)
    per_token = (targets.mask, targets.advantages, targets.corrections, targets.returns)
    assert all(x.shape == (2, 1) for x in (*per_token, targets.kl_to_come))
    assert targets.weights.shape == (2,) and targets.kl_coef == 0.1
