"""Precision by counts in Triton against PyTorch in float64; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", minversion="3.3")

from recbft.kernels import dispatch
from recbft.kernels.count_precision import count_precision
from recbft.kernels.count_precision import triton as kernels

pytestmark = pytest.mark.usefixtures("scratch_full_of_nan")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(0, 3), (1, 1), (1, 255), (2, 128), (1, 257), (30, 50)]  # programs of 256 tokens
BOUNDS = {"low": 0.8, "cap": 2.5}


@pytest.fixture(autouse=True)
def by_triton(monkeypatch):
    monkeypatch.setattr(kernels, "ELEMENTS", 256)
    monkeypatch.setattr(dispatch, "serves_steps", lambda x: x.dtype == torch.float32)


def value_and_gradient(scale, base, items, dtype, bounds=BOUNDS):
    scale = torch.tensor(scale, dtype=dtype, device=DEVICE, requires_grad=True)
    tau = count_precision(scale, base.to(dtype), items, **bounds)
    weights = torch.arange(1, tau.numel() + 1, device=DEVICE, dtype=dtype).cos().view_as(tau)
    return [x.detach().double() for x in (tau, torch.autograd.grad((tau * weights).sum(), scale)[0])]


def drawn(*size, seed=0):
    """Quantiles of twenty items, and items."""
    g = torch.Generator().manual_seed(seed)
    return torch.rand(20, generator=g).to(DEVICE), torch.randint(20, size, generator=g).to(DEVICE)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients(size, kind):
    for seed in range(3):
        base, items = drawn(*size, seed=seed)
        exact = value_and_gradient(3.0, base, items.to(kind), torch.float64)
        found, again = (value_and_gradient(3.0, base, items.to(kind), torch.float32) for _ in range(2))
        assert found[0].shape == (*size, 1)
        for ours, same, theirs in zip(found, again, exact, strict=True):
            assert torch.equal(ours, same)
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=5e-6)


def test_a_gradient_passes_at_the_bounds_as_pytorch_s_clamp_has_it(monkeypatch):
    base, items = torch.tensor([0.0, 0.5, 1.0], device=DEVICE), torch.tensor([[0, 1, 2, 2]], device=DEVICE)
    least = torch.tensor(math.log(2)).item()  # as single precision has it
    most = (torch.tensor(2.0) + math.log(2)).item()
    bounds = {"low": least, "cap": most}
    found = value_and_gradient(2.0, base, items, torch.float32, bounds)
    monkeypatch.setattr(dispatch, "serves_steps", lambda x: False)
    plain = value_and_gradient(2.0, base, items, torch.float32, bounds)
    assert found[1] != 0 and all(map(torch.allclose, found, plain))


def test_items_may_lie_in_any_order():
    base, items = drawn(7, 5)
    turned = items.T.contiguous().T
    for ours, theirs in zip(*(value_and_gradient(3.0, base, i, torch.float32) for i in (items, turned)), strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_not_a_number_stays_visible():
    base, items = drawn(7, 5)
    tau, slope = value_and_gradient(float("nan"), base, items, torch.float32)
    assert tau.isnan().all() and slope == 0  # as clamp has it


def test_a_range_of_each_row_is_left_to_pytorch(monkeypatch):
    base, items = drawn(7, 5)
    monkeypatch.setattr(kernels, "count_precision", None)
    scale = torch.linspace(0.5, 2, 7, device=DEVICE)[:, None]
    found = count_precision(scale, base, items, **BOUNDS)
    assert torch.equal(found[..., 0], (scale * base[items] + math.log(2)).clamp(0.8, 2.5))
