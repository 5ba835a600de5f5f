"""Layer normalisation in Triton against PyTorch in float64; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", minversion="3.3")

from recbft.kernels import dispatch, per_seed
from recbft.kernels.layer_norm import LayerNorm
from recbft.kernels.layer_norm import triton as kernels

pytestmark = pytest.mark.usefixtures("scratch_full_of_nan")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(1, 1, 1), (1, 1, 5), (1, 7, 32), (1, 8, 32), (1, 9, 32), (1, 40, 33), (3, 5, 7), (2, 17, 64), (2, 3, 600)]
EPS = 1e-8


@pytest.fixture(autouse=True)
def by_triton(monkeypatch):
    monkeypatch.setattr(kernels, "ELEMENTS", 256)
    monkeypatch.setattr(kernels, "MOST_PARTS", 3)
    monkeypatch.setattr(dispatch, "serves_steps", lambda x: x.dtype == torch.float32)


def leaves(*size, seed=0):
    g = torch.Generator().manual_seed(seed)
    S, _, D = size
    x = torch.randn(size, generator=g, dtype=torch.float64) + 3 * torch.randn(S, 1, 1, generator=g, dtype=torch.float64)
    w, b = (torch.randn(S, D, generator=g, dtype=torch.float64) for _ in range(2))
    return [leaf.to(DEVICE) for leaf in (x, w, b)]


def value_and_gradients(found, dtype, run, view=lambda x: x):
    x, w, b = (leaf.to(dtype, copy=True).requires_grad_() for leaf in found)
    y = run(view(x), w, b)
    weights = torch.arange(1, y.numel() + 1, device=DEVICE, dtype=dtype).cos().view_as(y)
    return [part.detach().double() for part in (y, *torch.autograd.grad((y * weights).sum(), (x, w, b)))]


def exact(x, w, b):
    return F.layer_norm(x, x.shape[-1:], eps=EPS) * w[:, None] + b[:, None]


def seeds(x, w, b):
    return per_seed.layer_norm(x, w, b, eps=EPS)


def one(x, w, b):
    norm = LayerNorm(x.shape[-1], eps=EPS)
    return torch.func.functional_call(norm, {"weight": w[0], "bias": b[0]}, (x[0],))[None]


def compare(found, run, view=lambda x: x):
    oracle = value_and_gradients(found, torch.float64, exact, view)
    ours, again = (value_and_gradients(found, torch.float32, run, view) for _ in range(2))
    plain = value_and_gradients(found, torch.float32, exact, view)
    slope = (view(found[0]).var(-1, unbiased=False) + EPS).rsqrt().max()  # what a last digit of the sums is times
    for mine, same, true, usual in zip(ours, again, oracle, plain, strict=True):
        assert torch.equal(mine, same)
        bound = 2 * (usual - true).abs().max() + 1e-6 * (1 + true.abs().max() + slope)
        assert (mine - true).abs().max() <= bound


@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients(size, launched):
    for seed in range(2):
        compare(leaves(*size, seed=seed), seeds)
        if size[0] == 1:
            compare(leaves(*size, seed=seed), one)
    assert launched


@pytest.fixture
def launched(monkeypatch):
    """The widths of what was normed by the kernels."""
    found, norm = [], kernels.layer_norm
    monkeypatch.setattr(kernels, "layer_norm", lambda *given: found.append(given[0].shape) or norm(*given))
    return found


def test_rows_may_lie_in_any_order(launched):
    found = leaves(2, 5, 8)
    compare([found[0].transpose(1, 2), *(torch.randn(2, 5, device=DEVICE).double() for _ in "wb")], seeds)
    compare(found, seeds, lambda x: x[:, ::2])
    compare(leaves(1, 6, 8), one, lambda x: x[:, :, ::2][..., [0, 1, 2, 3, 0, 1, 2, 3]])
    assert launched


def test_axes_before_the_last_stay_as_they_are(launched):
    norm = LayerNorm(8).to(DEVICE)
    x = torch.randn(3, 4, 8, device=DEVICE)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (8,), norm.weight, norm.bias))
    torch.testing.assert_close(norm(x[0, 0]), F.layer_norm(x[0, 0], (8,), norm.weight, norm.bias))
    assert len(launched) == 2


def test_other_types_nothing_and_transforms_are_left_to_pytorch(launched):
    norm = LayerNorm(8).to(DEVICE)
    assert norm(torch.randn(0, 8, device=DEVICE)).shape == (0, 8)
    assert norm.double()(torch.randn(2, 8, device=DEVICE).double()).dtype == torch.float64
    norm.float()
    x = torch.randn(5, 3, 8, device=DEVICE)
    torch.testing.assert_close(torch.func.vmap(norm)(x), F.layer_norm(x, (8,), norm.weight, norm.bias))
    assert not launched


def test_what_is_not_a_number_stays_visible():
    x = torch.randn(2, 3, 4, device=DEVICE)
    x[1, 2, 3] = float("nan")
    assert LayerNorm(4).to(DEVICE)(x).isnan().all(-1).nonzero().tolist() == [[1, 2]]
