import pytest

from klamp.objective.nearest import nearest


@pytest.mark.parametrize(
    ("given", "meant"),
    [("klmp", "klamp"), ("trl", "trlx"), ("open_instruct", "open-instruct"), ("rol", "roll")],
)
def test_a_near_miss_names_what_was_meant(given, meant):
    known = ["open-instruct", "openrlhf", "roll", "trlx", "klamp"]
    assert nearest(given, known) == f"did you mean '{meant}'?"


def test_where_nothing_is_near_all_names_are_given_once_and_in_order():
    assert nearest("zzz", ["b", "a", "b"]) == "one of b, a"
