"""Boosted attention and twicing against their formulas written out, and what the options do."""

from __future__ import annotations

import pytest
import torch

from recbft.core import SequenceContext, softmax_weights
from recbft.errors import UserError
from recbft.kernels.softmax_moments import softmax_mean
from recbft.mixers import SoftmaxAttention
from recbft.mixers.boosted import BoostedAttention, BoostedConfig, MlpGate, TwicingAttention
from tests.mixers.histories import context, drawn

D, H, T = 6, 2, 9
K = D // H
WHERE = context((T,))
GATES = ["mlp", "scalar", "none"]


def boosted(seed=0, rounds=2, gate="mlp", **settings):
    torch.manual_seed(seed)
    return BoostedAttention(D, H, BoostedConfig(rounds=rounds, gate=gate), **settings).double().eval()


def dense_round(attend, query, source, precision, ramp, context):
    """One round's weights (H, T, T) and values (H, T, K), by the definition."""
    q, k, v = (
        torch.stack(part(z[0]).split(K, dim=-1))
        for part, z in ((attend.query, query), (attend.key, source), (attend.value, source))
    )
    logits = q @ k.mT / K**0.5 + ramp * precision[0].mean(-1).log()
    if attend.decay_logit is not None:
        logits = logits + ramp * torch.sigmoid(attend.decay_logit).log() * context.lag[0]
    return torch.softmax(logits.masked_fill(~context.allowed[0], float("-inf")), -1), v


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("rounds", "ramp"), [(2, 0.0), (3, 0.7)])
def test_rounds_correct_what_the_ones_before_left(gate, rounds, ramp):
    mixer = boosted(rounds, rounds, gate, estimator="reml", recency_decay=0.8, output_projection=True)
    (x, precision), where = drawn(rounds), context((5, 4))
    total = torch.zeros_like(x)
    for m, attend in enumerate(mixer.rounds):
        weights, v = dense_round(attend, x - total, x, precision, ramp, where)
        c = (weights @ v).movedim(0, 1).flatten(1)[None]
        if m == 0:
            total = c
        elif gate == "mlp":
            total = total + torch.sigmoid(mixer.gates[m - 1].read(torch.cat([total, c], -1))) * c
        else:
            total = total + (mixer.gates[m - 1].shrinkage if gate == "scalar" else 1) * c
    found, lam = mixer(x, precision, where, ramp=ramp)
    torch.testing.assert_close(found, mixer.out(total), rtol=1e-10, atol=1e-12)
    spread = weights @ v.square() - (weights @ v).square()  # of the last round
    last = (1 / weights.square().sum(-1, keepdim=True) + 1) / (spread + 1 / K)
    expected = 1 / ((1 / last.movedim(0, 1).flatten(1)) @ mixer.out.weight.square().T)
    torch.testing.assert_close(lam[0], expected.clamp(max=100), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(mixer.attention(x, precision, where, ramp=ramp)[0], weights, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        {"estimator": "reml", "kriging": "per_dimension"},
        {"estimator": "reml", "output_projection": True, "recency_decay": 0.9, "prior_dof": 2.0, "lam_max": 5.0},
    ],
)
def test_one_round_is_softmax_attention_bit_for_bit(settings):
    one = boosted(rounds=1, **settings)
    plain = SoftmaxAttention(D, H, **settings).double().eval()
    plain.load_state_dict({name.removeprefix("rounds.0."): value for name, value in one.state_dict().items()})
    x, precision = drawn()
    for seen in (precision, None):
        for a, b in zip(one(x, seen, WHERE, ramp=0.6), plain(x, seen, WHERE, ramp=0.6), strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize(
    ("estimator", "causal", "kriging"),
    [(None, True, "scalar"), ("reml", False, "scalar"), ("sandwich", True, "per_dimension")],
)
def test_twicing_is_twice_the_smoother_less_its_square(estimator, causal, kriging):
    torch.manual_seed(1)
    settings = {"estimator": estimator, "recency_decay": 0.8, "kriging": kriging}
    mixer = TwicingAttention(D, H, output_projection=True, **settings).double().eval()
    (x, precision), where = drawn(1), context((5, 4), causal=causal)
    expected, written = torch.zeros(T, D, dtype=torch.float64), []
    for d in range(D):
        known = precision[..., d : d + 1] if kriging == "per_dimension" else precision
        weights, v = dense_round(mixer.smoother, x, x, known, 0.7, where)
        a = weights[d // K]
        written.append(2 * a - a @ a)
        expected[:, d] = written[d] @ v[d // K, :, d % K]
    found, lam = mixer(x, precision, where, ramp=0.7)
    torch.testing.assert_close(found[0], mixer.out(expected), rtol=1e-10, atol=1e-12)
    weights = mixer.attention(x, precision, where, ramp=0.7)[0]  # of coordinates or heads
    each = weights.repeat_interleave(D // len(weights), dim=0)
    torch.testing.assert_close(each, torch.stack(written), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]).double())
    if estimator is not None:
        plain = SoftmaxAttention(D, H, output_projection=True, **settings).double()
        plain.load_state_dict({name.removeprefix("smoother."): value for name, value in mixer.state_dict().items()})
        torch.testing.assert_close(lam, plain(x, precision, where, ramp=0.7).precision)


def test_the_gate_has_the_gradients_of_its_formula():
    torch.manual_seed(0)
    gate = MlpGate(3).double()
    inputs = [torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def run(total, correction, weight, bias):
        return torch.func.functional_call(gate, {"read.weight": weight, "read.bias": bias}, (total, correction))

    assert torch.autograd.gradcheck(run, [*inputs, gate.read.weight, gate.read.bias])
    strided = [x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]
    torch.testing.assert_close(gate(*strided), gate(*inputs))


@pytest.mark.parametrize("make", [boosted, lambda **s: TwicingAttention(D, H, **s).double()])
def test_gradients_are_those_of_the_function(make):
    mixer = make(estimator="reml", recency_decay=0.8)
    x, precision = (value[:, :4].requires_grad_() for value in drawn())
    assert torch.autograd.gradcheck(lambda *a: tuple(mixer(*a, context((2, 2)), ramp=0.7)), (x, precision), atol=1e-6)


def test_a_gate_without_a_second_round_and_rounds_below_one_are_refused():
    with pytest.raises(UserError, match="gate has no effect with rounds 1 \\(got 'scalar'\\); leave it out or take 2"):
        BoostedConfig(rounds=1, gate="scalar")
    with pytest.raises(UserError, match="rounds is 0; give a whole number >= 1"):
        BoostedConfig(rounds=0)


@pytest.mark.parametrize("seed", range(4))
def test_attention_iterated_forgets_its_query(seed):
    """Proposition 1 of the paper: xi <- X softmax(beta X' xi) over fixed patterns X, which are keys and values."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.nn.functional.normalize(torch.randn(5, 8, generator=generator, dtype=torch.float64), dim=-1)
    query = torch.randn(5, 8, generator=generator, dtype=torch.float64)  # five of them
    where = SequenceContext(torch.zeros(1, 5, dtype=torch.int64), torch.arange(5)[None], causal=False)

    def step(query, beta):
        q, k = (beta * 8**0.5 * query)[None, None], patterns[None, None]
        weights = softmax_weights(q, k, where)[0, 0]
        assert (weights >= 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(5, dtype=torch.float64))
        return softmax_mean(q, k, k, where)[0, 0]

    direction = torch.randn(8, 100, generator=generator, dtype=torch.float64)
    assert ((step(query, 2.0) @ direction) <= (patterns @ direction).amax(0) + 1e-12).all(), "(a) in their convex hull"
    basis = torch.linalg.qr(patterns.T).Q  # (8, 5)
    torch.testing.assert_close(step(query @ basis @ basis.T, 2.0), step(query, 2.0))  # (b)
    one, other = patterns, patterns + 0.1 * query
    for _ in range(60):
        one, other = step(one, 16.0), step(other, 16.0)
    torch.testing.assert_close(step(one, 16.0), one)  # (c) a fixed point, in the span of the patterns
    torch.testing.assert_close(one @ basis @ basis.T, one)
    torch.testing.assert_close(one, other)  # queries about one pattern end in one point
