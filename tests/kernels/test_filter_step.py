"""The filter's steps with written-out backwards against the functions of ``recbft.core``."""

from __future__ import annotations

import pytest
import torch

from recbft import core
from recbft.core import Belief
from recbft.kernels import filter_step


def draw(*shape, low=0.1, high=3.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (low + (high - low) * torch.rand(*shape, generator=g, dtype=torch.float64)).requires_grad_()


def assert_same_values_and_gradients(fast, reference, inputs):
    results = []
    for function in (fast, reference):
        values = function(*inputs)
        values = values if isinstance(values, tuple) else (values,)
        g = torch.Generator().manual_seed(9)
        loss = sum((v * torch.randn(v.shape, generator=g, dtype=v.dtype)).sum() for v in values)
        results.append([*values, *torch.autograd.grad(loss, inputs)])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cap", [2.0, 1e6])
def test_reml(cap):
    S, n = draw(2, 3, 4, 5), draw(2, 3, 4, low=1, high=9, seed=1)
    how = {"prior_scale": 0.2, "prior_dof": 1.5, "cap": cap}
    assert_same_values_and_gradients(
        lambda S, n: filter_step.reml_precision(S, n, **how), lambda S, n: core.reml_precision(S, n, **how), [S, n]
    )


def test_reml_where_nothing_was_read():
    S, n = torch.zeros(1, 1, 2, 3).double().requires_grad_(), torch.tensor([[[0.0, 2.0]]]).double().requires_grad_()
    r = filter_step.reml_precision(S, n, prior_scale=0.2, prior_dof=1.0, cap=1e6)
    r.sum().backward()
    assert (r[0, 0, 0] == 0).all() and torch.isfinite(S.grad).all() and torch.isfinite(n.grad).all()


@pytest.mark.parametrize("ramp", [0.0, 0.3, 1.0])
def test_update(ramp):
    inputs = [draw(2, 3, 4, seed=seed) for seed in range(4)]
    assert_same_values_and_gradients(
        lambda h, lam, e, r: tuple(filter_step.kalman_update(Belief(h, lam), e, r, ramp=ramp)),
        lambda h, lam, e, r: tuple(core.kalman_update(Belief(h, lam), e, r, ramp=ramp)[0]),
        inputs,
    )


@pytest.mark.parametrize("shape", [(2, 3, 4), (4,)])
@pytest.mark.parametrize("cap", [1.0, 1e6])
def test_predict(shape, cap):
    lam, J, Q = draw(2, 3, 4), draw(*shape, low=-1.2, high=0.5, seed=1), draw(4, seed=2)
    assert_same_values_and_gradients(
        lambda lam, J, Q: filter_step.predict_precision(lam, J, Q, low=1e-3, cap=cap),
        lambda lam, J, Q: core.predict_precision(lam, J, Q, cap=cap).clamp(min=1e-3),
        [lam, J, Q],
    )


def test_predict_without_slope_or_noise_takes_scalars():
    lam, zero = draw(2, 3, 4), torch.zeros(()).double()
    assert torch.equal(filter_step.predict_precision(lam, zero, zero, low=1e-3, cap=1e6), lam)
