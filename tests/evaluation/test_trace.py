"""What a trace records is what the layer did, and recording does nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import jacrev

from recbft.datasets import leave_one_out
from recbft.datasets.batches import pack_histories
from recbft.evaluation.trace import at_cap, trace
from recbft.mixers import PointwiseAttention
from recbft.models import Popularity
from recbft.training.run_config import load_run_config

UPDATES = [{}, {"update": "residual"}, {"update": "fixed", "fixed_gain": 0.6}, {"update": "gate"},
           {"prior_scale": "per_layer"}, {"propagation": "discount"}, {"jacobian_in_evaluation": "exact"},
           {"estimator": "sandwich"}, {"kriging": "per_dimension"}]  # fmt: skip


def packed(dataset, model, users=slice(None)):
    view = leave_one_out(dataset).test
    start = view.start.copy()[users]
    stop = view.stop[users]
    start = start.clip(min=stop - model.max_length + (model.append is not None))
    return pack_histories(dataset.items, start, stop, times=dataset.times, append=model.append)


def traced(model, batch):
    with torch.no_grad():
        return trace(model, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tracing_changes_no_score_and_leaves_no_hook_behind(lab, arm, dtype):
    model = lab.make_model(lab.dataset, *arm).to(dtype)
    batch = packed(lab.dataset, model)
    with torch.no_grad():
        plain = model.user_states(batch)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        states, layers = trace(model, batch)
        for layer in layers:
            parts = (layer.gain, layer.jacobian, layer.jacobian_used, layer.outgoing, layer.observation)
            assert all((part is None) == (plain.precision is None) for part in parts)
            assert layer.weights is not None
        again = model.user_states(batch)
    for one, traced_state, other in zip(plain, states, again, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
        torch.testing.assert_close(traced_state, one)  # another shape of products, another last digit
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_the_recency_decay_of_several_rounds_is_that_of_the_last(lab):
    run = load_run_config(model="sasrec", mixer="boosted", backbone={"hidden_size": 8, "max_length": 8})
    model = run.build(torch.from_numpy(lab.dataset.training_counts)).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.mixer.rounds[-1].decay_logit.fill_(1.0)
        _, layers = trace(model, packed(lab.dataset, model))
        found = [layer.recency_decay for layer in layers]
    assert found == [pytest.approx(1 / (1 + math.exp(-1)))] * len(model.blocks)


def test_hooks_are_gone_when_the_pass_fails(lab):
    model = lab.make_model(lab.dataset)
    batch = packed(lab.dataset, model)
    with pytest.raises(IndexError):
        traced(model, batch._replace(items=batch.items + 1000))
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("core", UPDATES, ids=str)
def test_each_layer_hands_on_what_the_next_one_starts_from(lab, core):
    model = lab.make_model(lab.dataset, core=core)
    states, (one, two) = traced(model, packed(lab.dataset, model))
    if "prior_scale" not in core:
        assert torch.equal(one.outgoing, two.incoming)
    last = two.outgoing.flatten(0, 1)[packed(lab.dataset, model).last].mean(dim=-1)
    torch.testing.assert_close(last, states.precision)


@pytest.mark.parametrize("name", ["sasrec", "bert4rec", "hstu"])
def test_the_kalman_gain_is_r_over_lam_plus_r_let_in_by_the_ramp(lab, name):
    model = lab.make_model(lab.dataset, name)
    for layer in traced(model, packed(lab.dataset, model))[1]:
        gain = layer.observation / (layer.incoming + layer.observation)
        torch.testing.assert_close(layer.gain, 1 - 0.8 * (1 - gain), rtol=1e-9, atol=1e-12)
    model.set_ramp(1.0)
    for layer in traced(model, packed(lab.dataset, model))[1]:
        gain = layer.observation / (layer.incoming + layer.observation)
        torch.testing.assert_close(layer.gain, gain, rtol=1e-12, atol=0)


def test_the_weights_are_those_that_made_the_innovation_in_every_arm(lab, arm):
    check_weights(lab.make_model(lab.dataset, *arm), lab.dataset)


@pytest.mark.parametrize("core", UPDATES, ids=str)
def test_the_weights_are_those_that_made_the_innovation_whatever_the_settings(lab, core):
    check_weights(lab.make_model(lab.dataset, core=core, output_projection=True), lab.dataset)


def check_weights(model, dataset):
    batch = packed(dataset, model)
    for layer in traced(model, batch)[1]:
        mixer, call = layer.block.mixer, layer._calls["mixer"]
        x, source = call.arguments[0], call.named.get("source")
        B, T, D = x.shape
        values = mixer.value(x if source is None else source)
        if isinstance(mixer, PointwiseAttention):
            values = torch.nn.functional.silu(values)
        G = layer.weights.shape[1]
        mean = torch.einsum("bgtj,bjgk->btgk", layer.weights, values.view(B, T, G, D // G)).flatten(2)
        if isinstance(mixer, PointwiseAttention):
            mean = mixer.norm(mean) * torch.nn.functional.silu(mixer.gate(x))
        innovation = mean if mixer.out is None else mixer.out(mean)
        real = batch.segment >= 0
        torch.testing.assert_close(innovation[real], call.output.innovation[real], rtol=1e-9, atol=1e-10)


def test_shares_and_kish_s_size_of_weights_of_both_signs(lab):
    model = lab.make_model(lab.dataset, "hstu")
    layer = traced(model, packed(lab.dataset, model))[1][0]
    weights = layer.weights
    assert (weights < 0).any() and (weights > 0).any()
    total = layer.shares.sum(dim=-1)
    torch.testing.assert_close(total[total > 0], torch.ones_like(total[total > 0]))
    assert torch.equal(layer.shares > 0, weights != 0)
    size = weights.sum(-1) ** 2 / weights.square().sum(-1).clamp(min=1e-300)
    torch.testing.assert_close(layer.effective_sample_size, size)


def test_softmax_shares_are_the_weights_and_the_size_is_between_one_and_the_keys(lab):
    model = lab.make_model(lab.dataset)
    batch = packed(lab.dataset, model)
    real = batch.segment >= 0
    for layer in traced(model, batch)[1]:
        torch.testing.assert_close(layer.shares, layer.weights)
        size = layer.effective_sample_size.mT[real]
        keys = (batch.position[real] + 1)[:, None]
        assert (size >= 1 - 1e-9).all() and (size <= keys + 1e-9).all()
        assert (layer.effective_sample_size.mT[~real] == 0).all()


def test_the_jacobian_is_autograd_s_at_every_token(lab):
    model = lab.make_model(lab.dataset)
    batch = packed(lab.dataset, model, slice(3))
    for layer in traced(model, batch)[1]:
        block, x = layer.block, layer._calls["norm_ffn"].output[0].detach()  # (T, D)

        def network(x, block=block):
            return block.outer(torch.nn.functional.gelu(block.inner(x)))

        expected = torch.stack([jacrev(network)(row).diagonal() for row in x])
        torch.testing.assert_close(layer.jacobian[0], expected, rtol=1e-6, atol=1e-8)


def test_the_jacobian_in_use_is_the_mode_s(lab):
    batch = packed(lab.dataset, lab.make_model(lab.dataset))
    layer = traced(lab.make_model(lab.dataset), batch)[1][0]
    assert torch.equal(layer.jacobian_used, layer.block.precision.mean_jacobian)
    exact = traced(lab.make_model(lab.dataset, core={"jacobian_in_evaluation": "exact"}), batch)[1][0]
    torch.testing.assert_close(exact.jacobian_used, exact.jacobian)
    for core in ({"propagation": "decay"}, {"jacobian_in_evaluation": "off"}):
        layer = traced(lab.make_model(lab.dataset, core=core), batch)[1][0]
        assert layer.jacobian is None and layer.jacobian_used is None


def test_a_model_without_layers_has_no_traces(lab):
    model = Popularity(lab.dataset.training_counts)
    model.append = None
    states, layers = traced(model, packed(lab.dataset, model))
    assert layers == [] and states.precision is None


def test_the_cap_is_met_but_for_rounding():
    values = torch.tensor([100.0, 100.0 - 1e-5, 99.9, 1.0])
    assert at_cap(values, 100.0).tolist() == [True, True, False, False]
