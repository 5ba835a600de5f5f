"""REML, sandwich, update and prediction: every path against the functions of ``recbft.core`` in float64."""

from __future__ import annotations

import importlib

import pytest
import torch

from recbft.core import (
    Belief,
    SiluMoments,
    kalman_update_ref,
    predict_precision_ref,
    reml_precision_ref,
    sandwich_precision_ref,
)
from recbft.kernels import dispatch
from recbft.kernels.filter_step import kalman_update, predict_precision, reml_precision, sandwich_precision
from tests.tolerances import assert_as_near_as, assert_same, values_and_gradients

pytestmark = pytest.mark.usefixtures("scratch_full_of_nan")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SINGLE, DOUBLE = torch.float32, torch.float64


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    if dispatch.missing("triton") is None:
        kernels = importlib.import_module("recbft.kernels.filter_step.triton")
        monkeypatch.setattr(kernels, "SUMMED", 512)
        monkeypatch.setattr(kernels, "ELEMENTS", 256)


def draw(*shape, low=0.1, high=3.0, seed=0):
    g = torch.Generator().manual_seed(seed + sum(shape))
    return low + (high - low) * torch.rand(shape, generator=g, dtype=DOUBLE)


def run(function, inputs, dtype):
    return values_and_gradients(function, inputs, dtype, DEVICE if dtype == SINGLE else "cpu")


def check(fast, reference, inputs, impl):
    """The path in float64 where it serves that; in float32 no farther than twice what the reference is."""
    exact = run(reference, inputs, DOUBLE)
    if impl == "torch":
        assert_same(run(fast, inputs, DOUBLE), exact)
    found, again = run(fast, inputs, SINGLE), run(fast, inputs, SINGLE)
    assert all(torch.equal(one, two) for one, two in zip(found, again, strict=True))
    assert_as_near_as(found, run(reference, inputs, SINGLE), exact, slack=2e-6)


@pytest.mark.parametrize("cap", [2.0, 1e6])
def test_reml(cap):
    how = {"prior_scale": 0.2, "prior_dof": 1.5, "cap": cap}
    inputs = draw(2, 3, 4, 5), draw(2, 3, 4, low=1, high=9, seed=1)
    check(lambda S, n: reml_precision(S, n, **how), lambda S, n: reml_precision_ref(S, n, **how), inputs, "torch")


def test_reml_where_nothing_was_read():
    S, n = torch.zeros(1, 1, 2, 3).double().requires_grad_(), torch.tensor([[[0.0, 2.0]]]).double().requires_grad_()
    r = reml_precision(S, n, prior_scale=0.2, prior_dof=1.0, cap=1e6)
    r.sum().backward()
    assert (r[0, 0, 0] == 0).all() and torch.isfinite(S.grad).all() and torch.isfinite(n.grad).all()


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(("size", "ramp"), [((0, 4), 1.0), ((7, 33), 0.0), ((130, 48), 0.3), ((2, 3, 4), 1.0)])
@pytest.mark.parametrize("kept", [2, 0, 1], ids=["both", "mean", "precision"])
def test_update(size, ramp, kept, impl):
    inputs = [draw(*size, low=-1, high=1), draw(*size, seed=1), draw(*size, low=-1, seed=2), draw(*size, low=0, seed=3)]
    chosen = slice(None) if kept == 2 else slice(kept, kept + 1)

    def fast(h, lam, e, r):
        return tuple(kalman_update(Belief(h, lam), e, r, ramp=ramp, impl=impl)[0][chosen])

    def plain(h, lam, e, r):
        unread = 0 * (h + lam + e + r)  # so that each has a gradient
        return tuple(x + unread for x in kalman_update_ref(Belief(h, lam), e, r, ramp=ramp)[0][chosen])

    check(fast, plain, inputs, impl)
    single = [x.float().to(DEVICE) for x in inputs]
    gains = [f(Belief(*single[:2]), *single[2:], ramp=ramp)[1] for f in (kalman_update_ref, kalman_update)]
    torch.testing.assert_close(*gains)


@pytest.mark.parametrize("impl", ["torch", "c", "triton"])
@pytest.mark.parametrize("jacobian", ["each", "shared", "scalar"])
@pytest.mark.parametrize("noise", ["each", "scalar"])
@pytest.mark.parametrize("size", [(1, 1), (7, 33), (640, 64)])  # the last by several threads
def test_prediction(size, noise, jacobian, impl):
    N, D = size
    lam, Q = draw(N, D, low=0.01, high=5), draw(*((D,) if noise == "each" else ()), low=0, seed=2)
    J = draw(*{"each": (N, D), "shared": (D,), "scalar": ()}[jacobian], low=-1.5, high=1.0, seed=1)
    bounds = {"low": 0.05, "cap": 3.0}

    def fast(lam, Q, J=J):
        return predict_precision(lam, J.to(lam), Q, **bounds, impl=impl)

    def plain(lam, Q, J=J):
        return predict_precision_ref(lam, J.to(lam), Q, cap=3.0).clamp(min=0.05)

    check(fast, plain, [lam, Q, J] if jacobian == "each" else [lam, Q], impl)


def test_prediction_without_slope_or_noise_takes_scalars_and_axes_in_front_may_lie_anyhow():
    lam, zero = draw(2, 3, 4), torch.zeros(()).double()
    assert torch.equal(predict_precision(lam, zero, zero, low=1e-3, cap=1e6), lam)
    odd = [draw(4, 6, 3, seed=seed).transpose(0, 2).float().requires_grad_() for seed in range(2)]
    predict_precision(*odd, torch.zeros(4), low=0.01, cap=9.0).sum().backward()  # a gradient of stride 0
    assert all(x.grad.isfinite().all() for x in odd)


@pytest.mark.parametrize("impl", ["c", "triton"])
def test_what_is_not_a_number_stays_visible(impl):
    lam, J = torch.ones(2, 3, device=DEVICE), torch.zeros(2, 3, device=DEVICE)
    J[0, 1], lam[1, 2] = float("nan"), float("nan")
    after = predict_precision(lam, J, torch.ones(3, device=DEVICE), low=0.01, cap=9.0, impl=impl)
    assert after.isnan().nonzero().tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize("impl", ["triton"])
def test_steps_of_other_shapes_and_types_are_not_for_one_pass(impl):
    one, narrow = torch.ones(2, 3), torch.ones(2, 1)
    for innovation, observed in ((one, narrow), (one.double(), one)):
        with pytest.raises(ValueError, match="triton path declined: needs float32 operands of one shape"):
            kalman_update(Belief(one, one), innovation, observed, impl=impl)
    for J, Q in ((torch.ones(3, requires_grad=True), torch.ones(3)), (torch.ones(3), one), (one.double(), one[0])):
        with pytest.raises(ValueError, match="triton path declined: needs float32, a Jacobian of each token"):
            predict_precision(one, J, Q, low=0.1, cap=1.0, impl=impl)


@pytest.mark.parametrize("impl", ["c"])
@pytest.mark.parametrize("cap", [100.0, 3.0])
@pytest.mark.parametrize("centre", ["root", "innovation"])
def test_the_sandwich_precision(centre, cap, impl):
    g = torch.Generator().manual_seed(0)
    weights = 0.3 * torch.randn(2, 3, 5, 7, generator=g, dtype=DOUBLE)
    weights[0, 0, 0] = 0  # reads nothing
    weights[1, 1, 1, 2:] = 0
    weights[1, 1, 1, :2] = torch.tensor([1.0, -1.0])  # whose sum is 0
    weights[0, 1, 2, 1:] = 0  # one key, no spread
    v, squares = torch.randn(2, 3, 7, 9, generator=g, dtype=DOUBLE), weights.square()
    sums = weights @ v, weights.sum(-1), squares.sum(-1), squares @ v, squares @ v.square()
    how = {"cap": cap, "centre": centre}
    exact = run(lambda *x: sandwich_precision_ref(SiluMoments(*x), **how), sums, DOUBLE)
    plain = run(lambda *x: sandwich_precision_ref(SiluMoments(*x), **how), sums, SINGLE)
    found = run(lambda *x: sandwich_precision(SiluMoments(*x), **how, impl=impl), sums, SINGLE)
    assert_as_near_as(found, plain, exact, slack=3e-6)


@pytest.mark.parametrize("impl", ["c"])
@pytest.mark.parametrize("centre", ["root", "innovation"])
def test_the_sandwich_precision_of_weights_that_cancel_is_held_by_the_floor(centre, impl):
    sizes = 1e-5, 1e-4, 1.0, 5e-4, 3e-6  # s1^2 = 1e-8, the floor 1e-6; m = 1e-3 about the root, a spread of 3e-6
    each = torch.tensor([1.0, 1.25, 1.5], dtype=DOUBLE)
    sums = [
        size * (torch.ones(1, 1, 1).double() if i in (1, 2) else each.expand(1, 1, 1, 3))
        for i, size in enumerate(sizes)
    ]
    how = {"cap": 100.0, "centre": centre}
    exact = run(lambda *x: sandwich_precision_ref(SiluMoments(*x), **how), sums, DOUBLE)
    found = run(lambda *x: sandwich_precision(SiluMoments(*x), **how, impl=impl), sums, SINGLE)
    assert exact[0][0, 0, 0, 0] == pytest.approx(1 / 3, rel=5e-3)
    for one, true in zip(found, exact, strict=True):
        torch.testing.assert_close(one, true, rtol=1e-4, atol=0)
