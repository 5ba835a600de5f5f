"""Robust filter attention: the tensor form against sums written out, the plain form against it, clocks, limits."""

from __future__ import annotations

import cmath
import math

import numpy as np
import pytest
import torch

from recbft.core import SequenceContext
from recbft.errors import UserError
from recbft.kernels.dispatch import choose
from recbft.kernels.robust_filter import PATHS, Dynamics, Setting, Variant, decayed_weights, filtered, read_clock
from recbft.kernels.robust_filter.dynamics import residual_variance

PLAIN = ("isotropic", "reference")  # the paths of float64

B, H, T, K = 3, 2, 7, 4
SEGMENT = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [2, 2, 2, 2, 2, 2, -1], [3, 3, 4, 4, 4, 4, 4]])
POSITION = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0], [0, 1, 0, 1, 2, 3, 4]])
TIME = torch.where(SEGMENT >= 0, 1_700_000_000 + 30 * POSITION + POSITION**3, 0)
VARIANTS = [
    Variant(),
    Variant(kernel="gaussian"),
    Variant(multiplicative=False),
    Variant(kernel="gaussian", multiplicative=False, horizon=1.5),
    Variant(rotate_values=False, horizon=0.7),
]


def packed(*, causal=True, shuffled=False):
    """Three rows of five histories; shuffled, the tokens of a row stand in any order."""
    order = torch.tensor([2, 6, 0, 4, 1, 3, 5]) if shuffled else torch.arange(T)
    return SequenceContext(SEGMENT[:, order], POSITION[:, order], TIME[:, order], causal=causal)


def one_history(T=T):
    return SequenceContext(torch.zeros(1, T, dtype=torch.int64), torch.arange(T)[None])


def drawn(seed=0, *, per_coordinate=False):
    """q, k, v, then the scalars; the second head does not decay."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, K, 2, generator=g, dtype=torch.float64) for _ in range(3))
    shape = (H, K) if per_coordinate else (H,)
    scalars = torch.rand(4, *shape, generator=g, dtype=torch.float64) + 0.2
    scalars[0, 1] = 0.0
    frequency = torch.randn(H, K, generator=g, dtype=torch.float64)
    dof, temperature = torch.rand(2, H, generator=g, dtype=torch.float64) + 0.5
    inputs = [torch.view_as_complex(x) for x in (q, k, v)]
    return inputs, Dynamics(frequency, *scalars, dof * 5, temperature)


def by_sums(q, k, v, context, d, variant, times, key_bias):
    """Everything entry by entry in Python's own numbers, anisotropic."""
    value, evidence = torch.zeros_like(q), torch.zeros(B, H, T, K, dtype=torch.float64)
    for b, h, t in ((b, h, t) for b in range(B) for h in range(H) for t in range(T)):
        keys = [j for j in range(T) if context.allowed[b, t, j]]
        kappa, scores, carries = (d.dof[h].item() + K) / K, [[] for _ in range(K)], []
        for j in keys:
            lag = (times[b, t] - times[b, j]).item()
            ahead = abs(lag) + variant.horizon
            precision, distance, carried = [], 0.0, []
            for c in range(K):
                mu, w, s2, eta2, gamma2 = (x[h, c].item() for x in (d.decay, d.frequency, *d[2:5]))
                E = math.exp(-mu * ahead)
                P = 1 / ((s2 * (1 - E * E) if mu > 0 else s2 * ahead) + eta2 * E * E + gamma2)
                carry = E * cmath.exp(1j * w * lag)
                residual = abs(q[b, h, t, c].item() - carry * k[b, h, j, c].item()) ** 2
                distance += residual * (P if variant.multiplicative else 1.0)
                precision.append(P)
                carried.append(carry if variant.rotate_values else E)
            misfit = distance / d.dof[h].item()
            misfit = math.log(1 + misfit) if variant.kernel == "student" else misfit
            for c in range(K):
                scores[c].append(math.log(precision[c]) - kappa * misfit)
            carries.append(carried)
        for c in range(K if keys else 0):
            weights = [
                math.exp(d.temperature[h].item() * L + key_bias[b, j].item())
                for L, j in zip(scores[c], keys, strict=True)
            ]
            total = sum(weights)
            terms = (a / total * e[c] * v[b, h, j, c].item() for a, e, j in zip(weights, carries, keys, strict=True))
            value[b, h, t, c] = sum(terms)
            evidence[b, h, t, c] = sum(math.exp(L) for L in scores[c])
    return value, evidence


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_the_tensor_form_is_the_sum_over_keys(causal, variant):
    (q, k, v), d = drawn(per_coordinate=True)
    context, key_bias = packed(causal=causal), torch.randn(B, T, dtype=torch.float64)
    clock = read_clock(context, dtype=torch.float64)
    found = filtered(q, k, v, context, d, clock, variant, key_bias=key_bias, impl="reference")
    expected = by_sums(q, k, v, context, d, variant, context.position, key_bias)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def test_nothing_is_left_out_unless_asked():
    assert Variant() == Variant(kernel="student", multiplicative=True, rotate_values=True, horizon=0.0)


def values_and_gradients(impl, context, variant, *, use_time=False, learn_unit=False, biased=True, seed=0):
    (q, k, v), d = drawn(seed)
    leaves = [x.requires_grad_() for x in (q, k, v, *d[1:])]
    key_bias = torch.randn(B, T, generator=torch.Generator().manual_seed(3), dtype=torch.float64) if biased else None
    unit = torch.tensor(20.0, dtype=torch.float64, requires_grad=learn_unit) if use_time else 1.0
    if biased:
        leaves.append(key_bias.requires_grad_())
    if learn_unit:
        leaves.append(unit)
    clock = read_clock(context, use_time=use_time, time_unit=unit, dtype=torch.float64)
    value, evidence = filtered(q, k, v, context, d, clock, variant, key_bias=key_bias, impl=impl)
    g = torch.Generator().manual_seed(4)
    weight = torch.randn(value.shape, generator=g, dtype=torch.complex128)
    loss = (value * weight).real.sum() + (evidence * torch.randn(evidence.shape, generator=g).double()).sum()
    return [value, evidence, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("layout", ["columns", "shuffled", "both ways"])
def test_the_isotropic_form_equals_the_tensor_form_in_values_and_gradients(layout, variant):
    context = packed(causal=layout != "both ways", shuffled=layout == "shuffled")
    for one, two in zip(*(values_and_gradients(i, context, variant) for i in ("isotropic", "reference")), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("learn_unit", [False, True])
def test_the_isotropic_form_equals_the_tensor_form_in_real_time(learn_unit):
    settings = {"use_time": True, "learn_unit": learn_unit, "biased": False}
    for context in (packed(), packed(causal=False), packed(shuffled=True)):
        both = (values_and_gradients(i, context, Variant(), **settings) for i in ("isotropic", "reference"))
        for one, two in zip(*both, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10)


def test_attention_dropout_leaves_the_evidence_and_keeps_the_mean_on_average():
    (q, k, v), d = drawn()
    context = packed()
    clock = read_clock(context, dtype=torch.float64)
    still, evidence = filtered(q, k, v, context, d, clock, Variant())
    torch.manual_seed(0)
    draws = [filtered(q, k, v, context, d, clock, Variant(), dropout=0.3) for _ in range(400)]
    assert all(torch.equal(found, evidence) for _, found in draws)
    torch.testing.assert_close(torch.stack([value for value, _ in draws]).mean(0), still, rtol=0, atol=0.2)


def head(**scalars):
    """One head; what is not given is harmless."""
    start = {
        "decay": 0.1,
        "process": 0.3,
        "key_noise": 0.5,
        "query_noise": 0.2,
        "dof": 8.0,
        "temperature": 1.0,
    } | scalars
    frequency = start.pop("frequency", [0.9, -0.9])
    return Dynamics(torch.tensor([frequency]).double(), *(torch.tensor([x]).double() for x in start.values()))


def randoms(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.complex128)


# --- the clock


def test_lags_in_real_time_are_those_of_positions_where_times_are_positions():
    (q, k, v), d = drawn()
    by_place = packed()
    by_time = SequenceContext(by_place.segment, by_place.position, 7 * by_place.position + 10**9)
    clocks = [
        read_clock(by_place, dtype=torch.float64),
        read_clock(by_time, use_time=True, time_unit=7.0, dtype=torch.float64),
    ]
    for impl in PLAIN:
        one, two = (filtered(q, k, v, by_place, d, clock, Variant(), impl=impl) for clock in clocks)
        for left, right in zip(one, two, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


def test_a_token_reads_at_its_query_time():
    (q, k, v), d = drawn()
    context = packed()
    asked = SequenceContext(context.segment, context.position, context.time, query_time=context.time + 40)
    clock = read_clock(asked, use_time=True, dtype=torch.float64)
    assert torch.equal(clock.lag, read_clock(context, use_time=True, dtype=torch.float64).lag + 40)
    one, two = (filtered(q, k, v, context, d, clock, Variant(), impl=impl)[0] for impl in PLAIN)
    torch.testing.assert_close(one, two)


def test_times_that_are_missing_or_run_backwards_are_refused():
    with pytest.raises(UserError, match="time: true needs the time of every event, and the data has none; give a time"):
        read_clock(one_history(), use_time=True, dtype=torch.float64)
    time = TIME.clone()
    time[0, 2] -= 100
    for causal in (True, False):
        context = SequenceContext(SEGMENT, POSITION, time, causal=causal)
        with pytest.raises(
            UserError, match=r"elapsed time -\d+ between an event and one before it .* is negative; sort"
        ):
            read_clock(context, use_time=True, dtype=torch.float64)


def test_a_token_that_reads_before_its_own_time_is_refused():
    early = SequenceContext(SEGMENT, POSITION, TIME, query_time=TIME - 1)
    with pytest.raises(UserError, match="elapsed time -1 between an event and one before it in its history"):
        read_clock(early, use_time=True, dtype=torch.float64)


def test_where_all_histories_lie_token_after_token_one_row_of_lags_stands_for_all():
    for context, rows in ((packed(), 1), (packed(causal=False), 1), (packed(shuffled=True), B)):
        clock = read_clock(context, dtype=torch.float64)
        assert clock.lag.shape == (rows, T, T) and clock.query.shape == clock.key.shape == (rows, T)
        assert (clock.in_columns, clock.by_position, clock.unit) == (rows == 1, True, 1)
        lag = context.lag if context.causal else context.position[:, :, None] - context.position[:, None]
        assert torch.equal(clock.lag.expand(B, T, T)[context.allowed], lag.double()[context.allowed])
    clock = read_clock(packed(), use_time=True, time_unit=7.0, dtype=torch.float64)
    assert (clock.in_columns, clock.by_position, clock.unit) == (False, False, 7)
    for rows, tokens in ((0, T), (B, 0), (0, 0)):
        none = SequenceContext(SEGMENT[:rows, :tokens], POSITION[:rows, :tokens])
        assert read_clock(none, dtype=torch.float64).lag.shape == (1, tokens, tokens)


def test_events_at_one_time_and_times_of_another_history_are_no_negative_lags():
    time = torch.where(SEGMENT == 1, TIME - 10**8, TIME)
    time[0, 1] = time[0, 0]
    clock = read_clock(SequenceContext(SEGMENT, POSITION, time), use_time=True, dtype=torch.float64)
    assert clock.lag[0, 1, 0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_times_and_zero_vectors_stay_finite(dtype):
    time = torch.tensor([[0, 5, 2**40, 2**40 + 5]])
    context = SequenceContext(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None], time)
    clock = read_clock(context, use_time=True, dtype=dtype)
    assert clock.lag[0, 3, 2] == 5, "a short lag long after the start keeps its digits"
    assert clock.query.tolist() == clock.key.tolist() == time.tolist(), "and so does the time since then"
    d = Dynamics(*(x.to(dtype) for x in head(query_noise=0.0, process=0.0)))
    q = torch.zeros(1, 1, 4, 2, dtype=torch.complex64 if dtype == torch.float32 else torch.complex128)
    leaves = [q.clone().requires_grad_() for _ in range(3)]
    scalars = [x.clone().requires_grad_() for x in d[1:]]
    value, evidence = filtered(*leaves, context, Dynamics(d.frequency, *scalars), clock, Variant(), impl="isotropic")
    assert not value.abs().any() and torch.isfinite(evidence).all()
    for gradient in torch.autograd.grad(value.real.sum() + evidence.log().sum(), leaves + scalars):
        assert torch.isfinite(torch.view_as_real(gradient) if gradient.is_complex() else gradient).all()


@pytest.mark.parametrize("kernel", ["student", "gaussian"])
def test_a_misfit_that_rounds_below_nothing_is_none(kernel):
    g = torch.Generator().manual_seed(0)
    x = 1000 * torch.randn(1, 1, 64, 4, generator=g, dtype=torch.complex64)
    d = head(decay=0.0, process=0.0, key_noise=0.0, query_noise=1e-4, frequency=[0.0] * 4)
    d = Dynamics(*(part.float() for part in d))
    context = one_history(64)
    clock = read_clock(context, dtype=torch.float32)
    for impl in PLAIN:  # of each token its own key fits exactly, and no other does
        value, evidence = filtered(x, x, x, context, d, clock, Variant(kernel=kernel), impl=impl)
        torch.testing.assert_close(value, x)
        assert (evidence <= 1.01e4).all() and evidence.isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_what_has_faded_away_says_nothing_of_the_decay(variant, impl="isotropic", seed=0):
    """Weeks in seconds: the lag multiplies whatever is left of a key that has no part in the residual."""
    position, times = torch.arange(6)[None], torch.tensor([[0, 1, 2, 1_000_000, 1_000_001, 2_000_000]])
    context = SequenceContext(torch.zeros_like(position), position, times)
    (q, k, v), d = drawn(seed)

    def slope(impl, precision):
        single = precision == torch.float32
        inputs = [x[:1, :, :6].to(torch.complex64 if single else torch.complex128) for x in (q, k, v)]
        decay = d.decay[:1].to(precision).requires_grad_()
        scalars = Dynamics(*(x[:1].to(precision) for x in d))._replace(decay=decay)
        clock = read_clock(context, use_time=True, dtype=precision)
        value, evidence = filtered(*(x[:, :1] for x in inputs), context, scalars, clock, variant, impl=impl)
        (value.real.sum() + value.imag.sum() + evidence.log().sum()).backward()
        return decay.grad.double()

    torch.testing.assert_close(slope(impl, torch.float32), slope("reference", torch.float64), rtol=1e-3, atol=1e-5)


# --- filters whose answer is known


def told(num_tokens, dynamics, variant=VARIANTS[0]):
    """Of one history, what ``filtered`` takes beside queries, keys and values."""
    context = one_history(num_tokens)
    return context, dynamics, read_clock(context, dtype=torch.float64), variant


@pytest.mark.parametrize("process", [0.0, 0.7])
def test_as_decay_goes_to_zero_the_filter_goes_to_the_one_without_decay(process):
    q, k, v = (randoms(1, 1, 9, 2, seed=s) for s in range(3))
    still = filtered(q, k, v, *told(9, head(decay=0.0, process=process)))
    for decay, tolerance in ((1e-3, 2e-2), (1e-6, 2e-5), (1e-9, 2e-8)):
        nearly = filtered(q, k, v, *told(9, head(decay=decay, process=process / (2 * decay))))
        for one, two in zip(nearly, still, strict=True):
            torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


def test_a_trajectory_without_noise_is_its_own_estimate():
    d = head(decay=0.13, frequency=[0.4, -1.1])
    t = torch.arange(9).double()
    carry = torch.exp((-0.13 + 1j * d.frequency) * t[:, None])  # (9, 2)
    state = (carry * randoms(2, seed=5))[None, None]
    value, evidence = filtered(state, state, state, *told(9, d))
    torch.testing.assert_close(value, state)
    precision = 1 / residual_variance(t, Dynamics(*(x[0] for x in d)))
    torch.testing.assert_close(evidence[0, 0], precision.cumsum(0))


@pytest.mark.parametrize(("dof", "seed"), [(1.0, 0), (1.0, 1), (8.0, 2), (8.0, 3)])
def test_asking_again_with_the_estimate_is_iteratively_reweighted_least_squares(dof, seed):
    z = randoms(1, 1, 6, 2, seed=seed)
    z[0, 0, 4] *= 20  # an outlier
    d = head(dof=dof)
    lag = torch.arange(6.0).double()[:, None] - torch.arange(6.0).double()
    carried = torch.exp((-0.1 + 1j * d.frequency) * lag[..., None]) * z  # (1, 6, 6, 2)
    P = 1 / (0.3 * (1 - torch.exp(-0.2 * lag)) + 0.5 * torch.exp(-0.2 * lag) + 0.2)
    read, kappa = torch.ones(6, 6).double().tril(), (dof + 2) / 2

    def distances(x):
        return P * (x[:, 0, :, None] - carried).abs().square().sum(-1)

    def misfit(x):  # what has the weights (1 + d2 / nu)^-kappa as its derivative in d2
        return (read * dof / (1 - kappa) * ((1 + distances(x) / dof) ** (1 - kappa) - 1)).sum(-1)

    x = z.requires_grad_()
    start = torch.autograd.grad(misfit(x).sum(), x)[0].norm()
    with torch.no_grad():
        for _ in range(80):
            share = read * P * (1 + distances(x) / dof) ** -kappa
            expected = (share[..., None] * carried).sum(2) / share.sum(2, keepdim=True)
            before, x = x, filtered(x, z, z, *told(6, d))[0]
            torch.testing.assert_close(x[:, 0], expected)
            assert (misfit(x) <= misfit(before) + 1e-12).all()
    x.requires_grad_()
    assert torch.autograd.grad(misfit(x).sum(), x)[0].norm() < 1e-3 * start


@pytest.mark.parametrize("decay", [0.0, 0.05, 1.5])
def test_the_variance_is_the_integral_of_what_the_process_adds_and_the_decay_takes(decay, rate=0.7):
    nodes, weights = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(40))
    for elapsed in (0.0, 0.3, 4.0, 9.0):
        s = elapsed * (nodes + 1) / 2
        added = elapsed / 2 * (weights * rate * torch.exp(-2 * decay * (elapsed - s))).sum()
        d = head(decay=decay, process=rate / (2 * decay) if decay else rate)
        found = residual_variance(torch.tensor([elapsed]).double(), d)
        torch.testing.assert_close(found[0], added + 0.5 * math.exp(-2 * decay * elapsed) + 0.2)


def unit_norm(x):
    return x / x.abs().square().sum(-1, keepdim=True).sqrt()


def test_with_equal_norms_and_no_decay_scores_are_a_monotone_map_of_rope_scores():
    q, k = unit_norm(randoms(1, 1, 12, 4, seed=1)), unit_norm(randoms(1, 1, 12, 4, seed=2))
    d = head(decay=0.0, process=0.0, frequency=[0.9, -0.9, 0.2, -0.2])
    turn = torch.exp(-1j * d.frequency * torch.arange(12).double()[:, None])
    rope = ((q * turn) @ (k * turn).mH).real[0, 0]
    _, logits = decayed_weights(q, k, Setting(*told(12, d)), None)
    assert torch.equal(logits[0, 0, -1].argsort(), rope[-1].argsort())
    weights, _ = decayed_weights(q, k, Setting(*told(12, d, Variant(kernel="gaussian"))), None)
    expected = torch.softmax(2 * (8 + 4) / (4 * 8) / 0.7 * rope[-1], dim=0)
    torch.testing.assert_close(weights[0, 0, -1], expected)


# --- dispatch


def test_where_no_kernel_serves_the_isotropic_form_does():
    q = torch.zeros(1, 1, 1, 2, dtype=torch.complex64)
    for given in (q.to(torch.complex128), q.to("meta")):
        assert choose("auto", PATHS, given, dropout=0.0, by_position=True) is PATHS["isotropic"].load()
