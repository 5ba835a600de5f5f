"""Half-precision heads with what is added to their logits in float32: served, and near what float64 gives."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from recbft.kernels.silu_moments import silu_mean, silu_moments
from recbft.kernels.softmax_moments import softmax_mean, softmax_moments
from tests.packed_rows import packed

B, H, T, K = 2, 2, 7, 4
TERMS = {"log_precision": (B, T), "log_decay": (), "bias": (1, H, T, T), "lag_bias": (4,)}
HALVES = (torch.float16, torch.bfloat16)
IMPLS = ("auto", "torch", "reference")


context = partial(packed, [[4, 2], [7]], T)


def leaves_of(dtype, *terms, seed):
    """Heads that a half holds, and terms that it does not."""
    g = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(B, H, T, K, generator=g, dtype=torch.float64).to(dtype) for name in "qkv"}
    made |= {name: 0.3 * torch.randn(TERMS[name], generator=g) - 0.1 for name in terms}
    return {name: leaf.requires_grad_() for name, leaf in made.items()}


def values_and_gradients(attend, leaves, where):
    q, k, v, *_ = leaves.values()
    found = attend(q, k, v, where, **{name: leaf for name, leaf in leaves.items() if name in TERMS})
    outputs = [found] if isinstance(found, torch.Tensor) else list(found)
    places = (torch.arange(1.0, output.numel() + 1).cos().view(output.shape) for output in outputs)
    total = sum((output * place).sum() for output, place in zip(outputs, places, strict=True))
    return [*outputs, *torch.autograd.grad(total, list(leaves.values()))]


def cast(leaves, dtype):
    return {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in leaves.items()}


def distances(found, exact):
    """Of each output and gradient, relative, over all draws: that of one number is a matter of luck."""
    pairs = [
        (torch.stack(ours).detach().double(), torch.stack(truth).detach())
        for ours, truth in zip(found, exact, strict=True)
    ]
    return [float((ours - truth).norm() / truth.norm()) for ours, truth in pairs]


def check(mechanism, *terms, where, **known):
    """Types, and errors at most a last digit, or twice those of the reference that is given halves alone."""

    def over(draws, impl):
        """Each output and gradient, of every draw."""
        return list(
            zip(*(values_and_gradients(partial(mechanism, impl=impl, **known), x, where) for x in draws), strict=True)
        )

    for dtype in HALVES:
        draws = [leaves_of(dtype, *terms, seed=seed) for seed in range(8)]
        exact = over([cast(draw, torch.float64) for draw in draws], "reference")
        plain = distances(over([cast(draw, dtype) for draw in draws], "reference"), exact)
        for impl in IMPLS:
            found = over(draws, impl)
            leaves = [leaf.dtype for leaf in draws[0].values()]
            assert [first.dtype for first, *_ in found] == [dtype] * (len(found) - len(leaves)) + leaves
            for ours, half in zip(distances(found, exact), plain, strict=True):
                assert ours <= max(2 * half, torch.finfo(dtype).eps), (dtype, impl)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mechanism", [softmax_moments, softmax_mean, silu_moments, silu_mean])
def test_terms_may_be_wider_than_their_heads(mechanism, causal):
    known = ({"length": T}, ["lag_bias"]) if mechanism in (silu_moments, silu_mean) else ({}, [])
    terms = ["log_precision", "log_decay", "bias", *known[1]]
    check(mechanism, *terms, where=context(causal=causal), **known[0])


@pytest.mark.parametrize("term", ["log_precision", "log_decay", "bias"])
def test_a_single_wide_term_widens_no_moment(term):
    check(softmax_moments, term, where=context(causal=True))
    check(silu_moments, term, where=context(causal=True), length=T)


@pytest.mark.parametrize("mechanism", [softmax_moments, softmax_mean])
def test_dropout_leaves_the_type_of_the_values(mechanism):
    for dtype in HALVES:
        leaves = leaves_of(dtype, "log_precision", "log_decay", seed=0)
        found = values_and_gradients(partial(mechanism, dropout=0.5), leaves, context(causal=True))
        outputs = len(found) - len(leaves)
        assert [x.dtype for x in found] == [dtype] * outputs + [leaf.dtype for leaf in leaves.values()]
