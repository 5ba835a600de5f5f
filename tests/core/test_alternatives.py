"""The other members of the estimator class: gains, propagation, empirical Bayes, and what is defined where."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from recbft.core import (
    ESTIMATORS,
    Belief,
    check_estimator,
    decay_precision,
    discount_precision,
    empirical_bayes_precision,
    fit_pseudo_count,
    gain_update,
    gate,
)
from recbft.errors import UserError

# Gains ------------------------------------------------------------------------------------------------


def belief_and_observation(seed=0):
    g = torch.Generator().manual_seed(seed)
    h, e = (torch.randn(2, 3, 6, generator=g, dtype=torch.float64) for _ in range(2))
    lam, r = (0.1 + 5 * torch.rand(2, 3, 6, generator=g, dtype=torch.float64) for _ in range(2))
    return Belief(h, lam), e, r


@given(gain=st.floats(0, 1), ramp=st.floats(0, 1))
def test_a_gain_of_any_origin_takes_its_share_and_the_ramp_lets_it_in(gain, ramp):
    belief, e, r = belief_and_observation()
    after, taken = gain_update(belief, e, gain, r, ramp=ramp)
    torch.testing.assert_close(taken, torch.full_like(e, 1 - ramp * (1 - gain)))
    torch.testing.assert_close(after.mean, belief.mean + (1 - ramp * (1 - gain)) * e)
    assert torch.equal(after.precision, belief.precision + r)


def test_gain_one_and_ramp_zero_are_the_residual_connection_bit_for_bit():
    belief, e, r = belief_and_observation(1)
    for gain, ramp in ((1.0, 1.0), (0.3, 0.0), (torch.rand_like(e), 0.0), (torch.ones_like(e), 1.0)):
        assert torch.equal(gain_update(belief, e, gain, r, ramp=ramp)[0].mean, belief.mean + e)


def test_without_an_estimate_precision_stays_what_it_was():
    belief, e, _ = belief_and_observation(3)
    after, _ = gain_update(belief, e, 0.5)
    assert torch.equal(after.precision, belief.precision)
    torch.testing.assert_close(after.mean, belief.mean + 0.5 * e)


@pytest.mark.parametrize("rows", [2, 6])
def test_the_gate_is_a_sigmoid_per_head_or_per_coordinate(rows):
    g = torch.Generator().manual_seed(4)
    x, weight, bias = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((2, 3, 6), (rows, 6), (rows,)))
    found = gate(x, weight, bias)
    for c in range(6):
        row = c * rows // 6  # coordinates of one head lie side by side
        expected = 1 / (1 + torch.exp(-(x @ weight[row] + bias[row])))
        torch.testing.assert_close(found[..., c], expected)


# Propagation ------------------------------------------------------------------------------------------


@given(lam=st.floats(1e-3, 1e3), delta=st.floats(0.01, 0.99), rate=st.floats(-3, 3))
def test_discount_and_decay_scale_precision_up_to_the_cap(lam, delta, rate):
    precision = torch.tensor([lam], dtype=torch.float64)
    assert discount_precision(precision, delta).item() == pytest.approx(min(delta * lam, 100))
    found = decay_precision(precision, torch.tensor(rate, dtype=torch.float64), cap=50.0)
    assert found.item() == pytest.approx(min(lam / math.exp(rate), 50))
    assert decay_precision(precision, torch.tensor(-20.0)).item() == 100


def test_a_rate_of_zero_changes_nothing():
    precision = torch.tensor([0.5, 2.0, 30.0])
    assert torch.equal(decay_precision(precision, torch.zeros(())), precision)


# Empirical Bayes --------------------------------------------------------------------------------------


def log_likelihood(counts, nu):
    """Of counts whose rates are Gamma with the sample's mean and shape nu, the rates integrated out."""
    return stats.nbinom.logpmf(counts, nu, nu / (nu + np.mean(counts))).sum()


@pytest.mark.parametrize("seed", [0, 3])
def test_the_pseudo_count_has_the_largest_marginal_likelihood(seed):
    rng = np.random.default_rng(seed)
    counts = rng.poisson(rng.gamma([0.3, 1.0, 2.5, 6.0][seed], 4.0, size=400))
    nu = fit_pseudo_count(torch.from_numpy(counts))
    best = log_likelihood(counts, nu)
    for other in nu * np.exp(np.linspace(-6, 6, 241)):
        assert log_likelihood(counts, other) <= best + 1e-7
    both = [(shape, mean) for shape in nu * np.array([0.8, 1, 1.2]) for mean in counts.mean() * np.array([0.9, 1, 1.1])]
    for shape, mean in both:  # the sample's mean is the likeliest too
        assert stats.nbinom.logpmf(counts, shape, shape / (shape + mean)).sum() <= best + 1e-7


def test_the_precision_is_the_posterior_mean_rate_over_the_mean_rate():
    counts = torch.tensor([0, 1, 3, 20, 6])
    nu, mean = 1.7, 6.0
    # Posterior by quadrature: prior Gamma(nu, mean), one Poisson count.
    rate = np.linspace(1e-6, 200, 400_001)
    for c, found in zip(counts.tolist(), empirical_bayes_precision(counts, nu).tolist(), strict=True):
        density = stats.gamma.pdf(rate, nu, scale=mean / nu) * stats.poisson.pmf(c, rate)
        assert found == pytest.approx((rate * density).sum() / density.sum() / mean, rel=1e-3)


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=40), st.floats(1e-3, 1e3))
def test_precision_is_positive_one_on_average_and_grows_with_the_count(counts, nu):
    tau = empirical_bayes_precision(torch.tensor(counts), nu)
    assert tau.min() > 0 and tau.mean().item() == pytest.approx(1)
    assert torch.equal(torch.tensor(counts).argsort(stable=True), tau.argsort(stable=True))


@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0], [7], [4, 4, 4, 4], [3, 4, 5, 4]])
def test_counts_that_vary_no_more_than_chance_leave_every_item_at_precision_one(counts):
    counts = torch.tensor(counts, dtype=torch.int64)
    assert fit_pseudo_count(counts) == math.inf
    assert torch.equal(empirical_bayes_precision(counts, math.inf), torch.ones(len(counts)).double())


@pytest.mark.parametrize("counts", [[0] * 5000 + [100_000], [0, 1, 10**7], [1] * 1000 + [2] * 5 + [40]])
def test_extreme_counts_give_finite_positive_precisions_and_the_same_ones_again(counts):
    counts = torch.tensor(counts)
    nu = fit_pseudo_count(counts)
    tau = empirical_bayes_precision(counts, nu)
    assert 0 < nu < math.inf and torch.isfinite(tau).all() and (tau > 0).all()
    assert fit_pseudo_count(counts) == nu


# What is defined where --------------------------------------------------------------------------------


def test_estimators_that_need_weights_that_sum_to_one_are_refused_elsewhere_with_the_ones_that_are_defined():
    for estimator in ESTIMATORS["softmax"]:
        check_estimator(estimator, "softmax")
        if estimator == "sandwich":
            check_estimator(estimator, "silu")
            continue
        message = f"estimator '{estimator}' is not defined for silu weights, which need not sum to one; choose sandwich"
        with pytest.raises(UserError, match=message):
            check_estimator(estimator, "silu")
    with pytest.raises(UserError, match="choose reml, reml_naive, sandwich, delta or design_effect"):
        check_estimator("evidence", "softmax")
