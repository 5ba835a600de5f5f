"""The paths in C against the references in float64, and how they are built."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from recbft import core
from recbft.core import (
    Belief,
    Readers,
    SequenceContext,
    SiluMoments,
    silu_mean,
    silu_moments,
    softmax_mean,
    softmax_moments,
)
from recbft.kernels import compiled, dispatch, filter_step
from recbft.kernels.cross_entropy import full_cross_entropy
from recbft.kernels.cross_entropy.exponentials import exponentials
from recbft.kernels.dropout import dropout, scaled_mask
from recbft.kernels.filter_step import analytic, sandwich
from recbft.kernels.filter_step import compiled as passes
from recbft.kernels.filter_step.fused import Fused, prediction_is_plain, update_is_plain
from recbft.kernels.gelu import gelu_with_slope, gelu_with_slope_reference
from recbft.kernels.softmax_moments.reml import softmax_reml

REASON = compiled.missing()
needs_build = pytest.mark.skipif(REASON is not None, reason=str(REASON))
PRIOR = {"prior_scale": 0.2, "prior_dof": 1.0, "cap": 20.0}


def packed(lengths_by_row, width, *, causal=True, order=None):
    """Rows of histories one after another, padded at the end; ``order`` takes the columns apart."""
    segment = torch.full((len(lengths_by_row), width), -1)
    position = torch.zeros(len(lengths_by_row), width, dtype=torch.long)
    number = 0
    for row, lengths in enumerate(lengths_by_row):
        column = 0
        for length in lengths:
            segment[row, column : column + length] = number
            position[row, column : column + length] = torch.arange(length)
            column, number = column + length, number + 1
    if order is not None:
        segment, position = segment[:, order], position[:, order]
    return SequenceContext(segment, position, causal=causal)


def drawn(B, H, T, K, *, seed, num_queries=None):
    """q, k, v, log precision and log decay in float64."""
    g = torch.Generator().manual_seed(seed)
    shapes = (B, H, num_queries or T, K), (B, H, T, K), (B, H, T, K), (B, T)
    inputs = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]
    return [*inputs, torch.tensor(-0.05, dtype=torch.float64)]


def moments(impl, q, k, v, log_precision, log_decay, context):
    return softmax_moments(q, k, v, context, log_precision=log_precision, log_decay=log_decay, impl=impl)


def mean(impl, q, k, v, log_precision, log_decay, context):
    return (softmax_mean(q, k, v, context, log_precision=log_precision, log_decay=log_decay, impl=impl),)


def reml(impl, q, k, v, log_precision, log_decay, context):
    found = softmax_moments(q, k, v, context, log_precision=log_precision, log_decay=log_decay, impl="reference")
    if impl == "reference":
        return found.mean, filter_step.reml_precision(found.residual_variance, found.effective_sample_size, **PRIOR)
    impl = "composed" if impl == "cpu" else impl
    return softmax_reml(q, k, v, context, log_precision=log_precision, log_decay=log_decay, impl=impl, **PRIOR)


def silu_biases(log_precision, log_decay):
    lag_bias = torch.cat([log_precision.flatten().cos(), log_precision.new_tensor([0.3, -0.4])])[-30:]
    return {"log_precision": log_precision, "log_decay": log_decay, "lag_bias": lag_bias, "length": 20}


def silu(impl, q, k, v, log_precision, log_decay, context):
    return silu_moments(q, k, v, context, **silu_biases(log_precision, log_decay), impl=impl)


def silu_alone(impl, q, k, v, log_precision, log_decay, context):
    return (silu_mean(q, k, v, context, **silu_biases(log_precision, log_decay), impl=impl),)


def with_gradients(function, impl, inputs, context, dtype):
    """Outputs, and gradients of a mixture of them, in float64."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    outputs = function(impl, *inputs, context)
    g = torch.Generator().manual_seed(7)
    loss = sum((x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(dtype)).sum() for x in outputs)
    return [x.detach().double() for x in (*outputs, *torch.autograd.grad(loss, inputs))]


def assert_as_near_as(found, plain, exact, *, slack):
    """No farther from the exact values than twice what the plain path is, but for ``slack`` of the largest."""
    for number, (one, other, true) in enumerate(zip(found, plain, exact, strict=True)):
        error, usual = ((x - true).abs().max().item() if x.numel() else 0.0 for x in (one, other))
        size = true.abs().max().item() if true.numel() else 0.0
        assert error <= 2 * usual + slack * size, f"output {number}: {error} off, the plain path {usual}, of {size}"


@needs_build
@pytest.mark.parametrize("function", [moments, mean, reml, silu, silu_alone])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("T", "K"), [(1, 1), (2, 3), (7, 8), (8, 16), (9, 5), (63, 32), (64, 33), (65, 64), (200, 32)])
def test_attention_equals_the_reference_in_values_and_gradients(T, K, shuffled, causal, function):
    order = torch.randperm(T, generator=torch.Generator().manual_seed(T)) if shuffled else None
    lengths = [[T], [T // 2, T - T // 2] if T > 1 else [1], [max(1, T - 1)], [], [1] * T]
    context = packed(lengths, T, causal=causal, order=order)
    inputs = drawn(5, 2, T, K, seed=T + K)
    exact = with_gradients(function, "reference", inputs, context, torch.float64)
    found, plain = (with_gradients(function, impl, inputs, context, torch.float32) for impl in ("compiled", "cpu"))
    # The gradient of the decay is one number, in which most of what is summed cancels.
    assert_as_near_as(found[:-1], plain[:-1], exact[:-1], slack=2e-6)
    torch.testing.assert_close(found[-1], exact[-1], rtol=1e-3, atol=1e-3)


@needs_build
@pytest.mark.parametrize("function", [moments, reml, silu])
@given(
    seed=st.integers(0, 2**16),
    B=st.integers(0, 3),
    T=st.sampled_from([1, 2, 7, 15, 16, 17, 33, 64, 65, 90]),
    K=st.integers(1, 40),
    causal=st.booleans(),
    in_order=st.booleans(),
)
@settings(deadline=None)
def test_any_batch_is_served_as_the_reference_serves_it(function, seed, B, T, K, causal, in_order):
    g = torch.Generator().manual_seed(seed)
    segment = torch.randint(-1, 4, (B, T), generator=g)
    segment = segment.sort(dim=1).values if in_order else segment
    position = torch.stack([torch.randperm(T, generator=g) for _ in range(B)]) if B else torch.zeros(0, T).long()
    context = SequenceContext(segment, position, causal=causal)
    inputs = drawn(B, 2, T, K, seed=seed)
    exact = with_gradients(function, "reference", inputs, context, torch.float64)
    found, plain = (with_gradients(function, impl, inputs, context, torch.float32) for impl in ("compiled", "cpu"))
    assert_as_near_as(found[:-1], plain[:-1], exact[:-1], slack=1e-5)


@needs_build
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("function", [moments, mean, reml, silu, silu_alone])
def test_fewer_queries_than_keys_read_as_among_all(function, causal):
    whole = packed([[4, 5], [9], [2, 2]], 9, causal=causal)
    only = torch.tensor([3, 8, 17, 19])
    readers = Readers.of(only, 3, 9)
    inputs = drawn(3, 2, 9, 6, seed=3)
    all_of_them = function("reference", *inputs, whole)
    q = readers.take(inputs[0].transpose(1, 2).flatten(2)).unflatten(2, (2, 6)).transpose(1, 2)
    few = with_gradients(function, "compiled", [q, *inputs[1:]], readers.context(whole), torch.float32)
    for some, every in zip(few, all_of_them, strict=False):  # what follows are gradients
        rows = some.transpose(1, 2).flatten(0, 1)[readers.place]
        torch.testing.assert_close(rows, every.transpose(1, 2).flatten(0, 1)[only], rtol=1e-5, atol=1e-5)


@needs_build
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("shape", [(4, 2, 70, 70), (1, 2, 70, 70), (4, 1, 70, 70), (1, 1, 70, 70)])
@pytest.mark.parametrize("attend", [softmax_moments, softmax_mean, silu_moments, silu_mean])
def test_a_bias_per_pair_and_its_gradient(attend, shape, shuffled, causal):
    order = torch.randperm(70, generator=torch.Generator().manual_seed(2)) if shuffled else None
    context = packed([[70], [30, 40], [5, 9, 11], []], 70, causal=causal, order=order)
    q, k, v, log_precision, log_decay = drawn(4, 2, 70, 8, seed=3)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    more = {"length": 50} if attend in (silu_moments, silu_mean) else {}

    def function(impl, q, k, v, log_precision, bias, context):
        decay = log_decay.to(q.dtype)
        biases = {"log_precision": log_precision, "bias": bias, "log_decay": decay}
        found = attend(q, k, v, context, **biases, **more, impl=impl)
        return (found,) if isinstance(found, torch.Tensor) else found

    inputs = [q, k, v, log_precision, bias]
    exact = with_gradients(function, "reference", inputs, context, torch.float64)
    found, plain = (with_gradients(function, impl, inputs, context, torch.float32) for impl in ("compiled", "cpu"))
    assert_as_near_as(found, plain, exact, slack=2e-6)


@needs_build
def test_a_decay_of_each_row_and_none_at_all():
    context = packed([[5], [3, 2]], 5, causal=False)
    q, k, v, log_precision, _ = (x.float() for x in drawn(2, 2, 5, 4, seed=1))
    for bias, decay in ((None, None), (log_precision, None), (None, torch.tensor([[-0.1], [-0.9]]))):
        one, two = (moments(impl, q, k, v, bias, decay, context) for impl in ("compiled", "reference"))
        for found, expected in zip(one, two, strict=True):
            torch.testing.assert_close(found, expected)


@needs_build
@pytest.mark.parametrize("given", [(), ("log_precision",), ("lag_bias",), ("log_decay",)])
def test_silu_moments_with_few_biases_or_none(given):
    context = packed([[20], [12, 8]], 20)
    inputs = drawn(2, 2, 20, 4, seed=1)

    def some(impl, q, k, v, log_precision, log_decay, context):
        biases = {name: x for name, x in silu_biases(log_precision, log_decay).items() if name in (*given, "length")}
        unread = 0 * (log_precision.sum() + log_decay)  # so that each has a gradient
        return (*silu_moments(q, k, v, context, **biases, impl=impl), unread)

    exact = with_gradients(some, "reference", inputs, context, torch.float64)
    found = with_gradients(some, "compiled", inputs, context, torch.float32)
    for one, true in zip(found, exact, strict=True):
        torch.testing.assert_close(one, true, rtol=1e-5, atol=1e-5)


@needs_build
@pytest.mark.parametrize("function", [moments, silu])
def test_a_batch_without_rows_is_served(function):
    inputs = [x.float().requires_grad_() for x in drawn(0, 2, 5, 4, seed=1)]
    context = packed([], 5)
    outputs = function("compiled", *inputs, context)
    assert {tuple(x.shape) for x in outputs} == {(0, 2, 5, 4), (0, 2, 5)}
    assert sum(x.sum() for x in outputs) == 0
    sum(x.sum() for x in outputs).backward()


@needs_build
@pytest.mark.parametrize("function", [moments, silu])
def test_odd_strides_and_expanded_gradients_change_nothing(function):
    context = packed([[6], [2, 4]], 6)
    inputs = [x.float() for x in drawn(2, 3, 6, 8, seed=5)]
    plain = [x.clone().requires_grad_() for x in inputs]
    odd = [x.clone().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs[:3]]
    odd[2] = torch.stack([inputs[2], inputs[2]], dim=-1)[..., 0].requires_grad_()  # elements two apart
    odd += [x.clone().requires_grad_() for x in inputs[3:]]
    grads = []
    for each in (plain, odd):
        outputs = function("compiled", *each, context)
        grads.append(torch.autograd.grad(sum(x.sum() for x in outputs), each))  # gradients of stride 0
    for one, two in zip(*grads, strict=True):
        assert torch.equal(one, two)


@needs_build
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("function", [moments, mean, reml, silu, silu_alone])
def test_a_gradient_is_the_same_where_the_others_are_not_asked_for(function, causal):
    context = packed([[5, 4], [9]], 9, causal=causal)
    inputs = [x.float() for x in drawn(2, 2, 9, 6, seed=4)]

    def gradients(wanted):
        leaves = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
        outputs = function("compiled", *leaves, context)
        return torch.autograd.grad(sum(x.sin().sum() for x in outputs), [leaves[i] for i in wanted])

    every = gradients(range(5))
    for wanted in ((0, 1, 2), (3,), (4,)):
        assert all(torch.equal(one, every[i]) for i, one in zip(wanted, gradients(wanted), strict=True))


@needs_build
@pytest.mark.parametrize("function", [reml, silu])
def test_runs_and_numbers_of_threads_give_the_same_bits(function):
    context = packed([[50], [20, 30], [5] * 10, [49]], 50)
    inputs = drawn(4, 2, 50, 32, seed=2)
    threads = torch.get_num_threads()
    try:
        runs = []
        for count in (1, 1, 2, 3):
            torch.set_num_threads(count)
            runs.append(with_gradients(function, "compiled", inputs, context, torch.float32))
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(runs[0], run, strict=True))


@needs_build
def test_extreme_logits_offsets_and_precisions_stay_finite():
    context = packed([[40], [40]], 40)
    q, k, v, log_precision, log_decay = drawn(2, 2, 40, 8, seed=9)
    q, v = 300 * q, v + 10
    log_precision[:, ::3] = -1e30
    inputs = [q, k, v, log_precision, log_decay]
    exact = with_gradients(moments, "reference", inputs, context, torch.float64)
    found, plain = (with_gradients(moments, impl, inputs, context, torch.float32) for impl in ("compiled", "cpu"))
    assert all(torch.isfinite(x).all() for x in found)
    assert_as_near_as(found[:3], plain[:3], exact[:3], slack=1e-5)


@needs_build
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("function", [moments, silu])
def test_what_is_not_a_number_stays_visible(function, where):
    context = packed([[4]], 4)
    inputs = [x.float() for x in drawn(1, 1, 4, 3, seed=0)]
    inputs["qkv".index(where)][0, 0, 1, 2] = float("nan")
    found = function("compiled", *inputs, context)
    assert torch.isnan(found.mean[0, 0, 1:]).any()


@needs_build
def test_what_it_cannot_serve_goes_to_another_path():
    context = packed([[4]], 4)
    q, k, v, *_ = drawn(1, 1, 4, 3, seed=0)
    for call, reason in (
        ({"q": q}, "serves float32, got float64"),
        ({"dropout": 0.1}, "attention dropout is left to another path"),
    ):
        given = {"q": q.float(), **call}
        with pytest.raises(ValueError, match=f"compiled path declined: {reason}"):
            softmax_moments(given.pop("q"), k.float(), v.float(), context, impl="compiled", **given)
    for given in ((q.float(), k.float()[..., :2], v.float()), (q.float(), k.float(), v.float()[:, :, :3])):
        with pytest.raises(ValueError, match="have shape"):
            softmax_moments(*given, context, impl="compiled")
    with pytest.raises(ValueError, match="and the context"):
        softmax_moments(*(torch.randn(2, 1, 4, 3) for _ in range(3)), context, impl="compiled")


def precision_of(function, sums, dtype, **call):
    """A sandwich precision and gradients of a mixture of its elements."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in sums]
    precision = function(SiluMoments(*inputs), **call)
    loss = (precision * torch.arange(1, precision.numel() + 1, dtype=dtype).cos().view_as(precision)).sum()
    return [x.detach().double() for x in (precision, *torch.autograd.grad(loss, inputs))]


@needs_build
@pytest.mark.parametrize("cap", [100.0, 3.0])
@pytest.mark.parametrize("centre", ["root", "innovation"])
def test_the_sandwich_precision_equals_the_core_s(centre, cap):
    g = torch.Generator().manual_seed(0)
    weights = 0.3 * torch.randn(2, 3, 5, 7, generator=g, dtype=torch.float64)
    weights[0, 0, 0] = 0  # reads nothing
    weights[1, 1, 1, 2:] = 0
    weights[1, 1, 1, :2] = torch.tensor([1.0, -1.0])  # whose sum is 0
    weights[0, 1, 2, 1:] = 0  # one key, no spread
    v = torch.randn(2, 3, 7, 9, generator=g, dtype=torch.float64)
    squares = weights.square()
    sums = weights @ v, weights.sum(-1), squares.sum(-1), squares @ v, squares @ v.square()

    call = {"cap": cap, "centre": centre}
    exact, plain = (precision_of(core.sandwich_precision, sums, x, **call) for x in (torch.float64, torch.float32))
    assert sandwich.serves(SiluMoments(*(x.float() for x in sums)))
    found = precision_of(filter_step.sandwich_precision, sums, torch.float32, **call)
    assert_as_near_as(found, plain, exact, slack=3e-6)


@needs_build
@pytest.mark.parametrize("centre", ["root", "innovation"])
def test_the_sandwich_precision_of_weights_that_cancel_is_held_by_the_floor(centre):
    sizes = 1e-5, 1e-4, 1.0, 5e-4, 3e-6  # s1^2 = 1e-8, the floor 1e-6; m = 1e-3 about the root, a spread of 3e-6
    each = torch.tensor([1.0, 1.25, 1.5], dtype=torch.float64)
    sums = [
        size * (torch.ones(1, 1, 1).double() if i in (1, 2) else each.expand(1, 1, 1, 3))
        for i, size in enumerate(sizes)
    ]
    exact = precision_of(core.sandwich_precision, sums, torch.float64, cap=100.0, centre=centre)
    found = precision_of(filter_step.sandwich_precision, sums, torch.float32, cap=100.0, centre=centre)
    assert exact[0][0, 0, 0, 0] == pytest.approx(1 / 3, rel=5e-3)
    for one, true in zip(found, exact, strict=True):
        torch.testing.assert_close(one, true, rtol=1e-4, atol=0)


@needs_build
@pytest.mark.parametrize("seeds", [None, 2])
@pytest.mark.parametrize(("N", "width", "rank"), [(2, 5, 2), (18, 33, 16), (300, 256, 16), (40, 64, 64)])
def test_gelu_and_its_slope_equal_the_reference(N, width, rank, seeds):
    g = torch.Generator().manual_seed(N)
    a = 3 * torch.randn(N, width, generator=g, dtype=torch.float64)
    factor = torch.randn(*([seeds] if seeds else []), width, rank, generator=g, dtype=torch.float64)
    pulls = [torch.randn(N, size, generator=g, dtype=torch.float64) for size in (width, rank)]

    def run(function, dtype):
        x = a.detach().to(dtype).requires_grad_()
        outputs = function(x, factor.to(dtype))
        return [y.detach().double() for y in (*outputs, *torch.autograd.grad(outputs, x, [p.to(dtype) for p in pulls]))]

    exact = run(gelu_with_slope_reference, torch.float64)
    found, plain = (run(f, torch.float32) for f in (gelu_with_slope, gelu_with_slope_reference))
    assert_as_near_as(found, plain, exact, slack=1e-6)


@needs_build
def test_gelu_is_exact_over_its_range():
    a = torch.linspace(-15, 15, 100_001)
    found = gelu_with_slope(a[None], torch.zeros(len(a), 1))[0][0]
    assert (found - F.gelu(a.double())).abs().max() < 4e-7  # PyTorch's own: 3.7e-7 with AVX2, 1.1e-6 with AVX-512


@needs_build
@pytest.mark.parametrize("ramp", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("N", "D"), [(1, 1), (7, 33), (130, 64), (640, 64)])  # the last by several threads
def test_update_equals_the_other_path(N, D, ramp):
    g = torch.Generator().manual_seed(N)
    h, e = (torch.randn(N, D, generator=g, dtype=torch.float64) for _ in range(2))
    lam, r = (0.01 + 5 * torch.rand(N, D, generator=g, dtype=torch.float64) for _ in range(2))

    def run(path, dtype):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (h, lam, e, r)]
        belief = path.kalman_update(Belief(*inputs[:2]), *inputs[2:], ramp=ramp)
        loss = (belief.mean * h.to(dtype)).sum() + (belief.precision * e.to(dtype)).sum()
        return [x.detach().double() for x in (*belief, *torch.autograd.grad(loss, inputs))]

    assert update_is_plain(Belief(h.float(), lam.float()), e.float(), r.float())
    exact, plain, found = run(analytic, torch.float64), run(analytic, torch.float32), run(Fused(passes), torch.float32)
    assert_as_near_as(found, plain, exact, slack=5e-7)


@needs_build
@pytest.mark.parametrize("kept", [0, 1], ids=["mean", "precision"])
def test_an_update_of_which_one_half_is_used_has_zeros_for_the_gradient_of_the_other(kept):
    g = torch.Generator().manual_seed(0)
    inputs = [(0.01 + torch.rand(7, 33, generator=g)).requires_grad_() for _ in range(4)]

    def run(weights):
        belief = Fused(passes).kalman_update(Belief(*inputs[:2]), *inputs[2:], ramp=0.7)
        loss = sum((weight * belief[part]).sum() for part, weight in weights.items())
        return torch.autograd.grad(loss, inputs, materialize_grads=True)

    for ours, theirs in zip(run({kept: 2.0}), run({kept: 2.0, 1 - kept: 0.0}), strict=True):
        assert torch.equal(ours, theirs)


@needs_build
@pytest.mark.parametrize("jacobian", ["each", "shared", "scalar"])
@pytest.mark.parametrize("noise", ["each", "scalar"])
@pytest.mark.parametrize(("N", "D"), [(1, 1), (7, 33), (130, 64), (640, 64)])  # the last by several threads
def test_prediction_equals_the_other_path(N, D, noise, jacobian):
    g = torch.Generator().manual_seed(N)
    lam = 0.01 + 5 * torch.rand(N, D, generator=g, dtype=torch.float64)
    J = 0.7 * torch.randn({"each": (N, D), "shared": (D,), "scalar": ()}[jacobian], generator=g, dtype=torch.float64)
    Q = torch.rand((D,) if noise == "each" else (), generator=g, dtype=torch.float64)

    def run(path, dtype):
        wanted = [x.detach().to(dtype).requires_grad_() for x in ((lam, Q, J) if jacobian == "each" else (lam, Q))]
        slope = wanted[2] if jacobian == "each" else J.to(dtype)
        assert path is analytic or prediction_is_plain(wanted[0], slope, wanted[1])
        after = path.predict_precision(wanted[0], slope, wanted[1], low=0.05, cap=3.0)
        loss = (after * torch.arange(1, N * D + 1, dtype=dtype).cos().view(N, D)).sum()
        return [x.detach().double() for x in (after, *torch.autograd.grad(loss, wanted))]

    exact, plain, found = run(analytic, torch.float64), run(analytic, torch.float32), run(Fused(passes), torch.float32)
    assert_as_near_as(found, plain, exact, slack=1e-6)


@needs_build
@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
def test_dropout_draws_and_scales_as_the_other_path_does(p):
    x = torch.randn(7, 33, requires_grad=True)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        y = dropout(x, p)
        (grad,) = torch.autograd.grad(y.sum(), x)
        torch.manual_seed(3)
        mask = scaled_mask(x, p)
    assert torch.equal(y, x * mask) and torch.equal(grad, mask)


def test_steps_of_other_shapes_and_types_are_not_for_one_pass():
    belief = Belief(torch.ones(2, 3), torch.ones(2, 3))
    assert not update_is_plain(belief, torch.ones(2, 3), torch.ones(2, 1))
    assert not update_is_plain(belief, torch.ones(2, 3), torch.ones(2, 3).double())
    assert not prediction_is_plain(torch.ones(2, 3), torch.ones(3, requires_grad=True), torch.ones(3))
    assert not prediction_is_plain(torch.ones(2, 3), torch.ones(3), torch.ones(2, 3))


@needs_build
@pytest.mark.parametrize(("shifted", "offset"), [(True, 0), (True, -100), (False, 0)])
@pytest.mark.parametrize(("N", "V"), [(1, 1), (3, 17), (9, 5000)])
def test_exponentials_and_their_sums(N, V, shifted, offset):
    logits = offset + 20 * torch.randn(N, V + 3, generator=torch.Generator().manual_seed(V))
    logits[:, V:] = 500.0  # of others
    exact = logits[:, :V].double()
    top = exact.amax(dim=1, keepdim=True) if shifted else torch.zeros(N, 1)
    odds, total, shift = exponentials(logits[:, :V], shifted=shifted)
    expected = (exact - top).exp()
    torch.testing.assert_close(odds.double(), expected, rtol=1e-5, atol=1e-37)
    torch.testing.assert_close(total.double(), expected.sum(dim=1, keepdim=True), rtol=1e-6, atol=0)
    assert shift is None if not shifted else torch.equal(shift, top.float())
    assert odds.data_ptr() == logits.data_ptr()


@needs_build
def test_an_exponential_is_exact_to_two_units_in_the_last_place():
    x = torch.linspace(-87, 88, 100_001)
    found, *_ = exponentials(x.clone()[None], shifted=False)
    expected = x.double().exp()
    assert ((found[0].double() - expected) / expected).abs().max() < 2 * torch.finfo(torch.float32).eps
    beyond = torch.tensor([[-87.001, -1e30, -torch.inf, 88.001, 1e30, torch.inf, torch.nan]])
    found, *_ = exponentials(beyond, shifted=False)
    assert found[0].tolist()[:6] == [0, 0, 0, *[torch.inf] * 3] and found[0, 6].isnan()


@needs_build
def test_a_cross_entropy_with_what_is_not_a_number_is_not_a_number():
    states = torch.randn(4, 3)
    states[2, 1] = float("nan")
    assert torch.isnan(full_cross_entropy(states, torch.randn(7, 3), torch.zeros(4, dtype=torch.long)))


def compiler(folder, script):
    """A compiler of our own."""
    file = folder / "cc"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    return tmp_path / "cache" / "recbft"


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """A build, which takes seconds, of a user whose group may write what the user makes."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder))
        patched.delenv(compiled.SWITCH, raising=False)
        before = os.umask(0o002)
        try:
            compiled._loaded()
        finally:
            os.umask(before)
    [built] = (folder / "recbft").iterdir()
    return built


@pytest.fixture
def kept(build, cache):
    """The build, as the cache of a test has it."""
    cache.mkdir(parents=True, mode=0o700)
    return Path(shutil.copy(build, cache))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (compiled.SWITCH, "0", "RECBFT_COMPILED is '0'"),
        ("CC", "no-such-compiler", r"no C compiler \(no-such-compiler\); install gcc, or name it in CC"),
    ],
)
def test_a_build_that_is_not_to_be_had_has_a_reason(name, value, reason, cache, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv(name, value)
    with pytest.raises(compiled.UnavailableError, match=reason):
        compiled._loaded()
    assert not cache.exists() or list(cache.iterdir()) == []


def test_a_failed_build_says_why_and_leaves_nothing(cache, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv(
        "CC", compiler(tmp_path, 'case "$1" in --version) echo mine;; *) echo no vectors here >&2; exit 1;; esac')
    )
    with pytest.raises(compiled.UnavailableError, match="could not build them: no vectors here"):
        compiled._loaded()
    assert list(cache.iterdir()) == []


PRIVATE = """
import ctypes
public, ctypes.RTLD_GLOBAL = ctypes.RTLD_GLOBAL, ctypes.RTLD_LOCAL
import torch
ctypes.RTLD_GLOBAL = public
from recbft.kernels import compiled
assert not hasattr(ctypes.CDLL(None), "omp_get_thread_num")
print(compiled.missing())
"""


@needs_build
def test_pytorch_s_openmp_is_found_where_it_keeps_it_to_itself():
    # As its wheels for ARM do.
    done = subprocess.run([sys.executable, "-c", PRIVATE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"


def test_elsewhere_than_on_linux_other_paths_serve(cache, monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(compiled.UnavailableError, match="they are built on Linux"):
        compiled._loaded()


@needs_build
@pytest.mark.slow
def test_builds_are_kept_and_made_at_the_same_time_without_harm(cache):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: compiled._loaded(), range(2)))
    [built] = cache.iterdir()
    before = built.stat()
    compiled._loaded()
    assert list(cache.iterdir()) == [built] and built.stat().st_mtime_ns == before.st_mtime_ns


@needs_build
@pytest.mark.slow
@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:5000], lambda content: content[::-1]])
def test_a_build_that_was_cut_is_not_loaded(kept, monkeypatch, damage):
    kept.write_bytes(damage(kept.read_bytes()))
    monkeypatch.setattr(compiled, "_build", lambda *_: "made again")
    assert compiled._loaded() == "made again"


@needs_build
@pytest.mark.slow
def test_a_build_that_was_cut_is_replaced_by_what_it_was(kept):
    whole = kept.read_bytes()
    kept.write_bytes(whole[:5000])
    assert compiled._loaded() is not None
    assert [file.read_bytes() for file in kept.parent.iterdir()] == [whole]


@needs_build
@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_replaced_by_a_folder_of_this_process(build, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(compiled, "_build", lambda *words: ctypes.CDLL(shutil.copy(build, words[2])))
    assert compiled._loaded() is not None
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def unwritable(path, mode, access=os.access):
    """``os.access`` where nothing can be written."""
    return mode != os.W_OK and access(path, mode)


@needs_build
@pytest.mark.slow
def test_a_build_in_a_cache_that_can_only_be_read_is_loaded(kept, monkeypatch):
    monkeypatch.setattr(os, "access", unwritable)
    monkeypatch.setattr(compiled, "_build", lambda *_: pytest.fail("built again"))
    assert compiled._loaded() is not None


def place_of_a_build(compiler, sources, folder, stem):
    """In place of ``_build``: where it would keep what it builds."""
    return folder.resolve()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the cache is opened as Linux does it")
@pytest.mark.parametrize(("writable", "said"), [(True, "once; they stay in"), (False, "for this process alone")])
def test_what_cannot_be_read_in_the_cache_is_no_build(cache, monkeypatch, tmp_path, caplog, writable, said):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("CC", compiler(tmp_path, "echo mine"))
    monkeypatch.setattr(compiled, "_key", lambda *_: "key")
    if not writable:
        monkeypatch.setattr(os, "access", unwritable)
    monkeypatch.setattr(compiled, "_build", place_of_a_build)
    cache.mkdir(parents=True, mode=0o700)
    (cache / "kernels-key-0123.so").mkdir()  # open raises, as it does without permission
    with caplog.at_level(logging.INFO, logger="recbft"):
        folder = compiled._loaded()
    assert (folder == cache.resolve()) is writable
    assert [said in message for message in caplog.messages] == [True]


@needs_build
@pytest.mark.slow
def test_a_build_can_be_written_by_nobody_else_whatever_the_umask(build):
    assert stat.S_IMODE(build.stat().st_mode) == 0o755 and stat.S_IMODE(build.parent.stat().st_mode) == 0o700


def to_another(path):
    """Give a file or folder to another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(path, 12345, -1)


@needs_build
@pytest.mark.slow
@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("expose", [to_another, *(lambda path, m=m: path.chmod(m) for m in (0o770, 0o777))])
def test_a_cache_that_another_user_may_write_is_not_used(kept, cache, monkeypatch, tmp_path, caplog, expose, linked):
    if linked:
        cache.symlink_to(cache.rename(tmp_path / "elsewhere"))
    expose(cache)
    monkeypatch.setattr(compiled, "_build", place_of_a_build)
    with caplog.at_level(logging.INFO, logger="recbft"):
        folder = compiled._loaded()
    assert folder.name.startswith("recbft-kernels-") and list(cache.iterdir()) == [cache / kept.name]
    assert f"not kept in {cache}: another user owns or may write it; make it your own" in caplog.messages[0]
    assert "for this process alone" in caplog.messages[1]


def by_a_link(path):
    """A link to the file in its place."""
    path.symlink_to(path.rename(path.parent.parent / "elsewhere"))


@needs_build
@pytest.mark.slow
@pytest.mark.parametrize("expose", [to_another, by_a_link, *(lambda path, m=m: path.chmod(m) for m in (0o775, 0o757))])
def test_a_file_of_the_cache_that_another_user_may_write_is_built_again(kept, cache, monkeypatch, expose):
    expose(kept)
    monkeypatch.setattr(compiled, "_build", place_of_a_build)
    assert compiled._loaded() == cache.resolve()


@needs_build
@pytest.mark.slow
@pytest.mark.parametrize("user", [None, 12345])
def test_a_build_of_this_user_or_root_is_loaded_through_a_link_too(kept, cache, monkeypatch, tmp_path, user):
    cache.symlink_to(cache.rename(tmp_path / "elsewhere"))
    if user is not None:
        if os.geteuid() != 0:
            pytest.skip("only root has builds of root")
        monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(compiled, "_build", lambda *_: pytest.fail("built again"))
    assert compiled._loaded() is not None


@needs_build
@pytest.mark.slow
def test_a_folder_put_in_the_place_of_the_cache_once_that_is_checked_is_not_read(kept, cache, monkeypatch, tmp_path):
    def checked(descriptor, check=compiled._is_ours):
        if cache.joinpath(kept.name).exists():
            cache.rename(tmp_path / "before")
            cache.mkdir()
        return check(descriptor)

    monkeypatch.setattr(compiled, "_is_ours", checked)
    monkeypatch.setattr(compiled, "_build", lambda *_: pytest.fail("built again"))
    assert compiled._loaded() is not None
    assert list(cache.iterdir()) == []


@needs_build
@pytest.mark.parametrize("library", [False, True], ids=["no library", "a library of others"])
def test_a_file_without_our_functions_is_built_again(cache, monkeypatch, tmp_path, library):
    file = tmp_path / "other.c"
    file.write_text("int other;")
    if library:
        made = tmp_path / "other.so"
        subprocess.run([*compiled._compiler(), "-shared", "-fPIC", str(file), "-o", str(made)], check=True)
        file = made
    monkeypatch.setattr(compiled, "_key", lambda *_: "key")
    monkeypatch.setattr(compiled, "_build", place_of_a_build)
    cache.mkdir(parents=True, mode=0o700)
    planted = file.rename(cache / compiled._name("kernels-key", file.read_bytes()))
    planted.chmod(0o755)
    assert compiled._loaded() == cache.resolve()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, r"CC is '\"' \(No closing quotation\); give a command"),
        ("exit 0", "what .* builds cannot be loaded .*; use gcc, whose OpenMP is PyTorch's"),
        (r"printf '\377\376'; exit 1", "could not build them"),
        (r"printf 'In file included from a.h:1,\n    from a.c:1:\nmath.h: none\n' >&2; exit 1", "them: math.h: none"),
    ],
)
def test_a_compiler_that_is_none_has_a_reason(cache, monkeypatch, tmp_path, script, reason):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("CC", '"' if script is None else compiler(tmp_path, script))
    with pytest.raises(compiled.UnavailableError, match=reason):
        compiled._loaded()
    assert not cache.exists() or list(cache.iterdir()) == []


def test_without_a_build_the_other_path_serves_and_the_reason_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(compiled, "_found", lambda: "no compiled kernels: none here")
    dispatch._log_once.cache_clear()
    context = packed([[4]], 4)
    q, k, v, *_ = (x.float() for x in drawn(1, 1, 4, 3, seed=0))
    with caplog.at_level(logging.INFO, logger="recbft"):
        for _ in range(2):
            found = softmax_moments(q, k, v, context)
    assert caplog.messages == ["compiled path declined: no compiled kernels: none here"]
    assert torch.equal(found.mean, softmax_moments(q, k, v, context, impl="cpu").mean)
