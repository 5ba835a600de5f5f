"""Pointwise attention with everything that may bias it, against its equations written out pair by pair."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from recbft.core import SequenceContext
from recbft.mixers import PointwiseAttention

D, H, N = 6, 2, 5
K = D // H
SEGMENT = torch.tensor([[0, 0, 0, 0, 0, 1, 1, -1]])
POSITION = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0]])
TIME = torch.tensor([[0, 0, 70, 5_000, 5_000_000, 30, 31, 0]])
CONTEXT = SequenceContext(SEGMENT, POSITION, TIME)


def drawn(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 8, D, generator=generator, dtype=torch.float64)
    return x, torch.rand(1, 8, D, generator=generator, dtype=torch.float64) * 5 + 0.1


def make(seed=0, **settings):
    torch.manual_seed(seed)
    mixer = PointwiseAttention(D, H, length=N, **settings).double().eval()
    with torch.no_grad():
        for parameter in (mixer.position_table, mixer.time_table, mixer.norm.weight, mixer.norm.bias):
            if parameter is not None:
                parameter.add_(torch.randn_like(parameter))
    return mixer


def weights_by_hand(mixer, x, precision, ramp):
    """(H, T, T): zero where a token may not read."""
    q, k = (F.silu(part(x[0])).view(-1, H, K) for part in (mixer.query, mixer.key))
    weights = torch.zeros(H, 8, 8, dtype=torch.float64)
    for t, j in CONTEXT.allowed[0].nonzero().tolist():
        lag = int(POSITION[0, t] - POSITION[0, j])
        bias = mixer.position_table[lag, 0].item()
        if mixer.time_table is not None:
            elapsed = max(abs(int(TIME[0, t] - TIME[0, j])), 1)
            bias += mixer.time_table[math.floor(math.log(elapsed) / 0.301), 0].item()
        if precision is not None:
            bias += ramp * math.log(precision[0, j].mean().item())
        if mixer.decay_logit is not None:
            bias += ramp * lag * math.log(torch.sigmoid(mixer.decay_logit).item())
        weights[:, t, j] = F.silu((q[t] * k[j]).sum(dim=1) / math.sqrt(K) + bias) / N
    return weights


@pytest.mark.parametrize("centre", ["root", "innovation"])
@pytest.mark.parametrize("ramp", [0.0, 0.4])
@pytest.mark.parametrize("settings", [{}, {"time_bias": True, "recency_decay": 0.8, "output_projection": True}])
def test_the_observation_is_the_gated_sum_and_its_sandwich_precision(settings, ramp, centre):
    mixer = make(estimator="sandwich", lam_max=1e6, centre=centre, **settings)
    x, precision = drawn()
    innovation, found = mixer(x, precision, CONTEXT, ramp=ramp)
    a = weights_by_hand(mixer, x, precision, ramp)
    torch.testing.assert_close(mixer.attention(x, precision, CONTEXT, ramp=ramp)[0], a)
    v = F.silu(mixer.value(x[0])).view(-1, H, K).transpose(0, 1)
    e = a @ v
    gated = mixer.norm(e.transpose(0, 1).flatten(1)) * F.silu(mixer.gate(x[0]))
    total = a.sum(dim=-1)[..., None]
    centres = e / total if centre == "root" else e
    spread = torch.einsum("htj,htjk->htk", a.square(), (v[:, None] - centres[:, :, None]).square())
    variance = (spread / total.square()).clamp(min=1e-6).transpose(0, 1).flatten(1)
    if mixer.out is not None:
        gated, variance = mixer.out(gated), variance @ mixer.out.weight.square().T
    real = [1, 2, 3, 4, 6]  # a lone key has no spread about the root
    torch.testing.assert_close(innovation[0, real], gated[real], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[0, real], (1 / variance[real]).clamp(max=1e6), rtol=1e-6, atol=1e-9)
    assert not found[0, 7].any(), "padding reads nothing"


def test_any_time_beyond_the_table_is_in_its_last_bucket():
    mixer, where = make(time_bias=True), torch.tensor([[0, 1]])
    x, _ = drawn(3)
    found = [
        mixer.attention(x[:, :2], None, SequenceContext(0 * where, where, time * where))[0, :, 1, 0]
        for time in (2**56, 2**62, 1)  # buckets 128, 142 and 0 of 128
    ]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    with torch.no_grad():
        mixer.time_table[0] = mixer.time_table[127]
    last = mixer.attention(x[:, :2], None, SequenceContext(0 * where, where, where))[0, :, 1, 0]
    torch.testing.assert_close(last, found[0])


def test_without_an_estimator_it_observes_the_same_and_knows_no_precision():
    with_precision, plain = make(estimator="sandwich", recency_decay=0.9), make(recency_decay=0.9)
    x, precision = drawn(1)
    for trust in (None, precision):
        innovation, found = plain(x, trust, CONTEXT, ramp=0.7)
        torch.testing.assert_close(innovation, with_precision(x, trust, CONTEXT, ramp=0.7).innovation)
        assert found is None


def test_dropout_is_of_what_the_output_map_reads_in_training_alone_and_spares_precision():
    mixer, still = (make(estimator="sandwich", output_projection=True, dropout=rate) for rate in (0.5, 0.0))
    x, precision = drawn(2)
    expected = still.train()(x, precision, CONTEXT)
    assert torch.equal(mixer(x, precision, CONTEXT).innovation, expected.innovation)
    torch.manual_seed(0)
    innovation, found = mixer.train()(x, precision, CONTEXT)
    assert not torch.allclose(innovation, expected.innovation) and torch.equal(found, expected.precision)
    torch.manual_seed(0)
    halved = torch.linalg.solve(mixer.out.weight, (innovation - mixer.out.bias)[..., None])[..., 0]
    whole = torch.linalg.solve(mixer.out.weight, (expected.innovation - mixer.out.bias)[..., None])[..., 0]
    kept = halved.abs() > 1e-6
    torch.testing.assert_close(halved[kept], 2 * whole[kept], rtol=1e-6, atol=1e-9)
    assert 0 < kept.sum() < kept.numel()


def test_the_recency_decay_starts_where_it_is_asked_to():
    assert torch.sigmoid(make(recency_decay=0.99).decay_logit).item() == pytest.approx(0.99)
    assert make().decay_logit is None and make().time_table is None


def test_the_biases_are_one_number_per_distance_and_one_per_bucket():
    mixer = PointwiseAttention(D, H, length=400, time_bias=True)
    assert mixer.position_table.shape == (400, 1) and mixer.time_table.shape == (128, 1)
    assert 0.015 < mixer.position_table.std() < 0.025 and 0.015 < mixer.time_table.std() < 0.025
