import itertools
import random
import statistics

import pytest
import torch

from klamp.train import seeds

CPU = torch.device("cpu")


def draws(*parts):
    return torch.rand(8, generator=seeds.generator(CPU, *parts)).tolist()


def test_a_seed_is_the_same_on_every_machine_and_in_every_version():
    # Else a run could not be resumed after an update.
    assert seeds.number("sample", 0, 1, 0) == 6564641746054941935


@pytest.mark.parametrize(
    "other",
    [("order", 0, 1, 0), ("sample", 1, 1, 0), ("sample", 0, 2, 0), ("sample", 0, 1, 1)],
    ids=["purpose", "seed", "step", "rank"],
)
def test_every_part_matters(other):
    assert seeds.number("sample", 0, 1, 0) != seeds.number(*other)
    assert draws("sample", 0, 1, 0) != draws(*other)


def test_parts_are_kept_apart():
    assert seeds.number(1, 23) != seeds.number(12, 3)
    assert seeds.number(1, 0) != seeds.number(0, 1)


def test_seeds_fit_63_bits_and_neighbours_differ_in_about_half_of_them():
    made = [seeds.number(0, step, rank) for step in range(200) for rank in range(4)]
    assert len(set(made)) == len(made)
    assert all(0 <= n < 2**63 for n in made)
    changed = [(a ^ b).bit_count() for a, b in itertools.pairwise(made)]
    # A fair coin for each of 63 bits: mean 31.5, and 4σ of a mean of 799 is 0.56.
    assert abs(statistics.mean(changed) - 31.5) < 0.56


def test_a_generator_repeats_itself_and_leaves_the_global_one_alone():
    before = torch.random.get_rng_state()
    assert draws("sample", 0, 1) == draws("sample", 0, 1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_everything_sets_what_models_and_reward_functions_draw_from():
    def both(*parts):
        seeds.everything(*parts)
        return random.random(), float(torch.rand(()))

    first = both(0, 3, 0)
    random.random(), torch.rand(5)
    assert both(0, 3, 0) == first
    other = both(0, 4, 0)
    assert other[0] != first[0] and other[1] != first[1]
