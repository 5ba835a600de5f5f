"""rope, alibi, decayed_rope and sc_rope against sums written out; isolation; what they refuse."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from recbft.config.fields import from_dict
from recbft.errors import UserError
from recbft.mixers.positional import PositionalAttention, PositionalConfig
from tests.mixers.histories import D, H, K, inputs, packed

SCHEMES = ["rope", "alibi", "decayed_rope", "sc_rope"]
over_schemes = pytest.mark.parametrize("scheme", SCHEMES)
over_causal = pytest.mark.parametrize("causal", [True, False])


def make(scheme, *, seed=0, config=None, **settings):
    torch.manual_seed(seed)
    settings = {"estimator": "reml"} | settings
    return PositionalAttention(D, H, config, scheme=scheme, **settings).double().eval()


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
@pytest.mark.parametrize("estimator", ["reml", None])
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
    for settings in ({"damping": 0.0}, {"undamped_heads": -1}):
        with pytest.raises(UserError, match=f"{next(iter(settings))} is "):
            from_dict(PositionalConfig, settings)
    with pytest.raises(TypeError, match="dropuot"):
        make("rope", dropuot=0.1)
