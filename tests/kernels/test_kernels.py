"""Fast paths against their references, values and gradients."""

from __future__ import annotations

import pytest
import torch

from recbft.kernels.cross_entropy import full_cross_entropy
from recbft.kernels.gelu import gelu_with_slope, gelu_with_slope_reference


def loss_and_gradients(impl, N, V, D, scale, dtype, seed=0):
    torch.manual_seed(seed)
    states = (torch.randn(N, D, dtype=dtype) * scale).requires_grad_()
    weight = torch.randn(V, D, dtype=dtype).requires_grad_()
    target = torch.randint(0, V, (N,))
    loss = full_cross_entropy(states, weight, target, impl=impl)
    return [loss, *torch.autograd.grad(3 * loss, [states, weight])]


@pytest.fixture(params=["blocks", "tiles"])
def pieces(request, monkeypatch):
    """Small pieces of either form: blocks of positions, or tiles of positions by items."""
    monkeypatch.setattr("recbft.kernels.cross_entropy.cpu.BLOCK_ELEMENTS", 40 * 16)
    monkeypatch.setattr("recbft.kernels.cross_entropy.cpu.LONGEST_ROW", 0 if request.param == "tiles" else 10**9)
    monkeypatch.setattr("recbft.kernels.cross_entropy.tiles.POSITIONS", 16)
    monkeypatch.setattr("recbft.kernels.cross_entropy.tiles.ITEMS", 15)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize(("N", "V", "D"), [(1, 1, 3), (2, 5, 4), (17, 30, 8), (300, 40, 8)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_blocked_cross_entropy_equals_the_reference(N, V, D, scale, dtype, pieces):
    tolerance = (
        {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-6 * scale + 1e-6}
    )
    ours, theirs = (loss_and_gradients(impl, N, V, D, scale, dtype) for impl in ("cpu", "reference"))
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, **tolerance)


def test_blocked_cross_entropy_passes_gradcheck(pieces):
    torch.manual_seed(0)
    states, weight = torch.randn(5, 3).double().requires_grad_(), torch.randn(7, 3).double().requires_grad_()
    target = torch.randint(0, 7, (5,))
    assert torch.autograd.gradcheck(lambda s, w: full_cross_entropy(s, w, target, impl="cpu"), [states, weight])


def test_blocked_cross_entropy_without_gradients_gives_the_loss_alone(pieces):
    torch.manual_seed(0)
    states, weight, target = torch.randn(9, 4), torch.randn(20, 4), torch.randint(0, 20, (9,))
    one, two = (full_cross_entropy(states, weight, target, impl=impl) for impl in ("cpu", "reference"))
    torch.testing.assert_close(one, two)
    assert not one.requires_grad


def test_extreme_logits_stay_finite(pieces):
    states, weight = torch.full((4, 2), 300.0).requires_grad_(), torch.tensor([[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]])
    loss = full_cross_entropy(states, weight, torch.tensor([0, 1, 2, 0]))
    loss.backward()
    assert loss.item() == pytest.approx((0 + 1200 + 600 + 0) / 4)
    assert torch.isfinite(states.grad).all()


@pytest.mark.parametrize("largest", [59.0, 61.0, 89.0, 104.0])
@pytest.mark.parametrize("found", [0, 1])
def test_logits_near_the_limits_of_single_precision_lose_nothing(largest, found, pieces):
    states, weight = torch.tensor([[largest], [-largest]]), torch.tensor([[1.0], [-1.0], [0.5]])
    target = torch.tensor([found, 2])

    def run(impl, dtype):
        given = [x.to(dtype).requires_grad_() for x in (states, weight)]
        loss = full_cross_entropy(*given, target, impl=impl)
        return [loss, *torch.autograd.grad(loss, given)]

    for one, two in zip(run("cpu", torch.float32), run("reference", torch.float64), strict=True):
        torch.testing.assert_close(one.double(), two, rtol=2e-6, atol=2e-6)


def test_an_unknown_path_is_refused():
    with pytest.raises(ValueError, match="unknown impl 'gpu'"):
        full_cross_entropy(torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1, dtype=torch.long), impl="gpu")


def test_gelu_and_its_slope_equal_the_reference_and_pass_gradcheck(monkeypatch):
    monkeypatch.setattr("recbft.kernels.gelu.BLOCK_ELEMENTS", 3 * 5)
    torch.manual_seed(1)
    a, factor = (3 * torch.randn(2, 4, 5).double()).requires_grad_(), torch.randn(5, 2).double()
    for one, two in zip(gelu_with_slope(a, factor), gelu_with_slope_reference(a, factor), strict=True):
        torch.testing.assert_close(one, two)
    assert torch.autograd.gradcheck(lambda a: gelu_with_slope(a, factor), [a])
