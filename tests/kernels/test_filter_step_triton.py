"""Update and prediction in Triton against the analytic path in float64; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", minversion="3.3")

from recbft.core import Belief
from recbft.kernels import filter_step
from recbft.kernels.filter_step import analytic
from recbft.kernels.filter_step import triton as kernels
from recbft.kernels.filter_step.fused import Fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(0, 4), (1, 1), (7, 33), (130, 48)]


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    monkeypatch.setattr(kernels, "SUMMED", 512)
    monkeypatch.setattr(kernels, "ELEMENTS", 256)


@pytest.fixture(autouse=True)
def scratch_full_of_nan():
    """PyTorch fills new memory with NaN where it is asked to be deterministic."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def drawn(*shape, low=-1.0, high=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (low + (high - low) * torch.rand(shape, generator=g, dtype=torch.float64)).to(DEVICE)


def values_and_gradients(function, inputs, dtype):
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
    outputs = function(*leaves)
    places = (torch.arange(1, y.numel() + 1, device=DEVICE, dtype=dtype).cos().view_as(y) for y in outputs)
    loss = sum((y * place).sum() for y, place in zip(outputs, places, strict=True))
    return [x.detach().double() for x in (*outputs, *torch.autograd.grad(loss, leaves))]


def compare(function, inputs):
    """``function(path, *inputs)`` by the kernels and by the analytic path."""
    exact = values_and_gradients(lambda *x: function(analytic, *x), inputs, torch.float64)
    found, again = (
        values_and_gradients(lambda *x: function(Fused(kernels), *x), inputs, torch.float32) for _ in range(2)
    )
    for ours, same, theirs in zip(found, again, exact, strict=True):
        assert torch.equal(ours, same)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("ramp", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("size", SIZES)
def test_update(size, ramp):
    inputs = [drawn(*size), drawn(*size, low=0.01, high=5, seed=1), drawn(*size, seed=2), drawn(*size, low=0, seed=3)]
    compare(lambda path, h, lam, e, r: path.kalman_update(Belief(h, lam), e, r, ramp=ramp), inputs)


@pytest.mark.parametrize("jacobian", ["each", "shared", "scalar"])
@pytest.mark.parametrize("noise", ["each", "scalar"])
@pytest.mark.parametrize("size", SIZES)
def test_prediction(size, noise, jacobian):
    N, D = size
    lam, Q = drawn(N, D, low=0.01, high=5), drawn(*((D,) if noise == "each" else ()), low=0, seed=2)
    J = drawn(*{"each": (N, D), "shared": (D,), "scalar": ()}[jacobian], low=-1.5, seed=1)
    bounds = {"low": 0.05, "cap": 3.0}
    if jacobian == "each":
        compare(lambda path, lam, Q, J: (path.predict_precision(lam, J, Q, **bounds),), [lam, Q, J])
    else:
        compare(lambda path, lam, Q: (path.predict_precision(lam, J.to(lam.dtype), Q, **bounds),), [lam, Q])


def test_axes_in_front_odd_strides_and_expanded_gradients_change_nothing():
    inputs = [drawn(4, 6, 3, low=0.1, seed=seed).transpose(0, 2) for seed in range(4)]
    compare(lambda path, h, lam, e, r: path.kalman_update(Belief(h, lam), e, r, ramp=1.0), inputs)
    lam, J = (x.float().requires_grad_() for x in inputs[:2])
    Fused(kernels).predict_precision(lam, J, torch.zeros(4, device=DEVICE), low=0.01, cap=9.0).sum().backward()
    assert lam.grad.isfinite().all() and J.grad.isfinite().all()


def test_what_is_not_a_number_stays_visible():
    lam, J = torch.ones(2, 3, device=DEVICE), torch.zeros(2, 3, device=DEVICE)
    J[0, 1], lam[1, 2] = float("nan"), float("nan")
    after = Fused(kernels).predict_precision(lam, J, torch.ones(3, device=DEVICE), low=0.01, cap=9.0)
    assert after.isnan().nonzero().tolist() == [[0, 1], [1, 2]]


def test_a_step_of_training_is_the_same_with_them(monkeypatch):
    def gradients():
        inputs = [drawn(2, 5, 8, low=0.1, seed=seed).float().requires_grad_() for seed in range(4)]
        belief = filter_step.kalman_update(Belief(*inputs[:2]), *inputs[2:], ramp=0.5)
        noise = torch.full((8,), 0.1, device=DEVICE, requires_grad=True)
        after = filter_step.predict_precision(belief.precision, belief.mean, noise, low=0.01, cap=9.0)
        return torch.autograd.grad(after.sum() + belief.mean.square().sum(), [*inputs, noise])

    plain = gradients()
    monkeypatch.setattr(filter_step, "_path", lambda x, plain: Fused(kernels))
    for ours, theirs in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=3e-6)
