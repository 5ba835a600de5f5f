"""GELU with its slope in Triton against autograd in float64; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", minversion="3.3")

from recbft.kernels import gelu
from recbft.kernels.gelu import triton as kernels

pytestmark = pytest.mark.usefixtures("scratch_full_of_nan")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def by_triton(monkeypatch):
    monkeypatch.setattr(gelu, "_fused", lambda a, factor: kernels)


@pytest.mark.parametrize("seeds", [None, 2])
@pytest.mark.parametrize(
    ("N", "F", "r"), [(0, 4, 2), (2, 1, 1), (6, 33, 3), (64, 40, 16), (128, 64, 17), (132, 65, 5), (12, 80, 70)]
)
def test_values_and_gradients_equal_the_reference_s(N, F, r, seeds, by_triton):
    g = torch.Generator().manual_seed(N)
    a = 3 * torch.randn(N, 1, F, generator=g, dtype=torch.float64).to(DEVICE)
    shape = (F, r) if seeds is None else (seeds, F, r)
    factor = torch.randn(shape, generator=g, dtype=torch.float64).to(DEVICE)
    seen = [torch.randn(N, 1, width, generator=g, dtype=torch.float64).to(DEVICE) for width in (F, r)]

    def run(function, dtype):
        leaf = a.to(dtype, copy=True).requires_grad_()
        outputs = function(leaf, factor.to(dtype))
        loss = sum((y * s.to(dtype)).sum() for y, s in zip(outputs, seen, strict=True))
        return [x.detach().double() for x in (*outputs, *torch.autograd.grad(loss, [leaf]))]

    exact = run(gelu.gelu_with_slope_reference, torch.float64)
    found, again = (run(gelu.gelu_with_slope, torch.float32) for _ in range(2))
    for ours, same, theirs in zip(found, again, exact, strict=True):
        assert torch.equal(ours, same)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
    alone = gelu.slope_product(a.float(), factor.float()).double()
    torch.testing.assert_close(alone, exact[1], rtol=1e-5, atol=2e-5)


def test_it_is_exact_over_its_range():
    a = torch.linspace(-15, 15, 20_001, device=DEVICE)[None]
    found = kernels.forward(a, torch.zeros(a.shape[1], 1, device=DEVICE))[0]
    exact = torch.nn.functional.gelu(a.double())
    assert (found - exact).abs().max() < 5e-7  # half a unit of the last digit from 8 on, where a is its own GELU


def test_what_is_not_a_number_stays_visible(by_triton):
    a = torch.tensor([[0.0, float("nan")]], device=DEVICE)
    y, z = gelu.gelu_with_slope(a, torch.eye(2, device=DEVICE))
    assert y.isnan().tolist() == [[False, True]] and z.isnan().any()
