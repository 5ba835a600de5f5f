"""SiLU moments and the sandwich precision against dense sums written out token by token."""

from __future__ import annotations

import math

import pytest
import torch

from recbft.core import SiluMoments, sandwich_precision_ref, silu_weights
from recbft.core.silu import look_up, total_bias
from recbft.kernels.filter_step import sandwich_precision
from recbft.kernels.silu_moments import silu_mean, silu_moments
from tests.packed_rows import packed

IMPLS = ("torch", "reference")  # those that serve float64 on the CPU


CONTEXT = packed([[3, 2], [6]], 6)


def inputs_of(seed, B=2, H=2, T=6, K=3):
    """Queries, keys and values; and biases by name."""
    g = torch.Generator().manual_seed(seed)
    shapes = *3 * [(B, H, T, K)], (H, T, T), (B, T)
    *heads, bias, trust = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
    return heads, {"bias": bias, "log_precision": trust, "log_decay": torch.tensor(-0.1, dtype=torch.float64)}


def dense_sums(q, k, v, context, length, *, bias, log_precision, log_decay):
    """Every sum by its definition, pair by pair."""
    B, H, T, K = q.shape
    sums = SiluMoments(*(torch.zeros(B, H, T, *tail, dtype=q.dtype) for tail in ((K,), (), (), (K,), (K,))))
    for b, t, j in context.allowed.nonzero().tolist():
        lag = context.position[b, t] - context.position[b, j]
        for h in range(H):
            s = q[b, h, t] @ k[b, h, j] / math.sqrt(K) + bias[h, t, j] + log_precision[b, j] + lag * log_decay
            a, values = s / (1 + torch.exp(-s)) / length, v[b, h, j]
            for total, term in zip(sums, (a * values, a, a * a, a * a * values, a * a * values**2), strict=True):
                total[b, h, t] += term
    return sums


@pytest.mark.parametrize("impl", IMPLS)
def test_sums_equal_the_definition(impl):
    heads, biases = inputs_of(0)
    found = silu_moments(*heads, CONTEXT, length=50, **biases, impl=impl)
    for ours, theirs in zip(found, dense_sums(*heads, CONTEXT, 50, **biases), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("impl", IMPLS)
def test_each_path_passes_gradcheck(impl):
    heads, biases = inputs_of(0)

    def run(q, k, v, *own):
        return silu_moments(q, k, v, CONTEXT, length=5, **dict(zip(biases, own, strict=True)), impl=impl)

    leaves = [x.requires_grad_() for x in (*heads, *biases.values())]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_mean_alone_is_that_of_the_moments_with_its_gradients(impl):
    heads, biases = inputs_of(0)
    leaves = [x.requires_grad_() for x in (*heads, *biases.values())]
    known = {"length": 5, **biases, "impl": impl}
    alone, among = silu_mean(*heads, CONTEXT, **known), silu_moments(*heads, CONTEXT, **known).mean
    torch.testing.assert_close(alone, among)
    for found, expected in zip(*(torch.autograd.grad(x.sin().sum(), leaves) for x in (alone, among)), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("centre", ["root", "innovation"])
def test_sandwich_is_the_weighted_spread_around_its_centre(centre):
    (q, k, v), _ = inputs_of(2)
    moments = silu_moments(q, k, v, CONTEXT, length=2)
    precision = sandwich_precision(moments, cap=1e9, centre=centre)
    b, h, t = 1, 0, 4
    s = (q[b, h, t] @ k[b, h, : t + 1].T) / math.sqrt(3)
    a = torch.nn.functional.silu(s) / 2
    m = (a @ v[b, h, : t + 1]) / (a.sum() if centre == "root" else 1)
    variance = (a.square()[:, None] * (v[b, h, : t + 1] - m).square()).sum(0) / a.sum().square()
    torch.testing.assert_close(precision[b, h, t], 1 / variance, rtol=1e-9, atol=0)


def test_sandwich_is_bounded_where_weights_cancel_and_zero_where_nothing_is_read():
    one, zero = torch.ones(1, 1, 1, 1).double(), torch.zeros(1, 1, 1).double()
    cancelled = SiluMoments(one, zero, zero + 0.5, one * 0, one)
    assert 0 < sandwich_precision_ref(cancelled).item() < 1e-3
    nothing = SiluMoments(one * 0, zero, zero, one * 0, one * 0)
    assert sandwich_precision_ref(nothing).item() == 0
    alone = SiluMoments(one, zero + 0.5, zero + 0.25, one * 0.5, one)
    assert sandwich_precision_ref(alone).item() == 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize("sandwich", [sandwich_precision_ref, sandwich_precision])
def test_weights_all_but_zero_meet_the_cap_until_their_squares_vanish_which_reads_nothing(sandwich, impl, dtype):
    vanishes = -50 if dtype == torch.float32 else -376
    context = packed([[2]], 2)
    for score in (-5.0, -20.0, -45.0, -60.0, -110.0, -380.0, -1e4):
        root = (abs(score) ** 0.5 * torch.ones(1, 1, 2, 1, dtype=dtype)).requires_grad_()
        v = torch.tensor([0.0, 2.0], dtype=dtype).view(1, 1, 2, 1).requires_grad_()
        r = sandwich(silu_moments(root, -root, v, context, length=1, impl=impl), cap=100.0, centre="root")
        # Two keys of one weight a: variance 2 a^2 / (2 a)^2 = 1 / 2, until the floor of (2 a)^2 shrinks it.
        expected = 0.0 if score < vanishes else 100.0 if score < -5 else 2.0
        assert r[0, 0, 1].item() == pytest.approx(expected, rel=1e-5), score
        for grad in torch.autograd.grad(r.sum(), (root, v)):
            assert torch.isfinite(grad).all() and (score == -5 or not grad.any())


def test_wrong_arguments_are_refused_with_the_choices():
    (q, k, v), _ = inputs_of(0)
    with pytest.raises(ValueError, match="length is 0; give the constant"):
        silu_moments(q, k, v, CONTEXT, length=0)
    with pytest.raises(ValueError, match="unknown impl 'gpu'; choose one of auto, c, reference, torch"):
        silu_moments(q, k, v, CONTEXT, length=1, impl="gpu")
    with pytest.raises(ValueError, match="length is 0"):
        silu_mean(q, k, v, CONTEXT, length=0)
    with pytest.raises(ValueError, match="centre is 'mean'; choose root or innovation"):
        sandwich_precision_ref(silu_moments(q, k, v, CONTEXT, length=1), centre="mean")


def test_the_weights_written_out_are_those_of_the_sums():
    (q, k, v), biases = inputs_of(4)
    how = {"length": 7, **biases}
    weights, sums = silu_weights(q, k, CONTEXT, **how), silu_moments(q, k, v, CONTEXT, **how)
    assert weights.shape == (2, 2, 6, 6) and (weights[~CONTEXT.allowed[:, None].expand_as(weights)] == 0).all()
    torch.testing.assert_close(weights @ v, sums.mean)
    torch.testing.assert_close(weights.square().sum(dim=-1), sums.square_sum)


def test_a_table_is_read_at_any_index_and_each_element_gets_the_gradient_of_all_its_readers():
    table = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[0, 2, 2], [-4, 1, 9]])  # below and beyond the table the first and the last are read
    found = look_up(table, index)
    assert found.tolist() == [[0.3, 2.0, 2.0], [0.3, -1.2, 2.0]]
    (gradient,) = torch.autograd.grad((found * torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])).sum(), table)
    assert gradient.tolist() == [1 + 8, 16, 2 + 4 + 32]


@pytest.mark.parametrize("axes", [2, 3, 4])
def test_biases_of_all_kinds_add_up_pair_by_pair(axes):
    (q, _, _), known = inputs_of(5)
    bias, log_precision, log_decay = known.values()
    bias = bias if axes == 3 else bias[0] if axes == 2 else torch.stack([bias, 2 * bias])
    table = torch.tensor([0.5, -0.7, 1.1], dtype=torch.float64)
    found = total_bias(q, CONTEXT, **known | {"bias": bias, "lag_bias": table}).expand(2, 2, 6, 6)
    for b, t, j in CONTEXT.allowed.nonzero().tolist():
        lag = int(CONTEXT.position[b, t] - CONTEXT.position[b, j])
        given = bias.expand(2, 2, 6, 6)[b, :, t, j]
        expected = given + table[min(lag, 2)] + log_precision[b, j] + lag * log_decay
        torch.testing.assert_close(found[b, :, t, j], expected)
    assert total_bias(q, CONTEXT) is None
    assert total_bias(q, CONTEXT, bias=bias).shape == (1,) * (4 - axes) + bias.shape
