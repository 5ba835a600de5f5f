"""The log of a mean in Triton against PyTorch in float64; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", minversion="3.3")

from recbft.kernels import dispatch
from recbft.kernels.log_mean import scalar_log_precision
from recbft.kernels.log_mean import triton as kernels

pytestmark = pytest.mark.usefixtures("scratch_full_of_nan")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(0, 3, 4), (3, 0, 4), (1, 1, 1), (1, 7, 32), (2, 4, 32), (3, 3, 32), (5, 7, 33), (2, 3, 600)]


@pytest.fixture(autouse=True)
def by_triton(monkeypatch):
    monkeypatch.setattr(kernels, "ELEMENTS", 256)
    monkeypatch.setattr(dispatch, "serves_steps", lambda x: x.dtype == torch.float32)


def drawn(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (1e-3 + 50 * torch.rand(shape, generator=g, dtype=torch.float64).square()).to(DEVICE)


def value_and_gradient(leaf, dtype, view=lambda x: x):
    leaf = leaf.to(dtype, copy=True).requires_grad_()
    y = scalar_log_precision(view(leaf))
    weights = torch.arange(1, y.numel() + 1, device=DEVICE, dtype=dtype).cos().view_as(y)
    return [x.detach().double() for x in (y, torch.autograd.grad((y * weights).sum(), leaf)[0])]


def compare(leaf, view=lambda x: x):
    exact = value_and_gradient(leaf, torch.float64, view)
    found, again = (value_and_gradient(leaf, torch.float32, view) for _ in range(2))
    for ours, same, theirs in zip(found, again, exact, strict=True):
        assert torch.equal(ours, same)
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients(size):
    for seed in range(2):
        compare(drawn(*size, seed=seed))


def test_what_all_coordinates_share_is_read_where_it_lies():
    compare(drawn(3, 5, 1), lambda x: x.expand(3, 5, 8))


def test_rows_may_lie_in_any_order():
    compare(drawn(3, 5, 8), lambda x: x.transpose(0, 1))
    compare(drawn(3, 5, 8), lambda x: x.transpose(0, 2))
    compare(drawn(3, 5, 8), lambda x: x[:, ::2])


def test_what_is_not_a_number_stays_visible():
    x = drawn(2, 3, 4).float()
    x[1, 2, 3] = float("nan")
    assert scalar_log_precision(x).isnan().nonzero().tolist() == [[1, 2]]
