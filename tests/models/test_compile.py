"""Models under ``torch.compile``: the numbers of the model as it is, without compiling anew for every batch."""

from __future__ import annotations

import copy
import logging
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from recbft.autograd.boundaries import eagerly
from recbft.datasets.batches import pack_histories
from recbft.kernels.cross_entropy import full_cross_entropy
from recbft.training.run_config import load_run_config

V, D, T = 20, 8, 6
HISTORIES = (14, 20, 11, 25)  # of each batch, so that none has the shape of another


@pytest.fixture
def compiled(monkeypatch):
    """What compiles a function, and counts its graphs as ``compiled.graphs``."""
    dynamo = pytest.importorskip("torch._dynamo")
    if not dynamo.is_dynamo_supported():
        pytest.skip("this PyTorch compiles nothing on this Python")
    dynamo.reset()
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # else pytest keeps every line of it

    def compile_(function, backend="aot_eager"):
        chosen = dynamo.lookup_backend(backend)

        def counting(graph, inputs):
            compile_.graphs += 1
            return chosen(graph, inputs)

        return torch.compile(function, backend=counting)

    compile_.graphs = 0
    yield compile_
    dynamo.reset()


def build(model="sasrec", arm="bft", **settings):
    settings = {"hidden_size": D, "max_length": T, "n_layers": 1, "dropout": 0.1, **settings}
    made = load_run_config(model=model, arm=arm, **settings).build(torch.tensor([0, *range(V)]))
    made.set_ramp(1.0)
    made.refresh()
    return made


def batch(histories, *, targets=True, append=None):
    rng = np.random.default_rng(histories)
    lengths = rng.integers(2, T, histories)
    stop = np.cumsum(lengths + 1) - 1
    items = rng.integers(1, V + 1, stop[-1] + 1)
    return pack_histories(items, stop - lengths, stop - targets, with_targets=targets, append=append)


def step(model, own):
    """The loss of a batch and all gradients, with the same draws each time."""
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    loss = model.loss(own)
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def assert_same(found, expected):
    """To rounding: a gradient that is 0 but for it has that of the largest."""
    largest = max(float(x.abs().max()) for x in expected[1].values())
    for one, two in zip(found[1].items(), expected[1].items(), strict=True):
        assert one[0] == two[0]
        torch.testing.assert_close(
            one[1], two[1], rtol=1e-4, atol=1e-5 * largest, msg=lambda m, name=one[0]: f"{name}: {m}"
        )
    torch.testing.assert_close(found[0], expected[0])


def assert_settled(graphs):
    """For one shape, then for all, which what is taken of every fourth row may learn a batch later."""
    assert 0 < graphs[0] < graphs[2] <= graphs[-1]
    assert graphs[2] == graphs[-1] or torch.__version__ < "2.7"  # which needs one more batch


# One layer, and one whole compilation: what the others add is traced as much without what follows it.
@pytest.mark.slow
def test_a_compiled_loss_is_the_loss_whatever_the_shapes(compiled):
    plain = build()
    model = copy.deepcopy(plain)
    model.loss = compiled(model.loss)
    graphs = []
    for histories in HISTORIES:
        assert_same(step(model, batch(histories)), step(plain, batch(histories)))
        graphs.append(compiled.graphs)
    assert_settled(graphs)
    for one, two in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"model": "hstu"}, {"mixer": "rfa"}, {"mixer": "regime"}], ids=str)
def test_models_of_other_kinds_compile_too(settings, compiled):
    plain = build(**settings)
    model = copy.deepcopy(plain)
    model.loss = compiled(model.loss, "eager")
    assert_same(step(model, batch(14)), step(plain, batch(14)))


@pytest.mark.slow
def test_compiled_states_are_the_states_whatever_the_shapes(compiled):
    model = build("bert4rec").eval()
    states = compiled(model.user_states, "eager")
    graphs = []
    for histories in HISTORIES:
        own = batch(histories, targets=False, append=model.append)
        with torch.inference_mode():
            for found, expected in zip(states(own), model.user_states(own), strict=True):
                torch.testing.assert_close(found, expected)
        graphs.append(compiled.graphs)
    assert_settled(graphs)


def test_what_is_written_by_hand_runs_between_the_graphs(compiled):
    seen = []

    @eagerly
    def by_hand(x, *, factor):
        seen.append(x.data_ptr())  # which a tensor that is traced does not have
        return x * factor

    def function(x):
        return by_hand(x.sin(), factor=2.0).cos()

    x = torch.linspace(0, 1, 5)
    torch.testing.assert_close(compiled(function)(x), function(x))
    assert (compiled.graphs, len(seen)) == (2, 2) and by_hand.__name__ == "by_hand"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_default_compiler_takes_a_loss(compiled):
    """Which once refused the product of the cross-entropy, where that is oneDNN's."""

    def loss(states, weight, target):
        return full_cross_entropy(2 * states, weight, target)

    g = torch.Generator().manual_seed(0)
    target = torch.arange(30) % V
    states, weight = (torch.randn(n, D, generator=g).requires_grad_() for n in (30, V))
    run = compiled(loss, backend="inductor")
    expected = torch.autograd.grad(loss(states, weight, target), (states, weight))
    for found, two in zip(torch.autograd.grad(run(states, weight, target), (states, weight)), expected, strict=True):
        torch.testing.assert_close(found, two)


def test_the_compiler_is_not_loaded_where_nothing_is_compiled():
    """It takes seconds, as long as all the rest."""
    code = (
        "import sys, torch; from recbft.kernels.cross_entropy import full_cross_entropy as loss; x = torch.ones(3, 2);"
        "loss(x, x, torch.arange(3)); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
