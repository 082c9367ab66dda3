"""Run by test_compile.py without shape checks, which torch.compile cannot trace."""

import shutil
from dataclasses import replace

import pytest
import torch
from test_invariance import VARIANTS
from torch._dynamo.utils import counters

from helpers import assert_close, make_batch

# torch.compile warns of what it does itself with an autograd.Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


@pytest.mark.parametrize("objective", [v for v in VARIANTS if "token_mean" in v.id])
def test_the_loss_is_one_graph(objective):
    batch = make_batch(exact_kl=torch.rand(8, 6))
    targets, _ = objective.prepare(batch, objective.init())
    shares = objective.shares(targets.mask, targets.weights)

    def loss_of(logprobs, values):
        out = objective.loss(logprobs, batch, targets, shares, values=values)
        return out.loss, {name: m.sum for name, m in out.metrics.items()}

    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    found, wanted = [], []
    for function, results in ((loss_of, wanted), (compiled, found)):
        logprobs = (batch.old_logprobs + 0.1).requires_grad_()
        values = (batch.values + 0.1).requires_grad_()
        loss, metrics = function(logprobs, values)
        loss.backward()
        results.extend([loss.detach(), logprobs.grad, metrics])
    assert_close(found[:2], wanted[:2])
    assert found[2].keys() == wanted[2].keys()
    for name in wanted[2]:
        assert float(found[2][name]) == pytest.approx(float(wanted[2][name]), rel=1e-5, abs=1e-6), (
            name
        )


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_the_compiled_loss_is_the_loss():
    objective = next(v.values[0] for v in VARIANTS if v.id == "klamp-token_mean")
    batch = make_batch()
    targets, _ = objective.prepare(batch, objective.init())
    shares = objective.shares(targets.mask, targets.weights)
    found = []
    for function in (objective.compiled_loss, objective.plain_loss):
        torch.manual_seed(0)
        logprobs = (batch.old_logprobs + 0.1 * torch.rand(8, 6)).requires_grad_()
        out = function(logprobs, batch, targets, shares)
        out.loss.backward()
        numbers = {name: float(m) for name, m in out.metrics.items()}
        found.append((float(out.loss), logprobs.grad, numbers))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-7)
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-5, abs=1e-6)


def test_half_precision_compiles_too():
    objective = VARIANTS[0].values[0]
    batch = make_batch()
    targets, _ = objective.prepare(batch, objective.init())
    shares = objective.shares(targets.mask, targets.weights)
    compiled = torch.compile(
        lambda x: objective.loss(x, batch, targets, shares), fullgraph=True, backend="aot_eager"
    )
    logprobs = batch.old_logprobs.half().requires_grad_()
    out = compiled(logprobs)
    out.loss.backward()
    assert out.loss.dtype == torch.float32
    assert logprobs.grad.dtype == torch.float16
    assert float(out.metrics["actor/ratio_mean"]) == pytest.approx(1.0, abs=1e-3)


def test_a_moving_coefficient_does_not_compile_anew_each_batch():
    objective = next(v.values[0] for v in VARIANTS if v.id == "klamp-token_mean")
    batch = make_batch()
    targets, _ = objective.prepare(batch, objective.init())
    shares = objective.shares(targets.mask, targets.weights)
    compiled = torch.compile(
        lambda t: objective.loss(batch.old_logprobs, batch, t, shares).loss,
        fullgraph=True,
        backend="aot_eager",
    )
    counters.clear()
    for i in range(8):
        compiled(replace(targets, kl_coef=0.05 + 0.01 * i))
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_an_objective_too_many_is_no_error():
    """Past torch's limit of compilations the same is done without one."""
    chosen = next(v.values[0] for v in VARIANTS if v.id == "klamp-token_mean")
    batch = make_batch()
    logprobs = batch.old_logprobs + 0.1
    with torch._dynamo.config.patch(recompile_limit=1):
        for low in (0.1, 0.2, 0.3):
            objective = replace(chosen, surrogate=replace(chosen.surrogate, low=low))
            targets, _ = objective.prepare(batch, objective.init())
            shares = objective.shares(targets.mask, targets.weights)
            found = objective.compiled_loss(logprobs, batch, targets, shares).loss
            wanted = objective.plain_loss(logprobs, batch, targets, shares).loss
            assert float(found) == pytest.approx(float(wanted), abs=1e-6)
