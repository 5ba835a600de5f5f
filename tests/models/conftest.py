"""SASRec models and histories to try them on, as the fixtures ``lab`` and ``variant``."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recbft.datasets.batches import pack_histories
from recbft.models import MODELS, CoreConfig

V, D, T = 12, 8, 10

# name: arm, backbone settings, core settings
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "published": ("published", {}, {}),
    "matched": ("matched", {}, {}),
    "matched with recency": ("matched", {"recency_decay": True}, {}),
    "matched with output": ("matched", {"output_projection": True}, {}),
    "bft": ("bft", {}, {}),
    "bft exact": ("bft", {}, {"jacobian": "exact", "jacobian_in_evaluation": "exact"}),
    "bft low rank in evaluation": ("bft", {}, {"jacobian_in_evaluation": "low_rank", "jacobian_rank": 3}),
    "bft running mean": ("bft", {}, {"jacobian": "running_mean"}),
    "bft detached": ("bft", {}, {"jacobian": "exact", "jacobian_detach": True}),
    "bft without jacobian": ("bft", {}, {"jacobian": "off", "jacobian_in_evaluation": "off"}),
    "bft naive": ("bft", {}, {"estimator": "reml_naive"}),
    "bft hybrid": ("bft", {}, {"initial": "hybrid"}),
    "bft table": ("bft", {}, {"initial": "table"}),
    "bft credibility": ("bft", {}, {"initial": "credibility"}),
    "bft uniform": ("bft", {}, {"initial": "uniform"}),
    "bft per layer": ("bft", {}, {"prior_scale": "per_layer"}),
    "bft without recency": ("bft", {"recency_decay": False}, {}),
    "bft with output": ("bft", {"output_projection": True}, {}),
    "bft without noise": ("bft", {}, {"process_noise": False}),
    "bft sandwich": ("bft", {}, {"estimator": "sandwich"}),
    "bft delta": ("bft", {}, {"estimator": "delta"}),
    "bft design effect": ("bft", {}, {"estimator": "design_effect"}),
    "bft per dimension": ("bft", {}, {"kriging": "per_dimension"}),
    "bft discount": ("bft", {}, {"propagation": "discount"}),
    "bft decay": ("bft", {}, {"propagation": "decay"}),
    "bft residual": ("bft", {}, {"update": "residual"}),
    "bft fixed": ("bft", {}, {"update": "fixed", "fixed_gain": 0.6}),
    "bft gate": ("bft", {}, {"update": "gate"}),
    "bft empirical bayes": ("bft", {}, {"initial": "empirical_bayes"}),
    "bft three layers": ("bft", {"n_layers": 3, "n_heads": 1}, {"lam_max": 10.0}),
}


def counts_of(num_items=V):
    return torch.tensor([0, *range(num_items)])  # the first item is never seen in training


def build(variant="bft", *, seed=0, counts=None, core=None, **backbone):
    """A model with dropout 0 unless asked for."""
    arm, settings, core_settings = VARIANTS[variant]
    spec = MODELS["sasrec"]
    settings = {"hidden_size": D, "max_length": T, "dropout": 0.0, **spec.arms[arm], **settings, **backbone}
    chosen = CoreConfig(**{**core_settings, **(core or {})}) if arm in spec.precision_arms else None
    return spec.build(spec.config(**settings), chosen, counts_of() if counts is None else counts, seed=seed)


def shaken(model, seed=0):
    """The model in float64 with weights far from their start, warmed up: nothing in it is idle."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.3)
            if name.endswith("noise_logits"):
                parameter.add_(8.0)
    model.set_ramp(1.0)
    model.refresh()
    with torch.no_grad():
        model.train().encode(packed([[1, 2, 3], [4, 5]]))  # the running means have seen something
    return model


def packed(histories, *, with_targets=False):
    lengths = np.array([len(history) for history in histories])
    items = np.array([item for history in histories for item in history], dtype=np.int64)
    stop = np.cumsum(lengths)
    return pack_histories(items, stop - lengths, stop - with_targets, with_targets=with_targets)


def beliefs(model, histories, *, training=False, remember=False):
    """Scores (length, V) and precision (length, D) at every event of each history, from one packed batch.

    The model is copied, since a pass in training moves its running means, which the next pass may use; ``remember``
    keeps what the pass moves.
    """
    model = model if remember else copy.deepcopy(model)
    model.train(training)
    batch = packed(histories)
    with torch.no_grad():
        belief = model.encode(batch)
        scores = belief.mean @ model.item_table().weight[1:].T
    found = []
    for number in range(len(histories)):
        own = batch.segment == number
        order = batch.position[own].argsort()
        found.append((scores[own][order], belief.precision[own][order]))
    return found


def draw_histories(seed, count=6, *, shortest=1):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, V + 1, rng.integers(shortest, T + 1)).tolist() for _ in range(count)]


def assert_same(one, two):
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def watched(model, batch, *, layer=0):
    """Incoming precision, observation precision and gain of a layer's update at every token."""
    seen = []
    hook = model.blocks[layer].mixer.register_forward_hook(
        lambda module, args, output: seen.append((args[1], output.precision))
    )
    with torch.no_grad():
        model.encode(batch)
    hook.remove()
    ((lam, observed),) = seen
    return lam, observed, observed / (lam + observed)


@pytest.fixture(scope="session")
def lab():
    """The functions above, for the tests of this folder."""
    return SimpleNamespace(
        V=V, D=D, T=T, VARIANTS=VARIANTS, build=build, shaken=shaken, packed=packed, beliefs=beliefs, watched=watched,
        draw_histories=draw_histories, counts_of=counts_of, assert_same=assert_same,
    )  # fmt: skip


@pytest.fixture(params=list(VARIANTS))
def variant(request):
    """Every arm and every variant of the precision channel in turn."""
    return request.param
