"""GELU with its slope: every path against its definition in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from recbft.kernels.gelu import gelu_with_slope, gelu_with_slope_ref, slope_product
from tests.tolerances import assert_as_near_as, assert_same, values_and_gradients

pytestmark = pytest.mark.usefixtures("scratch_full_of_nan")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(function, a, factor, dtype):
    return values_and_gradients(lambda a: function(a, factor.to(a)), [a], dtype, DEVICE)


@pytest.mark.parametrize("impl", ["torch", "c", "triton"])
@pytest.mark.parametrize("seeds", [None, 2])
@pytest.mark.parametrize(("N", "width", "rank"), [(2, 1, 1), (6, 33, 3), (132, 65, 17), (12, 80, 70)])
def test_values_and_gradients_equal_the_reference_s(N, width, rank, seeds, impl, monkeypatch):
    monkeypatch.setattr("recbft.kernels.gelu.torch.BLOCK_ELEMENTS", 5 * width)
    g = torch.Generator().manual_seed(N)
    a = 3 * torch.randn(N, 1, width, generator=g, dtype=torch.float64)
    factor = torch.randn(*([seeds] if seeds else []), width, rank, generator=g, dtype=torch.float64)
    exact = run(gelu_with_slope_ref, a, factor, torch.float64)
    plain, found, again = (
        run(f, a, factor, torch.float32)
        for f in (gelu_with_slope_ref, *2 * [lambda a, factor: gelu_with_slope(a, factor, impl=impl)])
    )
    assert all(torch.equal(one, two) for one, two in zip(found, again, strict=True))
    assert_as_near_as(found, plain, exact, slack=1e-6)
    alone = slope_product(a.float().to(DEVICE), factor.float().to(DEVICE), impl=impl)
    assert_as_near_as([alone.double().cpu()], plain[1:2], exact[1:2], slack=1e-6)


def test_blocks_equal_the_reference_and_pass_gradcheck(monkeypatch):
    monkeypatch.setattr("recbft.kernels.gelu.torch.BLOCK_ELEMENTS", 3 * 5)
    torch.manual_seed(1)
    a, factor = (3 * torch.randn(2, 4, 5).double()).requires_grad_(), torch.randn(5, 2).double()
    assert_same(gelu_with_slope(a, factor), gelu_with_slope_ref(a, factor))
    assert torch.autograd.gradcheck(lambda a: gelu_with_slope(a, factor), [a])


@pytest.mark.parametrize("impl", ["c", "triton"])
def test_gelu_is_exact_over_its_range(impl):
    a = torch.linspace(-15, 15, 20_001, device=DEVICE)[None]
    found = gelu_with_slope(a, torch.zeros(a.shape[1], 1, device=DEVICE), impl=impl)[0]
    assert (found - F.gelu(a.double())).abs().max() < 5e-7  # PyTorch's own: 3.7e-7 with AVX2, 1.1e-6 with AVX-512


@pytest.mark.parametrize("impl", ["c", "triton"])
def test_what_is_not_a_number_stays_visible(impl):
    a = torch.tensor([[0.0, float("nan")]], device=DEVICE)
    y, z = gelu_with_slope(a, torch.eye(2, device=DEVICE), impl=impl)
    assert y.isnan().tolist() == [[False, True]] and z.isnan().any()


def test_a_call_without_tokens_is_served():
    y, z = gelu_with_slope(torch.zeros(0, 4), torch.zeros(4, 2))
    assert y.shape == (0, 4) and z.shape == (0, 2)
