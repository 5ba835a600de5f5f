"""A stack of models on a device that knows shapes and has no numbers to read: PyTorch's meta device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recbft.datasets.batches import TrainingBatches
from recbft.datasets.side_by_side import lay_side_by_side
from recbft.models.seed_parts import SeedRows
from recbft.models.stacked import Stacked
from recbft.training.optimiser import make_optimizer
from recbft.training.run_config import TrainingConfig, load_run_config

NUM_ITEMS, SEEDS = 30, 3


class Asked(TorchDispatchMode):
    """What is asked of a device, in order; ``copy`` for what comes there from the host, random bits left out.

    On a GPU those are drawn there, by generators of its own.
    """

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, given=(), named=None):
        named = named or {}
        name = function._schema.name
        comes = name == "aten::_to_copy" and str(named.get("device")) == "meta" and given[0].is_cpu
        self.found.append("copy" if comes and given[0].dtype != torch.int16 else name)
        return function(*given, **named)


def batches():
    rng = np.random.default_rng(0)
    stop = np.cumsum(rng.integers(3, 9, 12))
    items = rng.integers(1, NUM_ITEMS + 1, int(stop[-1]))
    start = np.concatenate([[0], stop[:-1]])
    each = [TrainingBatches(items, start, stop - 1, max_length=8, batch_size=5, seed=seed) for seed in range(SEEDS)]
    return [next(iter(one.epoch(0))) for one in each]


@pytest.mark.parametrize(
    "settings",
    [
        {"arm": "matched", "recency_decay": True},
        {"arm": "bft"},
        {"arm": "bft", "jacobian": "running_mean", "estimator": "sandwich"},
        {"arm": "bft", "jacobian_detach": True, "prior_scale": "per_layer"},
        {"arm": "bft", "propagation": "decay", "initial": "uniform"},
        {"arm": "bft", "prior_variance": "running", "read_out": "temperature"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_a_step_reads_nothing_back_from_its_device_and_copies_there_before_it_is_at_work(settings):
    counts = torch.arange(NUM_ITEMS + 1)
    configs = [load_run_config(model="sasrec", hidden_size=8, max_length=8, seed=n, **settings) for n in range(SEEDS)]
    models = [config.build(counts).to("meta").train() for config in configs]
    for model in models:
        model.ramp = torch.ones(())  # read once at the beginning of a step
    stack = Stacked(models, [torch.Generator().manual_seed(seed) for seed in range(SEEDS)])
    optimizer = make_optimizer(stack, TrainingConfig())
    stack.refresh()
    for _ in range(2):  # in the first it is found what is wanted there
        with Asked() as asked:
            losses = stack.losses(lay_side_by_side(batches()))
            losses.sum().backward()
    assert "copy" in asked.found and "copy" not in asked.found[asked.found.index("aten::embedding") :]
    assert losses.shape == (SEEDS,) and losses.device.type == "meta"
    for name, parameter in stack.named_parameters():
        assert parameter.device.type == "meta", name
        assert parameter.grad is None or parameter.grad.device.type == "meta", name
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(stack.parameters)


def test_every_seed_has_the_loss_it_has_alone_with_its_own_item_biases():
    settings = {"model": "bert4rec", "arm": "matched", "head": "gelu", "hidden_size": 8, "dropout": 0.0}
    models = [load_run_config(seed=n, **settings).build(torch.arange(NUM_ITEMS + 1)) for n in range(2)]
    with torch.no_grad():
        for model in models:
            model.item_bias.normal_()
    own = batches()[:2]
    expected = torch.stack([model.loss(batch) for model, batch in zip(models, own, strict=True)])
    stack = Stacked(models, [torch.Generator()] * 2)
    torch.testing.assert_close(stack.losses(lay_side_by_side(own)), expected)


@pytest.mark.parametrize("width", [1, 6, 8])
def test_random_bits_are_the_same_drawn_together_or_one_by_one(width):
    side = lay_side_by_side(batches())
    found = []
    for together in (False, True):
        rows = SeedRows([torch.Generator().manual_seed(seed) for seed in range(SEEDS)])
        rows.begin(side, torch.device("cpu"))
        rows.place = side.place if together else None
        found.append([rows.random_bits(width), rows.random_bits(width)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert not torch.equal(*found[0])
