"""A bias per pair of tokens: the same as logits that hold it already, on every path, with its gradient."""

from __future__ import annotations

import pytest
import torch

from recbft.core import SequenceContext, per_dimension_weights, softmax_weights
from recbft.kernels.softmax_moments import softmax_mean, softmax_moments

IMPLS = ("torch", "reference")  # those serve float64 on the CPU
B, H, T, K = 2, 3, 5, 4
SHAPES = [(B, H, T, T), (1, 1, T, T)]


def context(causal=True):
    segment = torch.tensor([[0, 0, 0, 1, 1], [2, 2, 2, 2, -1]])
    return SequenceContext(segment, torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]), causal=causal)


def drawn(shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, K, generator=g, dtype=torch.float64) for _ in range(3))
    return (
        q,
        k,
        v,
        torch.randn(B, T, generator=g).double(),
        torch.tensor(-0.1).double(),
        torch.randn(shape, generator=g).double(),
    )


def dense(q, k, v, log_precision, log_decay, bias, where):
    logits = q @ k.mT / K**0.5 + log_precision[:, None, None] + (where.lag * log_decay)[:, None] + bias
    logits = logits.masked_fill(~where.allowed[:, None], float("-inf"))
    weights = torch.softmax(logits, -1).nan_to_num(0.0)
    mean = weights @ v
    return weights, mean, weights @ v.square() - mean.square()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("impl", IMPLS)
def test_moments_have_the_bias_in_their_logits(impl, shape, causal):
    q, k, v, log_precision, log_decay, bias = drawn(shape)
    where, known = context(causal), {"log_precision": log_precision, "log_decay": log_decay, "bias": bias}
    weights, mean, spread = dense(q, k, v, log_precision, log_decay, bias, where)
    found = softmax_moments(q, k, v, where, **known, impl=impl)
    torch.testing.assert_close(found.mean, mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.residual_variance, spread, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(softmax_mean(q, k, v, where, **known), mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(softmax_weights(q, k, where, **known), weights, rtol=1e-10, atol=1e-12)


def test_weights_per_dimension_have_it_too():
    q, k, _, log_precision, log_decay, bias = drawn(SHAPES[0])
    each = log_precision[..., None].expand(B, T, H * K)
    known = {"log_decay": log_decay, "bias": bias}
    found = per_dimension_weights(q, k, context(), log_precision=each, **known)
    shared = softmax_weights(q, k, context(), log_precision=log_precision, **known)
    torch.testing.assert_close(found, shared.repeat_interleave(K, dim=1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("impl", IMPLS)
def test_each_path_passes_gradcheck_with_a_bias(impl, shape):
    inputs = [x.requires_grad_() for x in drawn(shape, seed=1)]

    def run(q, k, v, log_precision, log_decay, bias):
        known = {"log_precision": log_precision, "log_decay": log_decay, "bias": bias}
        return (*softmax_moments(q, k, v, context(), **known, impl=impl), softmax_mean(q, k, v, context(), **known))

    assert torch.autograd.gradcheck(run, inputs, atol=1e-6)
