"""Shapes and dtypes in annotations are checked in every run of these tests, never outside one."""

import jaxtyping

TOWER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"  # ints are floats
jaxtyping.install_import_hook("klamp", TOWER)

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def as_users_run_it():
    """Without the shape checks that our own test runs switch on."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
