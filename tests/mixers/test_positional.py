"""rope, alibi, decayed_rope and sc_rope against sums written out; isolation; what they refuse."""

from __future__ import annotations

import cmath
import math

import numpy as np
import pytest
import torch

from recbft.config.fields import from_dict
from recbft.core import SequenceContext
from recbft.datasets.batches import pack_histories
from recbft.errors import UserError
from recbft.mixers import SoftmaxAttention
from recbft.mixers.positional import PositionalAttention, PositionalConfig

D, H = 8, 2
K = D // H
SCHEMES = ["rope", "alibi", "decayed_rope", "sc_rope"]
over_schemes = pytest.mark.parametrize("scheme", SCHEMES)
over_causal = pytest.mark.parametrize("causal", [True, False])


def make(scheme, *, seed=0, config=None, **settings):
    torch.manual_seed(seed)
    settings = {"estimator": "reml"} | settings
    return PositionalAttention(D, H, config, scheme=scheme, **settings).double().eval()


def packed(lengths, *, causal=True):
    stop = np.cumsum(lengths)
    batch = pack_histories(np.arange(1, stop[-1] + 1), stop - np.array(lengths), stop)
    return batch, SequenceContext(batch.segment, batch.position, causal=causal)


def inputs(batch):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(100, D, generator=g, dtype=torch.float64)
    precision = torch.rand(100, D, generator=g, dtype=torch.float64) * 9 + 0.1
    return x[batch.items], precision[batch.items]


def observe(mixer, batch, context, x, precision):
    torch.manual_seed(1)
    parts, real = mixer(x, precision, context, ramp=0.7), batch.segment >= 0
    return [part[real][batch.items[real].argsort()] for part in parts]


def weights_by_sums(scheme, q, k, precision, causal):
    """One history, entry by entry; base 100, damping 0.2, the second head without decay."""
    T = q.shape[1]
    weights = torch.zeros(H, T, T, dtype=torch.float64)
    for h in range(H):
        frequency = [100.0 ** (-i / 4) for i in range(4)][2 * h :] if scheme == "sc_rope" else [1.0, 100.0**-0.5]
        slope = {"alibi": [2**-4, 2**-8], "decayed_rope": [0.2, 0.0], "sc_rope": [0.2, 0.0]}.get(scheme, [0.0, 0.0])[h]
        for t in range(T):
            keys = list(range(t + 1 if causal else T))
            logits = []
            for j in keys:
                product = 0.0
                for i in range(K // 2):
                    left, right = (complex(*part[2 * i : 2 * i + 2].tolist()) for part in (q[h, t], k[h, j]))
                    turn = 1.0 if scheme == "alibi" else cmath.exp(1j * frequency[i] * (t - j))
                    product += (left.conjugate() * turn * right).real
                logits.append(product / math.sqrt(K) - slope * abs(t - j) + 0.7 * math.log(precision[j].mean().item()))
            weights[h, t, keys] = torch.softmax(torch.tensor(logits, dtype=torch.float64), dim=0)
    return weights


@over_schemes
@over_causal
@pytest.mark.parametrize("estimator", ["reml", "delta", None])
def test_weights_and_innovation_are_the_sums_written_out(scheme, causal, estimator):
    config = PositionalConfig() if scheme == "alibi" else PositionalConfig(frequency_base=100.0)
    if scheme in ("decayed_rope", "sc_rope"):
        config = PositionalConfig(frequency_base=100.0, damping=0.2, undamped_heads=1)
    mixer = make(scheme, config=config, estimator=estimator)
    batch, context = packed([6], causal=causal)
    x, precision = inputs(batch)
    q, k, v = (part[0] for part in mixer.reader.project(x))
    expected = weights_by_sums(scheme, q, k, precision[0], causal)
    found = mixer.attention(x, precision, context, ramp=0.7)[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)  # the frequencies are kept in float32
    innovation, estimated = mixer(x, precision, context, ramp=0.7)
    torch.testing.assert_close(innovation[0], (found @ v).transpose(0, 1).flatten(1), rtol=1e-9, atol=1e-11)
    assert (estimated is None) == (estimator is None)


@over_schemes
@pytest.mark.parametrize("training", [False, True])
def test_a_later_token_changes_nothing_before_it_nor_in_other_histories(scheme, training):
    mixer = make(scheme, dropout=0.5 if training else 0.0).train(training)
    batch, context = packed([6, 4, 2])
    x, precision = inputs(batch)
    late = (batch.segment == 0) & (batch.position >= 3)
    changed_x, changed_precision = x.clone(), precision.clone()
    changed_x[late], changed_precision[late] = 50.0, 0.01
    before, after = (observe(mixer, batch, context, *pair) for pair in ((x, precision), (changed_x, changed_precision)))
    for one, two in zip(before, after, strict=True):
        torch.testing.assert_close(one[:3], two[:3], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(one[6:], two[6:], rtol=1e-10, atol=1e-12)
        assert not torch.allclose(one[3:6], two[3:6])


@over_schemes
@over_causal
def test_a_history_is_observed_alike_alone_packed_and_padded(scheme, causal):
    mixer = make(scheme)
    lengths, first = [6, 4, 2, 1, 5], 0
    batch, context = packed(lengths, causal=causal)
    whole = observe(mixer, batch, context, *inputs(batch))
    for length in lengths:
        alone, context = packed([length], causal=causal)
        alone = alone._replace(items=alone.items + first)
        for part, one in zip(observe(mixer, alone, context, *inputs(alone)), whole, strict=True):
            torch.testing.assert_close(part, one[first : first + length], rtol=1e-10, atol=1e-12)
        first += length


@over_schemes
def test_every_parameter_gets_a_finite_gradient_and_survives_a_state_dict(scheme):
    mixer, other = make(scheme), make(scheme, seed=5)
    batch, context = packed([6, 4, 2])
    x, precision = inputs(batch)
    innovation, found = mixer(x, precision, context)
    (innovation.square().sum() + found.log().sum()).backward()
    for name, parameter in mixer.named_parameters():
        assert torch.isfinite(parameter.grad).all() and (parameter.grad.any() or name.endswith("key.bias")), name
    assert [name for name, _ in mixer.named_parameters() if name.startswith("sde")] == (
        ["sde.decay.raw"] if scheme == "decayed_rope" else []
    )
    other.load_state_dict(mixer.state_dict())
    for one, two in zip(*(m(x, precision, context) for m in (mixer, other)), strict=True):
        assert torch.equal(one, two)


def test_without_distance_nothing_but_plain_attention_is_left():
    batch, context = packed([1, 1])
    x, precision = inputs(batch)
    for scheme in SCHEMES:
        mixer = make(scheme)
        plain = SoftmaxAttention(D, H, estimator="reml").double()
        plain.load_state_dict(mixer.reader.state_dict())
        for one, two in zip(mixer(x, precision, context), plain(x, precision, context), strict=True):
            torch.testing.assert_close(one, two)


def test_rope_knows_distances_and_not_places():
    mixer = make("rope")
    batch, context = packed([6])
    x, _ = inputs(batch)
    moved = SequenceContext(context.segment, context.position + 17)
    torch.testing.assert_close(mixer(x, None, moved).innovation, mixer(x, None, context).innovation)
    spread = SequenceContext(context.segment, 2 * context.position)
    assert not torch.allclose(mixer(x, None, spread).innovation, mixer(x, None, context).innovation)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(UserError, match="scheme is 'rop'; did you mean 'rope'"):
        make("rop")
    with pytest.raises(UserError, match="a head of width 3 has a coordinate without a partner to turn with"):
        PositionalAttention(6, 2, scheme="rope")
    PositionalAttention(6, 2, scheme="alibi")
    with pytest.raises(
        UserError, match="frequency_base has no effect with alibi; leave it out or take rope, decayed_rope"
    ):
        make("alibi", config=PositionalConfig(frequency_base=100.0))
    with pytest.raises(UserError, match="damping has no effect with rope"):
        make("rope", config=PositionalConfig(damping=0.1))
    with pytest.raises(UserError, match=r"frequency_base is 1.0; give a number > 1"):
        from_dict(PositionalConfig, {"frequency_base": 1.0})
    with pytest.raises(UserError, match=r"damping is 0.0; give a number > 0"):
        from_dict(PositionalConfig, {"damping": 0.0})
    with pytest.raises(UserError, match=r"undamped_heads is -1; give a whole number >= 0"):
        from_dict(PositionalConfig, {"undamped_heads": -1})
    with pytest.raises(TypeError, match="dropuot"):
        make("rope", dropuot=0.1)
