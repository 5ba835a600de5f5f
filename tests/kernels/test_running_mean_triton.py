"""The running mean in Triton against plain PyTorch in float64; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", minversion="3.3")

from recbft.core import SequenceContext
from recbft.kernels import dispatch
from recbft.kernels import triton_parts as parts
from recbft.kernels.running_mean import remember_tokens
from recbft.kernels.running_mean import triton as kernels

pytestmark = pytest.mark.usefixtures("scratch_full_of_nan")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(0, 4, 3), (1, 1, 1), (1, 7, 33), (1, 8, 33), (3, 3, 33), (5, 31, 70), (2, 40, 9)]  # tiles of eight tokens


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    monkeypatch.setattr(kernels, "ELEMENTS", 256)
    monkeypatch.setattr(kernels, "COLUMNS", 32)
    monkeypatch.setattr(kernels, "MOST_PARTS", 5)
    monkeypatch.setattr(parts, "ADDED", 32)


@pytest.fixture
def by_triton(monkeypatch):
    monkeypatch.setattr(dispatch, "serves_steps", lambda x: x.dtype == torch.float32)


def made(B, T, D, *, real, seed=0):
    """A mean, values, and a context of which about the share ``real`` is no padding."""
    g = torch.Generator().manual_seed(seed)
    mean, values = torch.randn(D, generator=g), 1 + torch.randn(B, T, D, generator=g)
    segment = torch.where(torch.rand(B, T, generator=g) < real, 2, -1)
    context = SequenceContext(segment.to(DEVICE), torch.arange(T, device=DEVICE).expand(B, T))
    return mean.to(DEVICE), values.to(DEVICE), context


def moved(mean, values, context, updates, dtype=torch.float32, **how):
    """What the mean was, and what it is."""
    mean = mean.to(dtype, copy=True)
    before = remember_tokens(mean, values.to(dtype), context, torch.tensor(updates, device=DEVICE), **how)
    return before.double(), mean.double()


@pytest.mark.parametrize("updates", [0, 1, 12])
@pytest.mark.parametrize("real", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("size", SIZES)
def test_it_moves_as_the_reference_does(size, real, updates, by_triton):
    for seed in range(2):
        given = made(*size, real=real, seed=seed)
        before, after = moved(*given, updates)
        exact = moved(*given, updates, torch.float64)
        assert torch.equal(before, exact[0])
        torch.testing.assert_close(after, exact[1], rtol=2e-6, atol=2e-6)
        assert torch.equal(after, moved(*given, updates)[1])


def test_every_fourth_row_of_the_context_counts(by_triton):
    mean, values, context = made(9, 5, 6, real=0.5)
    _, after = moved(mean, values[::4], context, 3, every=4)
    torch.testing.assert_close(after, moved(mean, values[::4], context, 3, torch.float64, every=4)[1])


def test_values_may_lie_in_any_order(by_triton):
    mean, values, context = made(4, 5, 6, real=0.5)
    turned = values.transpose(0, 2).contiguous().transpose(0, 2)
    assert torch.equal(moved(mean, turned, context, 3)[1], moved(mean, values, context, 3)[1])


def test_what_is_not_a_number_stays_visible(by_triton):
    mean, values, context = made(4, 5, 6, real=1.0)
    values[2, 3, 1] = float("nan")
    mean[4] = float("nan")
    assert moved(mean, values, context, 3)[1].isnan().nonzero().flatten().tolist() == [1, 4]


def test_sums_of_many_tokens_keep_their_digits(by_triton, monkeypatch):
    monkeypatch.setattr(kernels, "ELEMENTS", 4096)
    monkeypatch.setattr(kernels, "MOST_PARTS", 128)
    given = made(1000, 50, 4, real=0.9)
    torch.testing.assert_close(moved(*given, 0)[1], moved(*given, 0, torch.float64)[1], rtol=1e-6, atol=0)
