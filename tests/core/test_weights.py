"""Statistics of written-out weights, and the estimators on them, against sums spelled out entry by entry."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch

from recbft.core import (
    MAX_TOKENS,
    SequenceContext,
    SiluMoments,
    delta_precision,
    design_effect_precision,
    effective_sample_size,
    key_variance,
    per_dimension_weights,
    projected_precision,
    propagated_variance,
    reml_naive_precision,
    reml_precision_ref,
    residual_variance,
    sandwich_precision_ref,
    softmax_weights,
    weight_sums,
)
from tests.packed_rows import packed

B, H, T, K = 2, 2, 6, 3
D = H * K
context_of = partial(packed, [[3, 2], [6]], T)


def drawn(seed):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, K, generator=g, dtype=torch.float64) for _ in range(3))
    precision = 0.2 + 4 * torch.rand(B, T, D, generator=g, dtype=torch.float64)
    return q, k, v, precision, torch.tensor(-0.1, dtype=torch.float64)


def by_hand(q, k, v, precision, log_decay, *, causal, per_dimension):
    """Every token's and coordinate's weights and values: {(b, h, t, c): (weights, values, trust in each key)}."""
    found, context = {}, context_of()
    for b, h, t, c in itertools.product(range(B), range(H), range(T), range(K)):
        segment, position = context.segment[b], context.position[b]
        real = segment[t] >= 0
        keys = [j for j in range(T) if real and segment[j] == segment[t] and not (causal and position[j] > position[t])]
        trust = precision[b, keys, h * K + c] if per_dimension else precision[b, keys].mean(-1)
        lag = (position[t] - position[keys]).abs()
        odds = trust * torch.exp(k[b, h, keys] @ q[b, h, t] / math.sqrt(K) + lag * log_decay)
        found[b, h, t, c] = [x.tolist() for x in (odds / odds.sum(), v[b, h, keys, c], trust)]
    return found


def weights_and_values(q, k, v, precision, log_decay, context, per_dimension):
    """As the mixer has them: (B, H, T, T) with (B, H, T, K), or (B, D, T, T) with (B, D, T, 1); and the trust."""
    if per_dimension:
        weights = per_dimension_weights(q, k, context, log_precision=precision.log(), log_decay=log_decay)
        return weights, v.mT.reshape(B, D, T, 1), precision.mT
    trust = precision.mean(-1)
    return softmax_weights(q, k, context, log_precision=trust.log(), log_decay=log_decay), v, trust


ESTIMATORS = {
    "reml": (
        lambda a, v, p, c: reml_precision_ref(
            residual_variance(a, v, c), effective_sample_size(a), prior_scale=0.3, prior_dof=2.0, cap=1e6
        ),
        lambda a, v, p: (n(a) + 2) / (spread(a, v) + 0.6),
    ),
    "sandwich": (
        lambda a, v, p, c: sandwich_precision_ref(weight_sums(a, v, c), cap=50.0),
        lambda a, v, p: 1 / max(1 / 50, sum(w * w * (x - mean(a, v)) ** 2 for w, x in zip(a, v, strict=True))),
    ),
    "delta": (
        lambda a, v, p, c: delta_precision(propagated_variance(a, p), cap=1e6),
        lambda a, v, p: 1 / sum(w * w / x for w, x in zip(a, p, strict=True)),
    ),
    "design_effect": (
        lambda a, v, p, c: design_effect_precision(
            key_variance(v, c), effective_sample_size(a), prior_scale=0.3, prior_dof=2.0, cap=1e6
        ),
        lambda a, v, p: n(a) / (spread([1 / len(v)] * len(v), v) + 0.6),
    ),
}


def mean(a, v):
    return sum(w * x for w, x in zip(a, v, strict=True))


def spread(a, v):
    return sum(w * (x - mean(a, v)) ** 2 for w, x in zip(a, v, strict=True))


def n(a):
    return 1 / sum(w * w for w in a)


@pytest.mark.parametrize("per_dimension", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_an_estimator_is_its_formula_entry_by_entry(estimator, causal, per_dimension, seed=0):
    inputs, context = drawn(seed), context_of(causal=causal)
    weights, values, trust = weights_and_values(*inputs, context, per_dimension)
    estimate, formula = ESTIMATORS[estimator]
    found = estimate(weights, values, trust, context).expand_as(values).reshape(B, H, -1, T, values.shape[-1])
    found = found.transpose(2, 3).reshape(B, H, T, K)
    innovation = (weights @ values).reshape(B, H, -1, T, values.shape[-1]).transpose(2, 3).reshape(B, H, T, K)
    for (b, h, t, c), (a, v, p) in by_hand(*inputs, causal=causal, per_dimension=per_dimension).items():
        if not a:
            assert found[b, h, t, c] == 0 and innovation[b, h, t, c] == 0, "nothing read, nothing known"
            continue
        assert innovation[b, h, t, c].item() == pytest.approx(mean(a, v), rel=1e-10, abs=1e-12)
        assert found[b, h, t, c].item() == pytest.approx(formula(a, v, p), rel=1e-8)


@pytest.mark.parametrize("per_dimension", [False, True])
@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_an_estimator_passes_gradcheck_down_to_queries_keys_values_and_precision(estimator, per_dimension):
    context, estimate = context_of(), ESTIMATORS[estimator][0]

    def run(q, k, v, precision, log_decay):
        weights, values, trust = weights_and_values(q, k, v, precision, log_decay, context, per_dimension)
        # A lone key has no spread: the clamp at 0 has a corner there.
        return estimate(weights, values, trust, context)[:, :, [2, 4]]

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in drawn(0)], fast_mode=True)


def test_design_effect_for_one_key_is_the_prior_alone_and_sandwich_the_cap():
    q, k, v, *_ = drawn(8)
    a, context = softmax_weights(q, k, context_of()), context_of()
    one = design_effect_precision(key_variance(v, context), effective_sample_size(a), prior_scale=1 / K)
    torch.testing.assert_close(one[:, :, 0], torch.full((B, H, K), float(K)).double(), rtol=1e-9, atol=0)
    assert (sandwich_precision_ref(weight_sums(a, v, context), cap=40.0)[:, :, 0] == 40).all()


def test_no_rounding_makes_a_variance_negative():
    g = torch.Generator().manual_seed(10)
    weights = torch.rand(B, H, T, T - 1, generator=g).softmax(-1)
    v = torch.full((B, H, T, K), 7.3)
    v[:, :, 0] = 0  # the first token, from which values are counted, is not read
    context = SequenceContext(torch.zeros(B, T).long(), torch.arange(T).expand(B, T))
    none = residual_variance(torch.nn.functional.pad(weights, (1, 0)), v, context)
    assert (none >= 0).all() and (none < 1e-4).all()


@pytest.mark.parametrize("known", [{}, {"cap": 3.0}])
def test_every_estimate_ends_at_the_cap_a_hundred_unless_another_is_given(known):
    surely, n = torch.full((2, 5), 1e-9).double(), torch.full((2,), 3.0).double()
    prior = {"prior_scale": 1e-6}
    sums = SiluMoments(surely * 0, n / 3, n / 3, surely * 0, surely)
    estimates = (
        reml_precision_ref(surely, n, **prior, **known),
        reml_naive_precision(surely, n, **known),
        sandwich_precision_ref(sums, **known),
        delta_precision(surely, **known),
        design_effect_precision(surely, n, **prior, **known),
        projected_precision(1 / surely, torch.eye(5).double(), **known),
    )
    for estimate in estimates:
        torch.testing.assert_close(estimate, torch.full_like(estimate, known.get("cap", 100.0)))


def test_a_shift_of_the_values_moves_no_estimate():
    q, k, v, precision, _ = drawn(9)
    a, context = softmax_weights(q, k, context_of()), context_of()
    for estimate, _ in ESTIMATORS.values():
        one, two = (estimate(a, values, precision.mean(-1), context) for values in (v, v + 1e4))
        torch.testing.assert_close(one, two, rtol=1e-7, atol=1e-9)


def test_rows_too_long_for_weights_per_dimension_are_refused():
    long = torch.zeros(1, 1, MAX_TOKENS + 1, 2)
    context = SequenceContext(torch.zeros(1, MAX_TOKENS + 1).long(), torch.arange(MAX_TOKENS + 1)[None])
    with pytest.raises(ValueError, match=r"per-dimension weights of 65 tokens .* at most 64 tokens are taken"):
        per_dimension_weights(long, long, context, log_precision=torch.zeros(1, MAX_TOKENS + 1, 2))
    longest, context = long[:, :, 1:], SequenceContext(context.segment[:, 1:], context.position[:, 1:])
    assert per_dimension_weights(longest, longest, context, log_precision=torch.zeros(1, MAX_TOKENS, 2)).shape[-1] == 64
