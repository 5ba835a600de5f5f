"""Kernels that take a seed dimension: each seed gets what it would get alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from recbft.core import SequenceContext
from recbft.kernels import product as products
from recbft.kernels.cross_entropy import full_cross_entropy
from recbft.kernels.dropout import mask_of, random_bits, scaled_mask
from recbft.kernels.softmax_moments import softmax_mean, softmax_moments
from tests.tolerances import TOLERANCE, assert_same, values_and_gradients

DTYPES = [torch.float32, torch.float64]


def draw(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("S", "N", "I", "O"), [(1, 1, 1, 1), (2, 65, 16, 1), (4, 33, 64, 16)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_linear_map_of_each_seed_equals_the_batched_product(S, N, I, O, with_bias, dtype):  # noqa: E741
    leaves = [draw(S, N, I, dtype=dtype), draw(S, O, I, dtype=dtype, seed=1), draw(S, O, dtype=dtype)][: 2 + with_bias]
    fast, reference = (
        values_and_gradients(lambda x, w, b=None, impl=impl: products.linear(x, w, b, impl=impl), leaves, dtype, "cpu")
        for impl in ("torch", "reference")
    )
    assert_same(fast, reference, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_of_any_strides_are_served(dtype):
    x = draw(7, 2, 5, dtype=dtype).transpose(0, 1)
    weight = draw(2, 5, 3, dtype=dtype).mT
    found = products.linear(x, weight, None, impl="torch")
    torch.testing.assert_close(found, torch.einsum("sni,soi->sno", x, weight), **TOLERANCE[dtype])


@pytest.mark.parametrize("num_rows", [9, 20])  # few rows are one library's alone
@pytest.mark.parametrize("library", [None, products._find_onednn()], ids=["mkl", "onednn"])
def test_the_product_is_the_same_by_either_library(monkeypatch, library, num_rows):
    monkeypatch.setattr(products, "_ONEDNN", library)
    x, weight, bias = (draw(*shape, dtype=torch.float32) for shape in ((num_rows, 6), (4, 6), (4,)))
    for rows in (x, x.mT.contiguous().mT):
        for items in (weight, products.fastest_layout(weight)):
            torch.testing.assert_close(products.product(rows, items), rows @ weight.T)
            torch.testing.assert_close(products.product(rows, items, bias), rows @ weight.T + bias)
            room = torch.full((num_rows, 4), torch.nan)
            torch.testing.assert_close(products.product(rows, items, bias, room=room), rows @ weight.T + bias)
            torch.testing.assert_close(products.product(rows, items, room=room), rows @ weight.T)
            total = torch.ones(num_rows, 4)
            products.add_product(total, rows, items)
            torch.testing.assert_close(total, 1 + rows @ weight.T)


@pytest.mark.parametrize("library", [None, products._find_onednn()], ids=["mkl", "onednn"])
def test_the_loss_is_the_same_by_either_library(monkeypatch, library):
    monkeypatch.setattr(products, "_ONEDNN", library)
    states, items = draw(50, 8, dtype=torch.float32), draw(301, 8, dtype=torch.float32, seed=2)
    target = torch.randint(301, (50,), generator=torch.Generator().manual_seed(1))
    losses = (partial(full_cross_entropy, target=target, impl=impl) for impl in ("torch", "reference"))
    assert_same(*(values_and_gradients(loss, (states, items), torch.float32, "cpu") for loss in losses), torch.float32)


@pytest.mark.parametrize("asking", range(3))
def test_only_what_is_asked_for_gets_a_gradient(asking):
    parts = [draw(*shape, dtype=torch.float64).requires_grad_() for shape in ((2, 3, 4), (2, 5, 4), (2, 5))]
    found, expected = (
        torch.autograd.grad(products.linear(*given, impl=impl).sin().sum(), given[asking])
        for given in [[part if n == asking else part.detach() for n, part in enumerate(parts)]]
        for impl in ("torch", "reference")
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 7, 9)])
def test_a_generator_of_its_own_draws_what_the_default_one_would(p, shape):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        expected = scaled_mask(torch.empty(shape), p)
        state = torch.get_rng_state()
    generator = torch.Generator().manual_seed(7)
    bits = random_bits(shape, generator)
    assert torch.equal(mask_of(bits, p, torch.float32), expected)
    assert torch.equal(generator.get_state(), state)
    by_comparison = mask_of(bits, p, torch.bfloat16) > 0
    assert torch.equal(expected > 0, by_comparison)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_a_decay_per_row_is_the_decay_of_each_row(causal, impl):
    B, H, T, K = 3, 2, 6, 4
    q, k, v = (draw(B, H, T, K, dtype=torch.float64, seed=n) for n in range(3))
    segment = torch.tensor([[0, 0, 0, 1, 1, -1]]).expand(B, T)
    position = torch.tensor([[0, 1, 2, 0, 1, 0]]).expand(B, T)
    log_decay = -draw(B, 1, dtype=torch.float64).abs()
    context = SequenceContext(segment, position, causal=causal)
    found = softmax_moments(q, k, v, context, log_decay=log_decay, impl=impl)
    mean = softmax_mean(q, k, v, context, log_decay=log_decay)
    for row in range(B):
        one = SequenceContext(segment[row : row + 1], position[row : row + 1], causal=causal)
        own = [x[row : row + 1] for x in (q, k, v)]
        expected = softmax_moments(*own, one, log_decay=log_decay[row, 0], impl=impl)
        for name, value in zip(expected._fields, expected, strict=True):
            torch.testing.assert_close(getattr(found, name)[row : row + 1], value, **TOLERANCE[torch.float64], msg=name)
        torch.testing.assert_close(mean[row : row + 1], expected.mean, **TOLERANCE[torch.float64])
