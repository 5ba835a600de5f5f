"""The regime prior against its formulas written out, what it may know of, and what it remembers."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from recbft.core import SequenceContext
from recbft.core.regimes import BiasTerms, block_table, memberships, sinkhorn, soft_blocks, standardised_bias
from recbft.errors import UserError
from recbft.kernels import c_library
from recbft.kernels.c_library.heads import statistics_of
from recbft.mixers.interface import take_penalties
from recbft.mixers.regime import LIMIT, GaussianMemberships, RegimeAttention, RegimeConfig, _written_out
from tests.mixers.histories import context, drawn

D, H, T, R = 6, 2, 9, 3
K = D // H


def regime(seed=0, *, experienced=True, **settings):
    """A mixer with weights that are far from their start, after a few batches unless asked otherwise."""
    options = {name: settings.pop(name) for name in list(settings) if hasattr(RegimeConfig, name)}
    torch.manual_seed(seed)
    config = RegimeConfig(**{"regimes": R, "width": 4, "warm_in_steps": 10, **options})
    mixer = RegimeAttention(D, H, config, length=settings.pop("length", T), **settings).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.4)
        if experienced:
            for number in range(4):
                mixer.train()(
                    drawn(50 + number, B=2)[0], None, context((5, 4), (9,), causal=settings.get("causal", True))
                )
    return mixer.eval()


def bias_of(mixer, mu, where):
    return _written_out(mixer._terms(mu, where), where)


def bias_by_hand(mixer, x, where):
    """(B, T, T), pair by pair."""
    config, mu = mixer.config, mixer.memberships(x)
    B, T, _ = x.shape
    bias = torch.zeros(B, T, T, dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            for j in range(T):
                if not where.allowed[b, t, j]:
                    continue
                at, to = int(where.position[b, t]), int(where.position[b, j])
                reach = 1 + max(int(where.position[b, i]) for i in range(T) if where.allowed[b, t, i])
                raw = (1 - config.distance_mix) * mu[b, t] @ mixer.alignment @ soft_blocks(reach, R)[to]
                if config.distance_mix:
                    raw = raw - config.distance_mix * mixer.log_distance.exp() * abs(at - to) / max(1, reach - 1)
                z = (raw - mixer.bias_mean) / max(mixer.bias_variance.sqrt().item(), 1e-3)
                warm = min(1, mixer.batches.item() / config.warm_in_steps) if config.warm_in_steps else 1
                bias[b, t, j] = z.clamp(-4, 4) * warm / mixer.temperature
    return bias


def dense(mixer, x, precision, where, ramp):
    """Innovation and REML precision of every token, by the definitions."""
    reader, mu = mixer.reader, mixer.memberships(x)
    q, k, v = (torch.stack(part(x).split(K, dim=-1), dim=1) for part in (reader.query, reader.key, reader.value))
    logits = q @ k.mT / math.sqrt(K) + ramp * precision.mean(-1).log()[:, None, None, :]
    logits = logits + bias_by_hand(mixer, x, where)[:, None]
    weights = torch.softmax(logits.masked_fill(~where.allowed[:, None], float("-inf")), -1)
    mean = weights @ v
    lam = (1 / weights.square().sum(-1, keepdim=True) + 1) / (weights @ v.square() - mean.square() + 1 / K)
    gate = torch.ones_like(mean[..., :1])
    if mixer.residual_gate is not None:
        gate = gate * 2 * torch.sigmoid(mixer.residual_gate(mu))[:, None]
    if mixer.value_gate is not None:
        gate = gate * 2 * torch.sigmoid(mixer.value_gate(mu)).mT[..., None]
    return (mean * gate).transpose(1, 2).flatten(2), lam.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"distance_mix": 0.0}, {"type2": True}, {"residual_gate": False, "value_gate": False}, {"warm_in_steps": 0}],
)
def test_the_observation_is_the_formula_pair_by_pair(options, causal):
    mixer = regime(estimator="reml", **options)
    (x, precision), where = drawn(B=2), context((5, 4), (9,), causal=causal)
    for found, expected in zip(
        mixer(x, precision, where, ramp=0.7), dense(mixer, x, precision, where, 0.7), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    weights = mixer.attention(x, precision, where, ramp=0.7)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_memberships_are_shares_that_follow_distance_and_width():
    centres = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    # |z - c|^2 / (2 sigma^2) at z = (1, 0) with sigma = 1, 2, 1:  1/2, 4/8, 17/2
    mu = memberships(torch.tensor([1.0, 0.0]).double(), centres, torch.tensor([0.0, math.log(2), 0.0]).double())
    total = 2 * math.exp(-0.5) + math.exp(-8.5)
    expected = torch.tensor([math.exp(-0.5), math.exp(-0.5), math.exp(-8.5)], dtype=torch.float64) / total
    torch.testing.assert_close(mu, expected)
    far = memberships(torch.randn(5, 4, 2).double() * 100, centres, torch.zeros(3).double())
    assert torch.isfinite(far).all()
    torch.testing.assert_close(far.sum(-1), torch.ones(5, 4, dtype=torch.float64))


def test_certain_widths_make_type_2_memberships_those_of_type_1():
    z, centres, width = torch.randn(7, 4).double(), torch.randn(3, 4).double(), torch.randn(3).double()
    plain = memberships(z, centres, width)
    torch.testing.assert_close(memberships(z, centres, width, torch.zeros(7, 1).double()), plain)
    unsure = memberships(z, centres, width, torch.full((7, 1), 0.5).double())
    wide, narrow = (memberships(z, centres, width + s * math.log(1.5)) for s in (1, -1))
    torch.testing.assert_close(unsure, (wide + narrow) / 2)
    torch.testing.assert_close(unsure.sum(-1), torch.ones(7, dtype=torch.float64))


@pytest.mark.parametrize("length", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_soft_blocks_tile_any_length_with_rows_of_sum_one(length, blocks):
    phi = soft_blocks(length, blocks)
    assert phi.shape == (length, blocks) and (phi >= 0).all()
    torch.testing.assert_close(phi.sum(1), torch.ones(length, dtype=torch.float64))
    torch.testing.assert_close(phi, phi.flip(0, 1))  # seen from the end they are the same
    table = block_table(64, blocks, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(table[:-1, length - 1, :length].T, phi)
    assert not table[:, length - 1, length:].any()


def test_soft_blocks_by_hand():
    # T = 3, R = 2: centres 0 and 2, half-width 1.5 * 3 / 2 = 2.25; window (1 + cos(pi d / 2.25)) / 2 at d = 0, 1, 2
    w0, w1, w2 = 1.0, (1 + math.cos(math.pi / 2.25)) / 2, (1 + math.cos(2 * math.pi / 2.25)) / 2
    expected = [[w0 / (w0 + w2), w2 / (w0 + w2)], [0.5, 0.5], [w2 / (w0 + w2), w0 / (w0 + w2)]]
    assert w1 > w2
    torch.testing.assert_close(soft_blocks(3, 2), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("scale", [1.0, 5.0, 1000.0])
def test_sinkhorn_is_doubly_stochastic_and_never_overflows(scale):
    for seed in range(5):
        scores = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).double()
        P = sinkhorn(scale * scores, sweeps=8)
        torch.testing.assert_close(P.sum(0), torch.ones(4).double())
        assert torch.isfinite(P).all() and (P >= 0).all()
        rows = sinkhorn(scores, sweeps=60).sum(1)
        torch.testing.assert_close(rows, torch.ones(4).double(), rtol=1e-6, atol=1e-6)
    assert (sinkhorn(scores, sweeps=8).sum(1) - 1).abs().max() < 0.05
    # Two by two it is known: with r = sqrt(ad / bc) the matrix is [[r, 1], [1, r]] / (1 + r).
    P = sinkhorn(torch.tensor([[2.0, 1.0], [0.0, 1.0]]).double(), sweeps=60)
    r = math.exp((2 + 1 - 1 - 0) / 2)
    torch.testing.assert_close(P, torch.tensor([[r, 1.0], [1.0, r]]).double() / (1 + r))


def test_the_standardised_bias_has_the_gradients_of_its_formula():
    generator = torch.Generator().manual_seed(0)
    shares = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    terms = torch.randn(3, 2, 4, 4, generator=generator, dtype=torch.float64)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    mean, deviation = torch.tensor(0.1).double(), torch.tensor(0.6).double()

    def run(shares, scale):
        return standardised_bias(shares, terms, mean=mean, deviation=deviation, limit=1.5, scale=scale)[0]

    expected = (((shares[..., None] * terms).sum(0) - mean) / deviation).clamp(-1.5, 1.5) * scale
    torch.testing.assert_close(run(shares, scale), expected)
    assert torch.autograd.gradcheck(run, (shares, scale))


def test_gradients_are_those_of_the_function():
    mixer = regime(estimator="reml", output_projection=True, type2=True)
    x, precision = (value[:, :4].requires_grad_() for value in drawn())
    where = context((2, 2))
    assert torch.autograd.gradcheck(lambda *a: tuple(mixer(*a, where, ramp=0.7)), (x, precision), atol=1e-6)


def test_padding_reads_nothing_and_is_not_counted():
    x, _ = drawn(2, B=2)
    mixer, other = regime(experienced=False, estimator="reml"), regime(experienced=False, estimator="reml")
    seen = mixer.train()(x, None, context((4,), (3,), width=9))
    assert not seen.innovation[0, 4:].any() and not seen.precision[1, 3:].any()
    moved = x.clone()
    moved[0, 4:], moved[1, 3:] = 30.0, -30.0
    other.train()(moved, None, context((4,), (3,), width=9))
    for name, value in mixer.named_buffers():
        torch.testing.assert_close(value, dict(other.named_buffers())[name], msg=name)


def test_training_remembers_the_alignment_and_the_bias_of_the_batches_before():
    mixer = regime(experienced=False)
    x, where = drawn(1, B=2)[0], context((5, 4), (9,))
    mu = mixer.memberships(x)
    before = bias_of(mixer, mu, where)[1]
    mixer.train()(x, None, where)
    # S: mean over the three histories of sum_t mu_t phi_t'
    S = (mu[0, :5].T @ soft_blocks(5, R) + mu[0, 5:].T @ soft_blocks(4, R) + mu[1].T @ soft_blocks(9, R)) / 3
    torch.testing.assert_close(mixer.alignment, sinkhorn(S / 0.7, sweeps=8))
    seen = before[0][where.allowed[0]]  # one row in four
    torch.testing.assert_close(mixer.bias_mean, seen.mean())
    torch.testing.assert_close(mixer.bias_variance, seen.var(correction=0))
    entropy = torch.special.entr(mu).sum(-1).mean().item()
    assert mixer.diagnosis().entropy == pytest.approx(entropy) and mixer.batches == 1
    first = mixer.alignment.clone()
    other = drawn(2, B=2)[0]
    mixer(other, None, where)
    mu = mixer.memberships(other)
    S = (mu[0, :5].T @ soft_blocks(5, R) + mu[0, 5:].T @ soft_blocks(4, R) + mu[1].T @ soft_blocks(9, R)) / 3
    torch.testing.assert_close(mixer.alignment, (first + sinkhorn(S / 0.7, sweeps=8)) / 2)
    assert mixer.eval()(x, None, where) and mixer.batches == 2, "evaluation remembers nothing"


def test_training_remembers_the_share_of_tokens_that_are_in_one_regime_alone():
    mixer, where = regime(experienced=False), context((5, 3), (9,))
    x = 3 * drawn(1, B=2)[0]
    largest = mixer.memberships(x).amax(dim=-1)[where.valid]
    share = (largest > 0.95).double().mean().item()
    assert 0.2 < share < 0.9 and ((largest > 0.9) & (largest < 0.95)).any()
    mixer.train()(x, None, where)
    assert mixer.diagnosis().saturated == pytest.approx(share)


def test_after_a_hundred_batches_one_more_counts_a_hundredth():
    mixer = regime()
    x, where = drawn(1)[0], context((9,))
    entropy = torch.special.entr(mixer.memberships(x)).sum(-1).mean().item()
    for batches, weight in ((98, 1 / 99), (99, 0.01), (5000, 0.01)):
        mixer.batches.fill_(batches)
        mixer.entropy.fill_(2.0)
        mixer.train()(x, None, where)
        assert mixer.diagnosis().entropy == pytest.approx((1 - weight) * 2 + weight * entropy)


def test_the_bias_stays_within_its_bounds_and_warms_in():
    mixer = regime(warm_in_steps=8, temperature=0.7)
    x, where = 10 * drawn(7)[0], context((9,))
    with torch.no_grad():
        mixer.bias_variance.fill_(1e-12)  # as if the bias had hardly varied
        half = bias_of(mixer, mixer.memberships(x), where)[0]
        mixer.batches.fill_(100.0)
        whole = bias_of(mixer, mixer.memberships(x), where)[0]
    torch.testing.assert_close(whole, 2 * half)
    assert (whole.abs() <= LIMIT / 0.6).all() and (whole.abs() == LIMIT / mixer.temperature).any()


def test_a_temperature_moves_within_its_bounds():
    mixer = regime(temperature=1.0)
    before = mixer.temperature.item()
    mixer.move_temperature(0.05)
    assert mixer.temperature.item() == pytest.approx(before + 0.05)
    mixer.move_temperature(9.0)
    assert mixer.temperature.item() == pytest.approx(1.59)
    mixer.move_temperature(-9.0)
    assert mixer.temperature.item() == pytest.approx(0.61)


def test_memberships_below_the_entropy_floor_are_penalised_in_training_alone():
    mixer = regime(entropy_floor=1.0, entropy_weight=0.5)
    x, where = drawn(), context((6,), width=9)
    x = x[0]
    take_penalties(mixer)
    mixer(x, None, where)
    assert take_penalties(mixer) is None
    mixer.train()(x, None, where)
    entropy = torch.special.entr(mixer.memberships(x)[0, :6]).sum(-1).mean()
    penalty = take_penalties(mixer)
    torch.testing.assert_close(penalty, 0.25 * (math.log(R) - entropy))
    assert take_penalties(mixer) is None, "a penalty is taken once"
    with torch.no_grad():
        mixer.pressure.fill_(0.6)
        mixer.drift.fill_(2.0)
        mixer.temperature_before.copy_(mixer.temperature - 0.1)
    mixer(x, None, where)
    copy.deepcopy(mixer)
    penalty = take_penalties(mixer)
    torch.testing.assert_close(penalty, 1.6 * 0.25 * (math.log(R) - entropy) + 2 * 0.01)
    penalty.backward()
    assert mixer.memberships.centres.grad.any() and mixer.temperature_logit.grad != 0


def test_memberships_above_the_entropy_floor_are_not_rewarded():
    mixer = regime(entropy_floor=0.5, entropy_weight=0.5)
    x, where = drawn()[0], context((6,), width=9)
    with torch.no_grad():
        mixer.memberships.log_width.fill_(9.0)  # all regimes alike
    mixer.train()(x, None, where)
    assert take_penalties(mixer) == 0


def test_the_prior_starts_where_it_is_asked_to():
    mixer = RegimeAttention(D, H, RegimeConfig(temperature=0.75, regimes=3))
    assert mixer.temperature.item() == pytest.approx(0.75) == mixer.temperature_before.item()
    assert mixer.log_distance.exp().item() == pytest.approx(0.2)
    assert (mixer.alignment == 1 / 3).all()
    assert (mixer.bias_mean, mixer.bias_variance) == (0, 1) and mixer.diagnosis() == (0, 0)
    gates = {name for name, _ in mixer.named_parameters() if "gate" in name}
    assert gates == {"residual_gate.weight", "value_gate.weight"}
    assert mixer.memberships.uncertainty is None
    assert RegimeAttention(D, H, RegimeConfig(type2=True)).memberships.uncertainty is not None


@pytest.mark.parametrize("estimator", ["reml_naive", "sandwich"])
def test_every_estimator_sees_the_biased_weights(estimator):
    mixer = regime(estimator=estimator, residual_gate=False, value_gate=False)
    (x, precision), where = drawn(), context((5, 4))
    bias = bias_by_hand(mixer, x, where)[:, None]
    for one, two in zip(mixer(x, precision, where), mixer.reader(x, precision, where, bias=bias), strict=True):
        torch.testing.assert_close(one, two)
    assert not torch.allclose(one, mixer.reader(x, precision, where).precision)


def test_more_regimes_than_positions_and_values_out_of_range_are_refused():
    with pytest.raises(UserError, match="regimes is 4, but a history has at most 3 positions; take fewer, or raise"):
        RegimeAttention(D, H, RegimeConfig(), length=3)
    least = {"regimes": 2, "width": 2, "sweeps": 1, "warm_in_steps": 0, "entropy_floor": 0.0, "entropy_weight": 0.0}
    RegimeAttention(D, H, RegimeConfig(**least), length=2)
    with pytest.raises(UserError, match=r"temperature is 2\.0; give a number > 0.6 and < 1.6"):
        RegimeConfig(temperature=2.0)
    with pytest.raises(UserError, match="width is 3; give a whole number >= 4"):
        RegimeConfig(width=3)
    for settings in ({"regimes": 1}, {"alignment_temperature": 0.0}, {"sweeps": 0}, {"warm_in_steps": -1},
                     {"distance_mix": 1.5}, {"entropy_floor": 1.5}, {"entropy_weight": -0.1}):  # fmt: skip
        (name,) = settings
        with pytest.raises(UserError, match=f"{name} is "):
            RegimeConfig(**settings)


def test_centres_start_as_far_from_each_other_as_random_ones_in_the_paper():
    centres = GaussianMemberships(D, R).centres[:, 0]
    torch.testing.assert_close(centres @ centres.T, torch.eye(R))


@pytest.mark.parametrize("floor", [0.0, 0.9])
def test_a_membership_of_zero_spoils_no_gradient(floor):
    mixer = regime(entropy_floor=floor)
    mu = torch.eye(R).repeat(3, 1)[None].requires_grad_()
    mixer._leave_penalty(mu, context((T,)))
    penalty = take_penalties(mixer)
    penalty.backward()
    assert penalty.isfinite() and mu.grad.isfinite().all()


@pytest.mark.skipif(c_library.missing() is not None, reason="no kernels in C")
@pytest.mark.parametrize(
    ("rows", "in_order", "options", "estimator", "causal"),
    [
        ([(5, 4), (9,), (2, 1)], True, {}, "reml", True),
        ([(70, 61), (129,)], True, {"distance_mix": 0.0}, None, True),
        ([(70, 61), (129,)], False, {}, "reml_naive", True),
        ([(70, 61), (129,)], True, {}, "reml", False),
        ([(5, 4), (9,)], False, {"distance_mix": 0.0}, "reml_naive", False),
    ],
)
def test_the_bias_that_is_never_written_out_is_the_one_that_is(rows, in_order, options, estimator, causal):
    where = context(*rows, causal=causal)
    B, T = where.position.shape
    if not in_order:
        order = torch.randperm(T, generator=torch.Generator().manual_seed(1))
        where = SequenceContext(where.segment[:, order], where.position[:, order], causal=causal)
    start = regime(3, experienced=False, estimator=estimator, length=T, **options).float().train()
    batches = [(x.float(), precision.float()) for x, precision in (drawn(seed, B, T) for seed in range(3))]
    found = []
    for formed in (True, False):
        mixer = copy.deepcopy(start)
        if not formed:
            mixer.reader.takes_terms = lambda x: False
        assert mixer.reader.takes_terms(batches[0][0]) == formed
        for x, precision in batches:  # the last knows of those before
            mixer.zero_grad()
            x = x.requires_grad_()
            x.grad = None
            seen = mixer(x, None if estimator is None else precision, where)
            total = seen.innovation.sin().sum() + (0 if estimator is None else seen.precision.log1p().sum())
            total.backward()
        found.append(
            {"innovation": seen.innovation, "precision": seen.precision, "dx": x.grad.clone()}
            | {name: p.grad for name, p in mixer.named_parameters() if name != "reader.key.bias"}  # which is 0
            | dict(mixer.named_buffers())
        )
    for name, exact in found[1].items():
        if exact is not None:
            size = max(exact.abs().max().item(), 1e-3)
            torch.testing.assert_close(found[0][name] / size, exact / size, rtol=0, atol=2e-4, msg=name)


@pytest.mark.skipif(c_library.missing() is not None, reason="no kernels in C")
def test_statistics_of_rows_that_are_alike_are_those_of_one():
    where = context((5, 4), (5, 4), (5, 4))
    shares = torch.rand(1, 9, 4, generator=torch.Generator().manual_seed(0)).expand(3, 9, 4).contiguous()
    constants = torch.tensor(0.1), torch.tensor(1.0), torch.tensor(1.0)
    terms = BiasTerms(
        shares, block_table(9, 3, torch.float32, torch.device("cpu")), where.position.int(), *constants, 3.0
    )
    for one, other in zip(*(statistics_of(terms, where, every=every) for every in (1, 3)), strict=True):
        torch.testing.assert_close(one, other)
        assert one > 0
