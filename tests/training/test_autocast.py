"""`training.autocast: bf16`: every model learns nearly the same from a batch, and what estimates is left out of it."""

from __future__ import annotations

import copy

import pandas as pd
import pytest
import torch

from recbft.autograd.boundaries import autocast_device, in_full_precision
from recbft.core import SequenceContext, projected_precision
from recbft.mixers import MIXERS
from recbft.mixers.registry import Place
from recbft.models import MODELS
from recbft.training import build, one_run
from recbft.training.process_settings import autocast
from recbft.training.run_config import load_run_config

MADE = [
    (model, arm, mixer)
    for model, spec in MODELS.items()
    if spec.trainable
    for arm in ("matched", "bft")
    for mixer in (spec.mixers or (None,))
]
SMALL = {"hidden_size": 16, "max_length": 8, "dropout": 0.0, "batch_size": 16, "device": "cpu"}


def learned(model, batch, precision):
    """The loss of a batch and its whole gradient, from a copy of the model."""
    model = copy.deepcopy(model).train()
    model.set_ramp(1.0)
    model.refresh()
    torch.manual_seed(0)
    with autocast(precision, torch.device("cpu")):
        loss = model.loss(batch)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def settings_for(arm, mixer):
    """A mixer without a precision of its own needs another update."""
    if mixer is None:
        return {}
    own = {"core": {"update": "residual"}} if arm == "bft" and MIXERS[mixer].precision == "none" else {}
    return {"mixer": mixer, **own}


@pytest.mark.parametrize(("model", "arm", "mixer"), MADE, ids=lambda value: str(value))
def test_a_step_in_half_precision_is_nearly_the_step(model, arm, mixer, dataset):
    config = load_run_config(model=model, arm=arm, **SMALL, **settings_for(arm, mixer))
    made = build.build_model(config, dataset)
    batch = next(iter(build.training_batches(config, dataset).epoch(0)))
    (loss, gradient), (half, near) = learned(made, batch, None), learned(made, batch, "bf16")
    assert half.dtype == torch.float32 and near.dtype == torch.float32
    assert float(half) == pytest.approx(float(loss), rel=1e-3)
    assert float((near - gradient).norm() / gradient.norm()) < 0.05


def test_what_runs_in_full_precision_gets_float32_and_knows_no_autocast():
    seen = []

    @in_full_precision
    def product(x, y, *, z):
        seen.append((autocast_device(), x.dtype, z.dtype))
        return x @ y

    x = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
    with autocast("bf16", torch.device("cpu")):
        made = product(x, torch.ones(2, 2), z=torch.ones(1))
        assert autocast_device() == "cpu"
    made.sum().backward()
    assert seen == [(None, torch.float32, torch.float32)] and made.dtype == torch.float32
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert product(x.detach(), x.detach(), z=torch.ones(1)).dtype == torch.bfloat16  # outside, nothing is touched


def test_precision_is_carried_through_an_output_map_in_full():
    precision, weight = torch.rand(5, 8) + 0.1, torch.randn(8, 8)
    with autocast("bf16", torch.device("cpu")):
        found = projected_precision(precision, weight)
    assert torch.equal(projected_precision(precision, weight), found)


def test_a_run_trains_in_it_and_is_nearly_the_run(dataset, tmp_path):
    half, whole = (
        pd.read_csv(one_run.train(config, tmp_path / str(config.training.autocast), dataset=dataset).history_file)[
            "loss"
        ]
        for config in (
            load_run_config(model="sasrec", arm="bft", **SMALL, epochs=2, autocast=autocast)
            for autocast in ("bf16", None)
        )
    )
    assert not half.equals(whole)
    assert half.tolist() == pytest.approx(whole.tolist(), rel=1e-2)


@pytest.mark.parametrize("name", [name for name in MIXERS if name != "pointwise"])
def test_a_mixer_needs_no_rule_of_autocast_that_only_a_cpu_has(name, monkeypatch):
    """On a CPU, and there alone, autocast widens what becomes complex."""

    def plain(function):
        def without_autocast(*arguments):
            with torch.autocast("cpu", enabled=False):
                return function(*arguments)

        return without_autocast

    for function in ("view_as_complex", "polar"):
        monkeypatch.setattr(torch, function, plain(getattr(torch, function)))
    places = torch.arange(6)[None]
    mixer = MIXERS[name].make(Place(hidden_size=8, n_heads=2, length=8))
    with autocast("bf16", torch.device("cpu")):
        innovation = mixer(torch.randn(1, 6, 8), None, SequenceContext(places * 0, places, places * 1000)).innovation
    innovation.float().sum().backward()
    assert innovation.isfinite().all()
