"""Dropout by 16 random bits: how many of all bits are kept, how they are scaled, and what gradients see."""

from __future__ import annotations

import pytest
import torch

from recbft.kernels.dropout import PATHS, Dropout, dropout, mask_of, random_bits, scaled_mask

ALL_BITS = torch.arange(-(2**15), 2**15).to(torch.int16)


@pytest.mark.parametrize("p", [0.0, 1e-5, 0.1, 0.2, 0.5, 0.999])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_of_all_bits_the_share_p_is_dropped_and_the_rest_scaled_to_a_mean_of_one(p, dtype):
    mask = mask_of(ALL_BITS, p, dtype)
    kept = int((mask > 0).sum())
    assert abs((1 - kept / 2**16) - p) <= 2**-17 and mask.dtype == dtype
    assert mask.unique().tolist() == ([0.0] if kept < 2**16 else []) + [torch.tensor(2**16 / kept, dtype=dtype).item()]


def test_at_a_rate_near_one_something_is_kept():
    assert mask_of(ALL_BITS, 1 - 1e-9, torch.float64).unique().tolist() == [0.0, 2.0**16]


def test_bits_are_fair():
    bits = random_bits((4, 25_001), torch.Generator().manual_seed(0)).long() & 0xFFFF
    for place in range(16):
        share = ((bits >> place) & 1).double().mean().item()
        assert abs(share - 0.5) < 5 * 0.5 / bits.numel() ** 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_is_dropped_passes_no_gradient_and_the_rest_is_scaled(dtype):
    x = torch.linspace(1, 2, 4000, dtype=dtype).reshape(40, 100).requires_grad_()
    y = dropout(x, 0.25)
    (grad,) = torch.autograd.grad((y * torch.arange(100.0)).sum(), x)
    kept = y != 0
    assert abs(kept.double().mean().item() - 0.75) < 5 * (0.1875 / 4000) ** 0.5
    torch.testing.assert_close(y, torch.where(kept, x / 0.75, 0))
    torch.testing.assert_close(grad, torch.where(kept, torch.arange(100, dtype=dtype) / 0.75, 0))


def test_nothing_is_dropped_at_a_rate_of_zero_nor_outside_training():
    x, layer = torch.ones(3), Dropout(0.5)
    state = torch.get_rng_state()
    assert dropout(x, 0.0) is x and layer.eval()(x) is x
    assert torch.equal(torch.get_rng_state(), state)
    assert set(layer.train()(torch.ones(100)).tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("impl", ["c"])
@pytest.mark.parametrize("p", [0.1, 0.999])
def test_both_paths_on_a_cpu_draw_and_scale_alike(p, impl):
    x = torch.randn(1023, 513, requires_grad=True)  # whose bits meet the least that is kept some times
    with torch.random.fork_rng():
        torch.manual_seed(3)
        y = dropout(x, p)
        (grad,) = torch.autograd.grad(y.sum(), x)
        torch.manual_seed(3)
        mask = scaled_mask(x, p)
    assert torch.equal(y, x * mask) and torch.equal(grad, mask)
    assert PATHS[impl].decline(x.double()) == "serves float32, got torch.float64"
