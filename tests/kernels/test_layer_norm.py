"""Layer norms of one model and of several seeds: every path against PyTorch's in float64."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from recbft.kernels import dispatch, layer_norm
from recbft.kernels.layer_norm import LayerNorm, layer_norms
from tests.tolerances import assert_as_near_as, values_and_gradients

pytestmark = pytest.mark.usefixtures("scratch_full_of_nan")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-8


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    if dispatch.missing("triton") is None:
        kernels = importlib.import_module("recbft.kernels.layer_norm.triton")
        monkeypatch.setattr(kernels, "ELEMENTS", 256)
        monkeypatch.setattr(kernels, "MOST_PARTS", 3)


def leaves(S, N, D, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(S, N, D, generator=g, dtype=torch.float64) + 3 * torch.randn(S, 1, 1, generator=g).double()
    w, b = (torch.randn(S, D, generator=g, dtype=torch.float64) for _ in range(2))
    return [leaf.to(DEVICE) for leaf in (x, w, b)]


def plain(x, w, b):
    return torch.stack([F.layer_norm(rows, rows.shape[-1:], *own, EPS) for rows, *own in zip(x, w, b, strict=True)])


def compare(found, impl, view=lambda x: x):
    def run(norms, dtype):
        return values_and_gradients(lambda x, w, b: norms(view(x), w, b), found, dtype, DEVICE)

    exact = run(plain, torch.float64)
    ours, again = (run(partial(layer_norms, eps=EPS, impl=impl), torch.float32) for _ in range(2))
    assert all(torch.equal(mine, same) for mine, same in zip(ours, again, strict=True))
    slope = float((view(found[0]).var(-1, unbiased=False) + EPS).rsqrt().max())  # what a last digit of sums is times
    assert_as_near_as(ours, run(plain, torch.float32), exact, slack=1e-6 * (2 + slope))


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("size", [(1, 1, 5), (1, 9, 32), (3, 5, 7), (2, 17, 64), (2, 3, 600)])
def test_values_and_gradients(size, impl):
    compare(leaves(*size), impl)


@pytest.mark.parametrize("impl", ["triton"])
def test_rows_may_lie_in_any_order(impl):
    found = leaves(2, 5, 8)
    compare([found[0].transpose(1, 2), *(torch.randn(2, 5, device=DEVICE).double() for _ in "wb")], impl)
    compare(found, impl, lambda x: x[:, ::2])


def test_the_layer_is_pytorch_s_on_a_cpu_and_takes_the_kernels_elsewhere(monkeypatch):
    norm, x = LayerNorm(8).to(DEVICE), torch.randn(3, 4, 8, device=DEVICE)
    with torch.no_grad():
        norm.weight.normal_(), norm.bias.normal_()
    expected = F.layer_norm(x, (8,), norm.weight, norm.bias)
    assert DEVICE == "cuda" or torch.equal(norm(x), expected)
    torch.testing.assert_close(norm(x.requires_grad_()), expected)
    for path in layer_norm.ONE.values():
        if path.device is None:
            y = path.load()(x.reshape(1, -1, 8), norm.weight[None], norm.bias[None], 1e-5)
            torch.testing.assert_close(y.view(x.shape), expected)


@pytest.mark.parametrize("impl", ["triton"])
def test_other_types_and_nothing_are_left_to_pytorch(impl):
    one, none = torch.ones(1, 1, 8, device=DEVICE), torch.ones(1, 0, 8, device=DEVICE)
    for x, message in ((one.double(), "needs float32, got torch.float64"), (none, "at least one row")):
        with pytest.raises(ValueError, match=f"triton path declined: .*{message}"):
            layer_norms(x, one[0], one[0], eps=EPS, impl=impl)


@pytest.mark.parametrize("impl", ["triton"])
def test_what_is_not_a_number_stays_visible(impl):
    x, one = torch.randn(1, 3, 4, device=DEVICE), torch.ones(1, 4, device=DEVICE)
    x[0, 2, 3] = float("nan")
    assert layer_norms(x, one, one, eps=EPS, impl=impl).isnan().all(-1).nonzero().tolist() == [[0, 2]]
