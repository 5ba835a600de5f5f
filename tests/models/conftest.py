"""Models and histories to try them on, as the fixture ``lab``."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recbft.config.fields import field_types
from recbft.datasets.batches import pack_histories
from recbft.models import MODELS, CoreConfig
from recbft.models.feed_forward import FuzzyMoEConfig

V, D, T = 12, 8, 10


def counts_of(num_items=V):
    return torch.tensor([0, *range(num_items)])  # the first item is never seen in training


def build(
    arm="bft", model="sasrec", *, seed=0, counts=None, core=None, mixer=None, mixing=None, content=None, **backbone
):
    """A model with dropout 0 unless asked for; settings of experts are known by their names.

    ``content`` is the vectors of items, or how wide they are to be.
    """
    spec = MODELS[model]
    settings = {"hidden_size": D, "max_length": T, "dropout": 0.0, **spec.arms[arm], **backbone}
    moe = FuzzyMoEConfig(**{key: settings.pop(key) for key in field_types(FuzzyMoEConfig) if key in settings})
    chosen = CoreConfig(**{**spec.core, **(core or {})}) if arm in spec.precision_arms else None
    counts = counts_of() if counts is None else counts
    if isinstance(content, int):
        content = torch.randn(len(counts), content, generator=torch.Generator().manual_seed(7))
        content = content / content.norm(dim=1, keepdim=True) * (torch.arange(len(counts)) > 0)[:, None]
    made = {"seed": seed, "mixer": mixer, "mixing": mixing, "moe": moe, "content": content}
    return spec.make(spec.config(**settings), chosen, counts, **made)


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
        model.train().encode(packed([[1, 2, 3], [4, 5]], model))  # the running means have seen something
    return model


def packed(histories, model=None, *, with_targets=False):
    """A batch with the times of events, which follow from a history's own items, and what the model appends."""
    lengths = np.array([len(history) for history in histories])
    items = np.array([item for history in histories for item in [*history, 1]], dtype=np.int64)
    times = np.concatenate([np.cumsum([100 + 37 * item**2 for item in [*history, 1]]) for history in histories])
    stop = np.cumsum(lengths + 1) - 1
    shown = model is not None and model.shows_target_time
    append = None if model is None or with_targets else model.append
    return pack_histories(
        items,
        stop - lengths,
        stop - with_targets,
        times=times,
        with_next_times=shown,
        with_targets=with_targets,
        append=append,
    )


def training_batch(model, histories):
    """What the model is trained on, of these histories in one batch."""
    (spec,) = (spec for spec in MODELS.values() if spec.config is type(model.config))
    items = np.array([item for history in histories for item in history], dtype=np.int64)
    stop = np.cumsum([len(history) for history in histories])
    start = stop - [len(history) for history in histories]
    times = np.cumsum(1000 * items)
    (batch,) = spec.batches(
        model.config, items, start, stop, num_items=model.num_items, batch_size=99, seed=0, times=times
    ).epoch(0)  # fmt: skip
    return batch


def beliefs(model, histories, *, training=False, remember=False, append=True):
    """Scores (length, V) and precision (length, D) at every token of each history, from one packed batch.

    The model is copied, since a pass in training moves its running means, which the next pass may use; ``remember``
    keeps what the pass moves.
    """
    model = model if remember else copy.deepcopy(model)
    model.train(training)
    batch = packed(histories, model if append else None)
    with torch.no_grad():
        belief = model.encode(batch)
        every = torch.arange(batch.items.numel())
        states = model.with_content(belief.mean.flatten(0, 1), batch, every).view(*batch.items.shape, -1)
        scores = states @ model.item_table().weight[1:].T
    found = []
    for number in range(len(histories)):
        own = batch.segment == number
        order = batch.position[own].argsort()
        found.append((scores[own][order], belief.precision[own][order]))
    return found


def draw_histories(seed, count=6, *, shortest=1):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, V + 1, rng.integers(shortest, T)).tolist() for _ in range(count)]


def assert_same(one, two):
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.fixture(scope="session")
def lab():
    """The functions above, for the tests of this folder."""
    return SimpleNamespace(
        V=V, D=D, T=T, build=build, shaken=shaken, packed=packed, training_batch=training_batch,
        beliefs=beliefs, draw_histories=draw_histories, counts_of=counts_of, assert_same=assert_same,
    )  # fmt: skip
