"""Kernels that take a seed dimension: each seed gets what it would get alone."""

from __future__ import annotations

import pytest
import torch

from recbft.core import SequenceContext, softmax_mean, softmax_moments
from recbft.kernels import per_seed
from recbft.kernels import product as products
from recbft.kernels.cross_entropy import full_cross_entropies, full_cross_entropy
from recbft.kernels.dropout import mask_of, random_bits, scaled_mask
from recbft.kernels.gelu import gelu_with_slope, gelu_with_slope_reference, slope_product
from recbft.kernels.per_seed import cpu

TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.float64: {"rtol": 1e-11, "atol": 1e-12}}
DTYPES = list(TOLERANCE)


def draw(*shape, dtype, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_(grad)


def values_and_grads(function, *inputs):
    """Outputs, and gradients of a sum with fixed random weights."""
    inputs = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    sum((draw(*y.shape, dtype=y.dtype, seed=9, grad=False) * y).sum() for y in out).backward()
    return [*(y.detach() for y in out), *(x.grad for x in inputs if x is not None)]


# Linear map and norm ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("S", "N", "I", "O"), [(1, 1, 1, 1), (3, 5, 4, 7), (2, 65, 16, 1), (4, 33, 64, 16)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_linear_map_of_each_seed_equals_the_batched_product(S, N, I, O, with_bias, dtype):  # noqa: E741
    x, weight = draw(S, N, I, dtype=dtype), draw(S, O, I, dtype=dtype, seed=1)
    bias = draw(S, O, dtype=dtype) if with_bias else None
    fast, reference = (
        values_and_grads(lambda *a, impl=impl: per_seed.linear(*a, impl=impl), x, weight, bias)
        for impl in ("cpu", "reference")
    )
    for found, expected in zip(fast, reference, strict=True):
        torch.testing.assert_close(found, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_of_any_strides_are_served(dtype):
    x = draw(7, 2, 5, dtype=dtype, grad=False).transpose(0, 1)
    weight = draw(2, 5, 3, dtype=dtype, grad=False).mT
    found = per_seed.linear(x, weight, None, impl="cpu")
    torch.testing.assert_close(found, torch.einsum("sni,soi->sno", x, weight), **TOLERANCE[dtype])


@pytest.mark.parametrize("num_rows", [9, 20])  # few rows are one library's alone
@pytest.mark.parametrize("library", [None, products._find_onednn()], ids=["mkl", "onednn"])
def test_the_product_is_the_same_by_either_library(monkeypatch, library, num_rows):
    monkeypatch.setattr(products, "_ONEDNN", library)
    x, weight, bias = (draw(*shape, dtype=torch.float32, grad=False) for shape in ((num_rows, 6), (4, 6), (4,)))
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
    fast, plain = (
        values_and_grads(lambda x, w, impl=impl: full_cross_entropy(x, w, target, impl=impl)[None], states, items)
        for impl in ("cpu", "reference")
    )
    for found, expected in zip(fast, plain, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("S", "N", "D"), [(1, 1, 2), (3, 17, 8), (2, 64, 64)])
def test_the_norm_of_each_seed_equals_the_norm_with_its_weights(S, N, D, dtype):
    inputs = draw(S, N, D, dtype=dtype), draw(S, D, dtype=dtype), draw(S, D, dtype=dtype, seed=3)
    fast, reference = (
        values_and_grads(lambda *a, impl=impl: per_seed.layer_norm(*a, eps=1e-8, impl=impl), *inputs)
        for impl in ("cpu", "reference")
    )
    for found, expected in zip(fast, reference, strict=True):
        torch.testing.assert_close(found, expected, **TOLERANCE[dtype])


def test_the_hand_written_backwards_are_right():
    x, weight, bias = (
        draw(2, 3, 4, dtype=torch.float64),
        draw(2, 5, 4, dtype=torch.float64),
        draw(2, 5, dtype=torch.float64),
    )
    assert torch.autograd.gradcheck(cpu.linear, (x, weight, bias))
    for asking in range(3):  # the others are constants
        parts = [part if n == asking else part.detach() for n, part in enumerate((x, weight, bias))]
        assert torch.autograd.gradcheck(cpu.linear, parts)
    scale, shift = draw(2, 4, dtype=torch.float64), draw(2, 4, dtype=torch.float64, seed=2)
    assert torch.autograd.gradcheck(lambda *a: cpu.layer_norm(*a, 1e-6), (x, scale, shift))


def test_an_unknown_path_is_refused():
    x = torch.zeros(1, 1, 1)
    with pytest.raises(ValueError, match="unknown impl 'gpu'; choose one of auto, cpu, reference"):
        per_seed.linear(x, x, None, impl="gpu")


# Losses, slopes, dropout, decay ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("scale", [1.0, 30.0])  # without and with the shift of the logits
def test_the_loss_of_each_seed_is_that_of_its_own_positions(dtype, impl, scale):
    counts, V, D = [4, 1, 40], 23, 6
    states, weight = draw(sum(counts), D, dtype=dtype), draw(3, V, D, dtype=dtype)
    target = torch.randint(V, (sum(counts),), generator=torch.Generator().manual_seed(0))

    def apart(x, w):
        parts = zip((x * scale).split(counts), w, target.split(counts), strict=True)
        return torch.stack([full_cross_entropy(*part, impl="reference") for part in parts])

    fast = values_and_grads(lambda x, w: full_cross_entropies(x * scale, w, target, counts, impl=impl), states, weight)
    for found, expected in zip(fast, values_and_grads(apart, states, weight), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("S", "N", "F", "r"), [(1, 3, 4, 2), (3, 7, 8, 3), (2, 3000, 256, 16)])
def test_the_slope_product_takes_a_factor_per_seed(S, N, F, r, dtype):
    a, factor = draw(S * N, F, dtype=dtype), draw(S, F, r, dtype=dtype, grad=False)
    fast, reference, apart = (
        values_and_grads(lambda x, function=function: function(x), a)
        for function in (
            lambda x: gelu_with_slope(x, factor),
            lambda x: gelu_with_slope_reference(x, factor),
            lambda x: tuple(
                torch.cat(parts)
                for parts in zip(*(gelu_with_slope(p, f) for p, f in zip(x.chunk(S), factor, strict=True)), strict=True)
            ),
        )
    )
    for found, expected, one in zip(fast, reference, apart, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-5)
        torch.testing.assert_close(found, one, **TOLERANCE[dtype])
    torch.testing.assert_close(slope_product(a.detach(), factor), fast[1], **TOLERANCE[dtype])


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
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_a_decay_per_row_is_the_decay_of_each_row(causal, impl):
    B, H, T, K = 3, 2, 6, 4
    q, k, v = (draw(B, H, T, K, dtype=torch.float64, seed=n, grad=False) for n in range(3))
    segment = torch.tensor([[0, 0, 0, 1, 1, -1]]).expand(B, T)
    position = torch.tensor([[0, 1, 2, 0, 1, 0]]).expand(B, T)
    log_decay = -draw(B, 1, dtype=torch.float64, grad=False).abs()
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
