"""What the dynamics of robust filter attention say: limits, regimes, and filters whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch

from recbft.kernels.robust_filter import Dynamics, Setting, Variant, decayed_weights, filtered, read_clock
from recbft.kernels.robust_filter.dynamics import residual_variance
from tests.kernels.test_robust_filter import head, one_history, randoms


def weights_and_logits(q, k, dynamics, kernel="student"):
    context = one_history(q.shape[2])
    clock = read_clock(context, dtype=torch.float64)
    return decayed_weights(q, k, Setting(context, dynamics, clock, Variant(kernel=kernel)), None)


def isotropic(*given):
    return filtered(*given, impl="isotropic")


@pytest.mark.parametrize("process", [0.0, 0.7])
def test_as_decay_goes_to_zero_the_filter_goes_to_the_one_without_decay(process):
    q, k, v = (randoms(1, 1, 9, 2, seed=s) for s in range(3))
    context = one_history(9)
    clock = read_clock(context, dtype=torch.float64)
    still = isotropic(q, k, v, context, head(decay=0.0, process=process), clock, Variant())
    for decay, tolerance in ((1e-3, 2e-2), (1e-6, 2e-5), (1e-9, 2e-8)):
        nearly = isotropic(q, k, v, context, head(decay=decay, process=process / (2 * decay)), clock, Variant())
        for one, two in zip(nearly, still, strict=True):
            torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


def test_variance_settles_in_the_integrative_regime_and_spreads_in_the_diffusive_one():
    lag = torch.arange(60).double()
    for key_noise, process in ((0.9, 0.1), (0.1, 0.9)):
        d = head(decay=0.08, process=process, key_noise=key_noise, query_noise=0.2)
        precision = 1 / residual_variance(lag, Dynamics(*(x[0] for x in d)))
        alpha, beta = key_noise - process, 0.2 + process
        if alpha > 0:
            expected = torch.sigmoid(2 * 0.08 * lag - math.log(alpha / beta)) / beta
            bias = -math.log(beta) - torch.nn.functional.softplus(math.log(alpha / beta) - 2 * 0.08 * lag)
            assert (precision.diff() > 0).all()
        else:
            expected = 1 / (beta + alpha * torch.exp(-2 * 0.08 * lag))
            bias = -math.log(beta) - torch.log(1 + alpha / beta * torch.exp(-2 * 0.08 * lag))
            assert (precision.diff() < 0).all()
        torch.testing.assert_close(precision, expected)
        torch.testing.assert_close(precision.log(), bias)
        assert precision[-1].item() == pytest.approx(1 / beta, rel=1e-3)


def test_heads_that_see_no_misfit_weigh_keys_by_the_regime_alone():
    nothing = torch.zeros(1, 1, 8, 2, dtype=torch.complex128)
    for process, recent_first in ((5.0, True), (0.0, False)):
        _, logits = weights_and_logits(nothing, nothing, head(process=process, key_noise=1.0))
        last = logits[0, 0, -1]
        assert (last.diff() > 0).all() == recent_first and (last.diff() < 0).all() != recent_first


def test_without_decay_and_with_little_diffusion_the_prior_is_a_linear_bias_on_distance():
    nothing = torch.zeros(1, 1, 6, 2, dtype=torch.complex128)
    _, logits = weights_and_logits(nothing, nothing, head(decay=0.0, process=1e-6, key_noise=0.5, query_noise=0.3))
    slope = logits[0, 0, -1].diff()
    torch.testing.assert_close(slope, torch.full_like(slope, 1e-6 / 0.8), rtol=1e-5, atol=0)


def test_without_decay_and_noise_only_the_difference_after_rotation_counts():
    q, k = randoms(1, 1, 8, 2, seed=1), randoms(1, 1, 8, 2, seed=2)
    d = head(decay=0.0, process=0.0)
    weights, logits = weights_and_logits(q, k, d)
    t = torch.arange(8).double()
    turn = torch.exp(-1j * d.frequency[:, None] * t[:, None])  # (1, 8, 2)
    distance = ((q * turn)[0, 0, :, None] - (k * turn)[0, 0, None]).abs().square().sum(-1) / 0.7
    expected = -math.log(0.7) - (8 + 2) / 2 * torch.log1p(distance / 8)
    torch.testing.assert_close(logits[0, 0].tril(), expected.tril())
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 8).double())


def test_a_trajectory_without_noise_is_its_own_estimate():
    d = head(decay=0.13, frequency=[0.4, -1.1])
    t = torch.arange(9).double()
    carry = torch.exp((-0.13 + 1j * d.frequency) * t[:, None])  # (9, 2)
    state = (carry * randoms(2, seed=5))[None, None]
    context = one_history(9)
    value, evidence = isotropic(state, state, state, context, d, read_clock(context, dtype=torch.float64), Variant())
    torch.testing.assert_close(value, state)
    precision = 1 / residual_variance(t, Dynamics(*(x[0] for x in d)))
    torch.testing.assert_close(evidence[0, 0], precision.cumsum(0))


def unit_norm(x):
    return x / x.abs().square().sum(-1, keepdim=True).sqrt()


def test_with_equal_norms_and_no_decay_scores_are_a_monotone_map_of_rope_scores():
    q, k = unit_norm(randoms(1, 1, 12, 4, seed=1)), unit_norm(randoms(1, 1, 12, 4, seed=2))
    d = head(decay=0.0, process=0.0, frequency=[0.9, -0.9, 0.2, -0.2])
    turn = torch.exp(-1j * d.frequency * torch.arange(12).double()[:, None])
    rope = ((q * turn) @ (k * turn).mH).real[0, 0]
    _, logits = weights_and_logits(q, k, d)
    assert torch.equal(logits[0, 0, -1].argsort(), rope[-1].argsort())
    weights, _ = weights_and_logits(q, k, d, "gaussian")
    expected = torch.softmax(2 * (8 + 4) / (4 * 8) / 0.7 * rope[-1], dim=0)
    torch.testing.assert_close(weights[0, 0, -1], expected)


def test_student_tails_become_gaussian_as_their_degrees_of_freedom_grow():
    q, k = randoms(1, 1, 8, 2, seed=1), randoms(1, 1, 8, 2, seed=2)
    gaps = []
    for dof in (1e2, 1e4, 1e6):
        student, gaussian = (weights_and_logits(q, k, head(dof=dof), x)[1] for x in ("student", "gaussian"))
        gaps.append((student - gaussian).abs().max().item())
    assert gaps[0] > 50 * gaps[1] > 2500 * gaps[2]


def test_an_estimate_for_later_is_the_present_one_decayed_where_the_variance_has_settled():
    v = randoms(1, 1, 6, 2)
    context, d = one_history(6), head(process=0.5, key_noise=0.5)  # the same variance at every lag
    clock = read_clock(context, dtype=torch.float64)
    nothing = torch.zeros_like(v)
    now, later = (isotropic(nothing, nothing, v, context, d, clock, Variant(horizon=x))[0] for x in (0.0, 3.0))
    torch.testing.assert_close(later, now * math.exp(-0.1 * 3))
