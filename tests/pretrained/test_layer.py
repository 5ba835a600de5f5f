"""The formulas of a pretrained layer with a precision channel, held to dense arithmetic."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.func import jacrev, vmap

from recbft.core import gated_jacobian, projected_precision, reml_precision_ref

pytest.importorskip("transformers")
from recbft.pretrained.layer import Flow


@pytest.mark.parametrize("act", [torch.nn.functional.silu, torch.nn.functional.gelu])
def test_the_jacobian_of_a_gated_network_is_the_diagonal_that_autograd_finds(act):
    generator = torch.Generator().manual_seed(0)
    w_gate, w_up, w_out = (torch.randn(s, generator=generator).double() for s in ((7, 5), (7, 5), (5, 7)))
    x = torch.randn(3, 5, generator=generator).double()
    expected = vmap(jacrev(lambda y: w_out @ (act(w_gate @ y) * (w_up @ y))))(x).diagonal(dim1=1, dim2=2)
    a = x @ w_gate.T
    activated, slope = torch.func.jvp(act, (a,), (torch.ones_like(a),))
    torch.testing.assert_close(gated_jacobian(activated, slope, x @ w_up.T, w_gate, w_up, w_out), expected)


@pytest.mark.parametrize("ramp", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_layer_is_the_filter_step_written_out(tiny, ramp, attention):
    """Observe, update and predict of the first layer, with weights that are kept and no part of the layer's code."""
    model = tiny("llama", attention=attention)
    model.set_ramp(ramp)
    layer, ids = model.model.layers[0], torch.arange(2 * 9).view(2, 9) % 13
    seen = []
    layer.register_forward_hook(lambda _, inputs, output: seen.extend((inputs[0], output, layer.flow.precision)))
    layer.update.register_forward_hook(lambda _, inputs, output: seen.append(output.gain))
    with torch.no_grad():
        model(ids)
        gain, h, after, lam_after = seen
        own, (B, T, D), K = layer.self_attn, h.shape, layer.self_attn.head_dim
        lam = layer.start.initial(torch.zeros(B, T, dtype=torch.int64), h).expand(B, T, D)
        lam = lam * layer.precision.first_precision / layer.precision.mean_precision  # (3.6)
        x = layer.input_layernorm(h)
        q, k, v = (p(x).view(B, T, -1, K).transpose(1, 2) for p in (own.q_proj, own.k_proj, own.v_proj))
        cos, sin = model.model.rotary_emb(h, torch.arange(T)[None])

        def turned(y):
            first, second = y.chunk(2, dim=-1)
            return y * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]

        H = q.shape[1]
        k, v = (y.repeat_interleave(H // y.shape[1], dim=1) for y in (turned(k), v))
        logits = turned(q) @ k.mT / K**0.5 + ramp * lam.mean(-1).log()[:, None, None]
        a = logits.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
        e = a @ v
        S, n = a @ v.square() - e.square(), 1 / a.square().sum(-1)
        r = reml_precision_ref(S.clamp(min=0), n, prior_scale=1 / K).transpose(1, 2).flatten(2)
        r = projected_precision(r, own.o_proj.weight)
        expected_gain = 1 - ramp * (1 - r / (lam + r))
        torch.testing.assert_close(gain, expected_gain)
        middle = h + expected_gain * own.o_proj(e.transpose(1, 2).flatten(2))
        expected = middle + layer.mlp(layer.post_attention_layernorm(middle))
        rtol = 1e-5 if attention == "eager" else 1e-7  # Hugging Face's eager softmax is in float32
        torch.testing.assert_close(after, expected, rtol=rtol, atol=rtol)
        slope = (1 + layer.precision.mean_jacobian).square().clamp(min=0.01)
        noise = torch.nn.functional.softplus(layer.precision.noise_logits)
        torch.testing.assert_close(lam_after, (1 / (slope / (lam + r) + noise)).clamp(max=100))


def test_what_flows_belongs_to_one_pass_in_one_thread():
    flow = Flow()
    flow.ramp = 0.5
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: flow.ramp).result() == 0
    assert copy.deepcopy(flow).ramp == 0
