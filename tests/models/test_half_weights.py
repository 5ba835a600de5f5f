"""Weights in half precision: every model gives nearly its states; one that tracks precision is not trained so."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from recbft.errors import UserError
from recbft.mixers import MIXERS
from recbft.mixers.memory_maps import Transition
from recbft.models import MODELS
from recbft.models.contract import read_histories
from recbft.training.run_config import load_run_config

HALVES = (torch.bfloat16, torch.float16)
SMALL = {"hidden_size": 16, "n_heads": 2, "max_length": 10}
OPTIONS = {
    "rfa": ({}, {"time": True, "learn_time_unit": True}, {"confidence_gate": True}),
    "bayesian": ({}, {"transition": "complex_pairs"}),
}
MADE = [
    (model, arm, mixer, options)
    for model, spec in MODELS.items()
    if spec.trainable
    for arm in spec.arms
    for mixer in (spec.mixers[:1] if arm == "published" else spec.mixers)
    for options in OPTIONS.get(mixer, ({},))
]


def made(model, arm, mixer, options, **core):
    own = {"mixer": mixer, "mixing": options} if len(MODELS[model].mixers) > 1 else {}
    if arm == "bft":
        own["core"] = core | ({"update": "residual"} if MIXERS[mixer].precision == "none" else {})
    built = load_run_config(model=model, arm=arm, **SMALL, **own).build(torch.arange(31))
    built.set_ramp(1.0)
    return built


def batch_of(model):
    rng = np.random.default_rng(0)
    items, times = rng.integers(1, 31, 25), np.arange(25) * 20_000
    start, stop = np.array([0, 5, 6, 15]), np.array([5, 6, 15, 25])
    return next(read_histories(model, items, start, stop, times=times, source="the test"))


def check_halved(plain, dtype):
    halved = copy.deepcopy(plain).to(dtype).eval()
    halved.refresh()
    with torch.no_grad():
        expected, found = (one.user_states(batch_of(one)) for one in (plain.eval(), halved))
    assert found.state.dtype == dtype
    torch.testing.assert_close(found.state.float(), expected.state, rtol=0.05, atol=0.06)
    if expected.precision is not None:
        torch.testing.assert_close(found.precision.float(), expected.precision, rtol=0.06, atol=0)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("model", "arm", "mixer", "options"), MADE, ids=str)
def test_states_in_half_precision_are_nearly_the_states(model, arm, mixer, options, dtype):
    check_halved(made(model, arm, mixer, options), dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "core",
    [
        {"estimator": "sandwich"},
        {"estimator": "delta"},
        {"kriging": "per_dimension"},
        {"jacobian_in_evaluation": "low_rank"},
        {"jacobian_in_evaluation": "exact"},
        {"read_out": "shrinkage"},
    ],
    ids=str,
)
def test_so_are_those_of_other_estimators_and_jacobians(core, dtype):
    check_halved(made("sasrec", "bft", "attention", {}, **core), dtype)


@pytest.mark.parametrize("mixer", ["rope", "sc_rope", "rfa", "sc_rfa"])
def test_frequencies_are_not_rounded_with_the_weights(mixer):
    plain = made("sasrec", "matched", mixer, {})
    for dtype in HALVES:
        for block, halved in zip(plain.blocks, copy.deepcopy(plain).to(dtype).blocks, strict=True):
            assert torch.equal(halved.mixer.sde.frequency, block.mixer.sde.frequency)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_no_head_of_retnet_keeps_everything_because_its_share_is_rounded(dtype):
    retention = Transition(16, 8, "retention", start=0.5)
    assert torch.equal(retention(torch.zeros(1, 2, 16, dtype=dtype)), retention(torch.zeros(1, 2, 16)))


@pytest.mark.parametrize("mixer", ["attention", "rope", *OPTIONS])
def test_a_plain_step_in_bfloat16_gives_every_parameter_a_finite_gradient(mixer):
    for options in OPTIONS.get(mixer, ({},)):
        model = made("sasrec", "matched", mixer, options).bfloat16().train()
        model.encode(batch_of(model)).mean.square().sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])
def test_with_precision_training_in_half_precision_is_refused_with_what_to_set(model, dtype):
    tracked = made(model, "bft", MODELS[model].mixers[0], {}).to(dtype).train()
    batch = batch_of(tracked)
    with pytest.raises(UserError, match=rf"got {dtype}; .* set training\.autocast: bf16, or call .* torch\.autocast"):
        tracked.loss(batch._replace(target=batch.items))
