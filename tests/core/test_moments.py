"""Softmax moments against dense weighted statistics written out token by token."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from recbft.core import SequenceContext, per_dimension_weights, softmax_weights
from recbft.kernels.softmax_moments import softmax_mean, softmax_moments
from recbft.kernels.softmax_moments.torch import blocks_of
from tests.packed_rows import packed
from tests.tolerances import assert_same

IMPLS = ("torch", "reference")  # those that serve float64 on the CPU


def random_inputs(B, H, T, K, *, seed, dtype=torch.float64, bias=True):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, K, generator=g, dtype=dtype) for _ in range(3))
    log_precision = torch.randn(B, T, generator=g, dtype=dtype) if bias else None
    log_decay = torch.tensor(-0.05, dtype=dtype) if bias else None
    return q, k, v, log_precision, log_decay


def dense_moments(q, k, v, context, log_precision, log_decay):
    """Every statistic by its definition, token by token."""
    B, H, T, K = q.shape
    mean, variance, size = torch.zeros_like(v), torch.zeros_like(v), v.new_zeros(B, H, T)
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        segment, position = context.segment[b], context.position[b]
        if segment[t] < 0:
            continue
        keys = [j for j in range(T) if segment[j] == segment[t] and not (context.causal and position[j] > position[t])]
        logits = k[b, h, keys] @ q[b, h, t] / math.sqrt(K)
        if log_precision is not None:
            logits = logits + log_precision[b, keys]
        if log_decay is not None:
            logits = logits + log_decay * (position[t] - position[keys]).abs()
        a = logits.exp() / logits.exp().sum()
        mean[b, h, t] = a @ v[b, h, keys]
        variance[b, h, t] = a @ (v[b, h, keys] - mean[b, h, t]).square()
        size[b, h, t] = 1 / a.square().sum()
    return mean, variance, size


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("impl", IMPLS)
def test_moments_equal_dense_weighted_statistics(impl, bias, causal):
    context = packed([[3, 1, 2], [6], [4]], 7, causal=causal)
    q, k, v, log_precision, log_decay = random_inputs(3, 2, 7, 5, seed=1, bias=bias)
    found = softmax_moments(q, k, v, context, log_precision=log_precision, log_decay=log_decay, impl=impl)
    assert_same(found, dense_moments(q, k, v, context, log_precision, log_decay))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [(3, 2, 7, 7), (1, 1, 7, 7)])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_bias_per_pair_is_one_more_term_of_the_logits(impl, shape, causal):
    """As if the product of a further coordinate of queries and keys were it."""
    context = packed([[3, 1, 2], [6], [4]], 7, causal=causal)
    q, k, v, log_precision, log_decay = random_inputs(3, 2, 7, 5, seed=1)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    known = {"log_precision": log_precision, "log_decay": log_decay, "bias": bias}
    eye = torch.eye(7, dtype=q.dtype).expand(3, 2, 7, 7)
    wide_q = torch.cat([q * (12 / 5) ** 0.5, bias.expand(3, 2, 7, 7) * 12**0.5], dim=-1)
    wide_k, wide_v = torch.cat([k, eye], dim=-1), torch.cat([v, 0 * eye], dim=-1)
    mean, variance, size = dense_moments(wide_q, wide_k, wide_v, context, log_precision, log_decay)
    found = softmax_moments(q, k, v, context, **known, impl=impl)
    assert_same(found, [mean[..., :5], variance[..., :5], size])
    weights = softmax_weights(q, k, context, **known)
    assert_same([softmax_mean(q, k, v, context, **known), weights @ v], [found.mean, found.mean])
    each = per_dimension_weights(
        q, k, context, log_precision=log_precision[..., None].expand(3, 7, 10), log_decay=log_decay, bias=bias
    )
    assert_same([each], [weights.repeat_interleave(5, dim=1)])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("seed", [0, 1])
def test_each_path_passes_gradcheck(impl, seed):
    context = packed([[2, 2], [3]], 4, causal=seed != 1)
    bias = torch.randn([(2, 1, 4, 4), (1, 1, 4, 4)][seed], generator=torch.Generator().manual_seed(2)).double()
    inputs = [x.requires_grad_() for x in (*random_inputs(2, 1, 4, 3, seed=seed), bias)]

    def run(q, k, v, log_precision, log_decay, bias):
        known = {"log_precision": log_precision, "log_decay": log_decay, "bias": bias, "impl": impl}
        return (*softmax_moments(q, k, v, context, **known), softmax_mean(q, k, v, context, **known))

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("T", [1, 2, 101])
@pytest.mark.parametrize("causal", [True, False])
def test_cpu_path_equals_the_reference_in_values_and_gradients(T, causal):
    context = packed([[T], [T // 2, T - T // 2] if T > 1 else [1], [max(1, T - 1)]], T, causal=causal)
    results = {}
    for impl in IMPLS:
        inputs = [x.requires_grad_() for x in random_inputs(3, 2, T, 8, seed=T)]
        q, k, v, log_precision, log_decay = inputs
        moments = softmax_moments(q, k, v, context, log_precision=log_precision, log_decay=log_decay, impl=impl)
        g = torch.Generator().manual_seed(7)
        loss = sum((m * torch.randn(m.shape, generator=g, dtype=m.dtype)).sum() for m in moments)
        results[impl] = [*moments, *torch.autograd.grad(loss, inputs)]
    for ours, theirs in zip(results["torch"], results["reference"], strict=True):
        assert_same([ours], [theirs])


@pytest.fixture
def tiny_blocks(monkeypatch):
    for name, value in (("SHORT", 2), ("TOKENS", 2), ("PAIRS", 1)):
        monkeypatch.setattr(f"recbft.kernels.softmax_moments.torch.{name}", value)


def shuffled_context(*, causal):
    """Histories that lie about in their rows in no order, and a row of padding."""
    segment = torch.tensor([[0, 1, 0, 1, 0], [2, 2, -1, 3, 3], [-1] * 5])
    position = torch.tensor([[2, 0, 1, 1, 0], [1, 0, 0, 0, 1], [0] * 5])
    return SequenceContext(segment, position, causal=causal)


@pytest.mark.parametrize(("causal", "bias_shape"), [(True, None), (False, (3, 1, 5, 5))])
def test_rows_in_blocks_pass_gradcheck_and_equal_the_reference(causal, bias_shape, tiny_blocks):
    context = shuffled_context(causal=causal)
    inputs = list(random_inputs(3, 2, 5, 2, seed=12))
    if bias_shape is not None:
        inputs.append(torch.randn(bias_shape, generator=torch.Generator().manual_seed(13), dtype=torch.float64))
    inputs = [x.requires_grad_() for x in inputs]

    def run(q, k, v, log_precision, log_decay, bias=None, impl="torch"):
        known = {"log_precision": log_precision, "log_decay": log_decay, "bias": bias}
        return (*softmax_moments(q, k, v, context, **known, impl=impl), softmax_mean(q, k, v, context, **known))

    assert len(blocks_of(context, num_heads=2)) == 9
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert_same(run(*inputs), run(*inputs, impl="reference"))


def test_blocks_hold_every_pair_that_may_be_read_once_and_leave_out_later_keys(monkeypatch):
    monkeypatch.setattr("recbft.kernels.softmax_moments.torch.PAIRS", 2 * 50 * 130 * 2)  # two rows
    context = packed([[130], [60, 40], [], [3] * 20, [129]], 130)
    seen = torch.zeros(5, 130, 130)
    for block in blocks_of(context, num_heads=2):
        seen[block.rows, block.tokens, block.keys] += 1
    assert seen.max() == 1
    assert (seen[context.allowed] == 1).all()
    assert seen[0, :50, 50:].sum() == 0 and seen[4, 50:100, 100:].sum() == 0
    assert seen.sum() < 0.75 * seen.numel()


def test_rows_in_blocks_give_the_same_bits_twice(T=130):
    results = []
    for _ in range(2):
        inputs = [x.requires_grad_() for x in random_inputs(3, 2, T, 8, seed=T, dtype=torch.float32)]
        context = packed([[T], [30, 20], [T - 1]], T)
        moments = softmax_moments(*inputs[:3], context, log_precision=inputs[3], log_decay=inputs[4], impl="torch")
        results.append([*moments, *torch.autograd.grad(sum(m.square().sum() for m in moments), inputs)])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_inputs_give_the_same_moments(impl):
    context = packed([[5, 3]], 8)
    q, k, v, log_precision, log_decay = random_inputs(1, 2, 8, 4, seed=3)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    plain = softmax_moments(q, k, v, context, log_precision=log_precision, log_decay=log_decay, impl=impl)
    other = softmax_moments(*strided, context, log_precision=log_precision, log_decay=log_decay, impl=impl)
    assert_same(plain, other)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_large_offset_of_the_values_does_not_spoil_the_residual_variance(impl):
    context = packed([[200]], 200)
    q, k, v, *_ = random_inputs(1, 2, 200, 16, seed=4, dtype=torch.float32, bias=False)
    exact = softmax_moments(q.double(), k.double(), v.double(), context, impl="reference").residual_variance
    shifted = softmax_moments(q, k, v + 10, context, impl=impl).residual_variance
    relative = ((shifted - exact).abs() / exact.clamp(min=1e-3))[:, :, 8:]
    assert relative.max() < 2e-4
    assert relative.median() < 5e-6


def test_the_mean_alone_is_bit_for_bit_the_mean_of_the_moments():
    context = packed([[6, 2], [5]], 8)
    q, k, v, log_precision, log_decay = random_inputs(2, 2, 8, 4, seed=8)
    biases = {"log_precision": log_precision, "log_decay": log_decay}
    assert torch.equal(softmax_mean(q, k, v, context, **biases), softmax_moments(q, k, v, context, **biases).mean)


def test_dropout_moves_the_mean_and_leaves_the_statistics():
    context = packed([[50]], 50)
    q, k, v, *_ = random_inputs(1, 1, 50, 4, seed=9, bias=False)
    plain = softmax_moments(q, k, v, context)
    dropped = softmax_moments(q, k, v, context, dropout=0.5)
    assert not torch.allclose(dropped.mean, plain.mean)
    torch.testing.assert_close(dropped.residual_variance, plain.residual_variance)
    torch.testing.assert_close(dropped.effective_sample_size, plain.effective_sample_size)


def test_an_unknown_or_unable_path_is_refused_with_the_reason():
    context = packed([[2]], 2)
    q, k, v, *_ = random_inputs(1, 1, 2, 2, seed=0, bias=False)
    with pytest.raises(ValueError, match="unknown impl 'gpu'; choose one of auto, c, reference, torch"):
        softmax_moments(q, k, v, context, impl="gpu")
    with pytest.raises(ValueError, match="moments with attention dropout are served by the reference"):
        softmax_moments(q, k, v, context, impl="torch", dropout=0.1)
    for attend in (softmax_moments, softmax_mean):
        with pytest.raises(ValueError, match=r"log_decay has shape \(2,\); give a scalar"):
            attend(q, k, v, context, log_decay=torch.zeros(2))
