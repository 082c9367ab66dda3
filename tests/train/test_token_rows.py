import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from klamp.train.tokens import Tokens, micro_batches, padded_left

PAD = 0


def tokens(*lengths):
    """Rows of (prompt length, response length); ids count up from 1, so that each is its own."""
    ids = iter(range(1, 10_000))
    prompts, prompt_mask = padded_left([[next(ids) for _ in range(p)] for p, _ in lengths], PAD)
    width = max(1, *(t for _, t in lengths))
    responses = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, (_, t) in enumerate(lengths):
        responses[row, :t] = torch.tensor([next(ids) for _ in range(t)])
    return Tokens(
        prompts=prompts, prompt_mask=prompt_mask, responses=responses, mask=responses != PAD
    )


def written(some):
    """What each row says, without padding."""
    return [
        (p[m].tolist(), r[n].tolist())
        for p, m, r, n in zip(
            some.prompts, some.prompt_mask, some.responses, some.mask, strict=True
        )
    ]


def test_prompts_end_where_responses_begin():
    ids, mask = padded_left([[5, 6, 7], [8], [9, 3]], PAD)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8], [0, 9, 3]]
    assert mask.tolist() == [[True] * 3, [False, False, True], [False, True, True]]


def test_a_padding_id_inside_a_prompt_is_a_token():
    ids, mask = padded_left([[PAD, PAD], [4]], PAD)
    assert ids.tolist() == [[0, 0], [0, 4]] and mask.tolist() == [[True, True], [False, True]]


def test_lengths_count_prompt_and_response():
    assert tokens((3, 2), (1, 4), (2, 0)).lengths().tolist() == [5, 5, 2]


def test_a_selection_is_as_wide_as_its_own_rows_and_says_the_same():
    whole = tokens((6, 2), (2, 5), (3, 1))
    part = whole.select(torch.tensor([2, 1]))
    assert part.prompts.shape == part.prompt_mask.shape == (2, 3)
    assert part.responses.shape == part.mask.shape == (2, 5)
    assert written(part) == [written(whole)[2], written(whole)[1]]


@pytest.mark.parametrize("rows", [[1], []], ids=["row without a response", "no row"])
def test_at_least_one_response_position_stays(rows):
    part = tokens((2, 3), (2, 0)).select(torch.tensor(rows, dtype=torch.long))
    assert part.mask.shape == (len(rows), 1) and not part.mask.any()


cuts = st.tuples(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 60),
    st.randoms(use_true_random=False),
)


def cut(lengths, most, rng):
    """Some of the rows, in any order, cut into parts."""
    rows = rng.sample(range(len(lengths)), rng.randint(1, len(lengths)))
    whole = tokens(*lengths)
    return whole, rows, micro_batches(whole, torch.tensor(rows), most)


@given(cuts)
def test_micro_batches_have_every_row_once(case):
    _, rows, parts = cut(*case)
    assert sorted(torch.cat(parts).tolist()) == sorted(rows)


@given(cuts)
def test_rows_of_similar_length_are_together(case):
    whole, _, parts = cut(*case)
    lengths = whole.lengths()[torch.cat(parts)].tolist()
    assert lengths == sorted(lengths)


@given(cuts)
def test_a_part_ends_only_where_the_next_row_would_not_fit(case):
    whole, _, parts = cut(*case)
    for one, two in itertools.pairwise(parts):
        first = torch.cat([one, two[:1]])
        part = whole.select(first)
        assert part.prompts.numel() + part.responses.numel() > case[1]


@given(cuts)
def test_a_part_has_at_most_so_many_tokens_with_its_padding_or_is_one_row(case):
    whole, _, parts = cut(*case)
    for rows in parts:
        part = whole.select(rows)
        assert len(rows) == 1 or part.prompts.numel() + part.responses.numel() <= case[1]


def test_three_rows_of_four_tokens_in_eights():
    whole = tokens((2, 2), (2, 2), (2, 2))
    parts = micro_batches(whole, torch.arange(3), 8)
    assert [p.tolist() for p in parts] == [[0, 1], [2]]


def test_rows_of_one_prompt_stand_together_and_it_counts_once():
    whole = replace(tokens(*[(4, 2)] * 6), groups=torch.tensor([7, 3, 7, 3, 3, 7]))
    rows = torch.arange(6)
    assert [p.tolist() for p in micro_batches(whole, rows, 10)] == [[1, 3, 4], [0, 2, 5]]
    assert [p.tolist() for p in micro_batches(whole, rows, 9)] == [[1, 3], [4], [0, 2], [5]]
    assert [p.tolist() for p in micro_batches(whole, rows, 20)] == [[1, 3, 4, 0, 2, 5]]
    assert [p.tolist() for p in micro_batches(whole, rows[:3], 10)] == [[1], [0, 2]]


def test_groups_go_with_their_rows():
    whole = replace(tokens((2, 3), (2, 1), (1, 1)), groups=torch.tensor([4, 4, 9]))
    assert whole.select(torch.tensor([2, 0])).groups.tolist() == [9, 4]
    assert tokens((2, 3)).select(torch.tensor([0])).groups is None
    moved = whole.to(torch.device("meta"))
    assert all(x.device.type == "meta" for x in vars(moved).values())
