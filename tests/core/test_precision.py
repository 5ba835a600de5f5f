"""Observation precision, update, process and prior against independent float64 oracles."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from recbft.core import (
    Belief,
    count_quantiles,
    ffn_jacobian,
    gain_update,
    gelu_slope,
    initial_scale,
    jacobian_factors,
    kalman_update_ref,
    predict_precision_ref,
    process_noise,
    projected_precision,
    reml_naive_precision,
    reml_precision_ref,
)

positive = st.floats(1e-3, 1e3)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


# Lemma 1 ------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32 - 1), T=st.integers(2, 12), sharp=st.floats(0.1, 30), small=st.floats(0, 2))
def test_with_gain_one_a_state_is_kept_by_attention_to_a_value_that_is_next_to_nothing(seed, T, sharp, small):
    # Precision Tracked Transformer (arXiv 2605.18832), appendix H: a_1 >= 1 - (|h' - h| + eps) / (mu c)
    generator = torch.Generator().manual_seed(seed)
    h, v = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (1, T))
    v[0] *= small / v[0].norm()
    a = (sharp * torch.randn(T, generator=generator, dtype=torch.float64)).softmax(0)
    e = a @ v
    moved = gain_update(Belief(h, torch.ones_like(h)), e[None], 1.0)[0].mean - h
    mu, others = v[1:].norm(dim=1).min(), a[1:] @ v[1:] / a[1:].sum()
    c = min(1.0, (others.norm() / mu).item())
    assert a[0] >= 1 - (moved.norm() + small) / (mu * c) - 1e-9
    # with a gain below 1 the same state is kept whatever is attended to
    precise = Belief(h, torch.full_like(h, 1e9))
    kept, gain = kalman_update_ref(precise, e[None], torch.ones_like(h))
    assert gain.max() < 1e-8 and (kept.mean - h).norm() < 1e-6


# Observation ------------------------------------------------------------------------------------


@given(S=st.floats(0, 1e3), n=st.floats(1, 200), s0=st.floats(1e-3, 10), nu=st.floats(0.1, 10), cap=st.floats(1, 1e4))
def test_reml_is_the_inverse_of_the_shrunken_variance_up_to_the_cap(S, n, s0, nu, cap):
    found = reml_precision_ref(tensor(S)[None], tensor(n), prior_scale=s0, prior_dof=nu, cap=cap)
    assert found.item() == pytest.approx(min((n + nu) / (S + nu * s0), cap), rel=1e-8)


def test_reml_of_one_observation_is_at_most_twice_the_head_width(K=32):
    found = reml_precision_ref(torch.zeros(1, K).double(), torch.ones(1).double(), prior_scale=1 / K, cap=1e9)
    torch.testing.assert_close(found, torch.full_like(found, 2 * K), rtol=1e-9, atol=0)


def test_nothing_read_means_no_precision():
    zero = torch.zeros(2, 3, dtype=torch.float64)
    assert (reml_precision_ref(zero, zero[:, 0], prior_scale=0.1) == 0).all()
    assert (reml_naive_precision(zero, zero[:, 0]) == 0).all()
    assert (projected_precision(zero, torch.eye(3).double()) == 0).all()


def test_naive_reml_is_capped_for_one_observation_and_vanishing_residuals():
    S, n = tensor(*[[0.0, 2.0]] * 4), tensor(1.0, 1 + 1e-7, 1.5, 5.0)  # and one that is a rounding above 1
    expected = tensor([100.0, 100.0], [100.0, 100.0], [100.0, 0.25], [100.0, 2.0])
    torch.testing.assert_close(reml_naive_precision(S, n), expected)


def test_projected_precision_is_the_variance_through_the_squared_weights():
    torch.manual_seed(0)
    precision, weight = torch.rand(5, 4).double() + 0.5, torch.randn(3, 4).double()
    variance = torch.stack([torch.diag(weight @ torch.diag(1 / p) @ weight.T) for p in precision])
    torch.testing.assert_close(projected_precision(precision, weight, cap=1e9), 1 / variance, rtol=1e-9, atol=0)


def test_a_coordinate_of_which_nothing_is_known_tells_on_the_outputs_that_read_it_alone():
    precision = tensor([[0.5, 0.0], [0.2, 0.1], [0.0, 0.0]])  # (B, T, D) as a layer has it
    found = projected_precision(precision, tensor([2.0, 0.0], [1.0, 1.0]))
    torch.testing.assert_close(found, tensor([[1 / 8, 0.0], [1 / 20, 1 / 15], [0.0, 0.0]]), rtol=1e-9, atol=1e-9)


# Update -----------------------------------------------------------------------------------------


@given(m=st.floats(-10, 10), lam=positive, e=st.floats(-10, 10), r=positive)
def test_update_is_the_product_of_two_gaussians(m, lam, e, r):
    after, gain = kalman_update_ref(Belief(tensor(m), tensor(lam)), tensor(e), tensor(r))
    assert after.precision.item() == pytest.approx(lam + r)
    assert after.mean.item() == pytest.approx((lam * m + r * (m + e)) / (lam + r), abs=1e-9)
    assert gain.item() == pytest.approx(1 / (1 + math.exp(math.log(lam) - math.log(r))), rel=1e-9)
    assert 0 <= gain.item() < 1


def test_without_warmup_the_update_is_the_plain_residual_connection_exactly():
    torch.manual_seed(1)
    h, e, lam, r = torch.randn(7, 5), torch.randn(7, 5), torch.rand(7, 5) + 0.1, torch.rand(7, 5) * 50
    after, gain = kalman_update_ref(Belief(h, lam), e, r, ramp=0.0)
    assert torch.equal(gain, torch.ones_like(gain))
    assert torch.equal(after.mean, h + e)


@given(w=st.floats(0, 1), lam=positive, r=positive)
def test_warmup_moves_the_gain_in_a_straight_line(w, lam, r):
    _, gain = kalman_update_ref(Belief(tensor(0.0), tensor(lam)), tensor(1.0), tensor(r), ramp=w)
    assert gain.item() == pytest.approx(1 - w * (1 - r / (lam + r)), abs=1e-12)


def test_no_observation_leaves_the_belief_alone():
    belief = Belief(tensor(1.0, -2.0), tensor(3.0, 0.5))
    after, gain = kalman_update_ref(belief, tensor(0.0, 0.0), tensor(0.0, 0.0))
    assert torch.equal(after.mean, belief.mean) and torch.equal(after.precision, belief.precision)
    assert (gain == 0).all()


# Process ----------------------------------------------------------------------------------------


def test_jacobian_is_the_diagonal_that_autograd_finds(seed=0):
    torch.manual_seed(seed)
    D, F = 6, 10
    w1, w2, b1, b2 = (torch.randn(*s).double() for s in [(F, D), (D, F), (F,), (D,)])
    x = torch.randn(4, D).double()

    def ffn(one):
        return w2 @ torch.nn.functional.gelu(w1 @ one + b1) + b2

    expected = torch.stack([torch.func.jacrev(ffn)(one).diagonal() for one in x])
    torch.testing.assert_close(ffn_jacobian(x @ w1.T + b1, w1, w2), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_full_rank_factors_give_the_exact_jacobian(shape):
    torch.manual_seed(3)
    D, F = shape
    w1, w2, a = torch.randn(F, D).double(), torch.randn(D, F).double(), torch.randn(5, F).double()
    left, right = jacobian_factors(w1, w2, min(D, F))
    found = gelu_slope(a) @ right @ left.T  # (4.5)
    torch.testing.assert_close(found, ffn_jacobian(a, w1, w2), rtol=1e-9, atol=1e-10)


def test_low_rank_factors_are_the_best_of_their_rank():
    torch.manual_seed(4)
    w1, w2 = torch.randn(10, 6).double(), torch.randn(6, 10).double()
    left, right = jacobian_factors(w1, w2, 2)
    values = torch.linalg.svdvals(w2 * w1.T)
    error = torch.linalg.matrix_norm(left @ right.T - w2 * w1.T)
    torch.testing.assert_close(error, values[2:].square().sum().sqrt())


def test_factors_of_what_is_not_finite_are_refused():
    w1, w2 = torch.ones(10, 6), torch.ones(6, 10)
    w2[2, 3] = float("inf")
    with pytest.raises(torch.linalg.LinAlgError, match="not finite"):
        jacobian_factors(w1, w2, 2)


def test_single_precision_loses_no_digits_of_the_factors():
    torch.manual_seed(5)
    w1, w2 = torch.randn(64, 16), torch.randn(16, 64)
    wide = jacobian_factors(w1.double(), w2.double(), 4)
    left, right = jacobian_factors(w1, w2, 4)
    assert left.dtype == right.dtype == torch.float32
    exact = wide[0] @ wide[1].T
    assert (left.double() @ right.double().T - exact).norm() < 3e-7 * exact.norm()
    still = jacobian_factors(w1 * 0, w2, 4)
    assert all(part.isfinite().all() for part in still) and not still[1].any()


def test_gelu_slope_is_the_derivative():
    a = torch.linspace(-6, 6, 101, dtype=torch.float64).requires_grad_()
    (expected,) = torch.autograd.grad(torch.nn.functional.gelu(a).sum(), a)
    torch.testing.assert_close(gelu_slope(a.detach()), expected)


@given(lam=positive, J=st.floats(-3, 3), Q=st.floats(0, 10))
@example(lam=2.0, J=-1.0, Q=0.0)
@example(lam=2.0, J=-0.95, Q=0.3)
def test_prediction_adds_the_noise_to_the_stretched_variance(lam, J, Q):
    found = predict_precision_ref(tensor(lam), tensor(J), tensor(Q), cap=1e9).item()
    assert found == pytest.approx(1 / (max((1 + J) ** 2, 0.01) / lam + Q), rel=1e-9)


def test_prediction_without_slope_or_noise_changes_nothing_but_the_cap():
    lam = tensor(0.5, 1.0, 99.0, 250.0)
    assert torch.equal(predict_precision_ref(lam, 0.0, 0.0), tensor(0.5, 1.0, 99.0, 100.0))


def test_process_noise_is_a_share_of_its_scale_that_starts_small():
    assert process_noise(tensor(-9.0), 1.0).item() == pytest.approx(math.log1p(math.exp(-9)))
    assert process_noise(tensor(-9.0), 3.0).item() == pytest.approx(3 * math.log1p(math.exp(-9)))


# Prior ------------------------------------------------------------------------------------------


def test_quantiles_run_from_rarest_to_most_frequent_and_skip_the_unseen():
    counts = torch.tensor([0, 5, 1, 0, 9, 2])
    torch.testing.assert_close(count_quantiles(counts), torch.tensor([0, 2 / 3, 0, 0, 1, 1 / 3]))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30))
def test_quantiles_follow_scipy_ranks(values):
    from scipy.stats import rankdata

    counts = torch.tensor(values, dtype=torch.float64)
    seen = counts > 0
    expected = torch.zeros_like(counts)
    if seen.sum() > 1:
        expected[seen] = torch.from_numpy((rankdata(counts[seen].numpy()) - 1) / (int(seen.sum()) - 1))
    elif seen.any():
        expected[seen] = 0.5
    torch.testing.assert_close(count_quantiles(counts), expected)
    torch.testing.assert_close(count_quantiles(counts[None].expand(2, -1)), expected[None].expand(2, -1))


@pytest.mark.parametrize(("prior_dof", "prior_variance"), [(1.0, None), (3.0, None), (1.0, 0.5), (0.5, 2.0)])
def test_initial_scale_meets_the_largest_reml_precision_with_the_asked_gain(prior_dof, prior_variance):
    K, gain = 32, 0.9
    lam = initial_scale(gain, head_width=K, prior_dof=prior_dof, prior_variance=prior_variance)
    one_key = torch.zeros(1, 1).double(), torch.ones(1).double()
    scale = 1 / K if prior_variance is None else prior_variance
    largest = reml_precision_ref(*one_key, prior_scale=scale, prior_dof=prior_dof, cap=math.inf).item()
    assert largest / (lam + largest) == pytest.approx(gain)
    if (prior_dof, prior_variance) == (1.0, None):
        assert lam == pytest.approx(2 * K * (1 - gain) / gain)
