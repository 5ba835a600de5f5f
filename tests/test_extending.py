"""docs/extending.md: its example is a mixer that trains, and is short enough."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from recbft import Dataset, Recommender
from recbft.core import SequenceContext
from recbft.errors import UserError
from recbft.mixers import MIXERS, MixerSpec

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


def blocks():
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture
def registry():
    """The registry as it was, whatever a page adds to it."""
    before = dict(MIXERS)
    yield MIXERS
    MIXERS.clear()
    MIXERS.update(before)


@pytest.fixture
def mixer(registry):
    """The class of the page's example."""
    names: dict[str, Any] = {}
    exec(blocks()[0], names)
    return names["PooledMean"]


def test_the_example_of_a_mixer_takes_less_than_sixty_lines():
    assert 0 < len(blocks()[0].splitlines()) < 60


@pytest.fixture
def data():
    frame = pd.DataFrame({"user": [f"u{n // 5}" for n in range(60)], "item": [f"i{n * n % 7}" for n in range(60)]})
    return Dataset.from_frame(frame, user="user", item="item")


def test_the_example_trains_under_the_kalman_update_and_as_a_plain_layer(registry, data, capsys):
    mixer, use = blocks()
    names: dict[str, object] = {"data": data}
    exec(mixer, names)
    small = use.replace('Dataset.load("synthetic")', "data").replace("epochs=2", "epochs=1")
    assert "= data" in small and "epochs=1" in small
    exec(small, names)
    assert "ndcg@10" in capsys.readouterr().out
    exec(small.replace('arm="bft"', 'arm="matched"'), names)
    assert "pooled_mean" in registry


RETURNED = {
    "mixer Mine returns a Tensor; return Observation": lambda seen: seen.innovation,
    r"mixer Mine returns innovation of shape \(\d+, \d+, 1\); return one of shape \(\d+, \d+, 8\)": lambda seen: (
        seen._replace(innovation=seen.innovation[..., :1])
    ),
    r"mixer Mine returns precision of shape \(\d+, \d+\); return one": lambda seen: seen._replace(
        precision=seen.innovation[..., 0] ** 2
    ),
}


@pytest.mark.parametrize("arm", ["published", "matched", "bft"])
@pytest.mark.parametrize("message", RETURNED)
def test_a_mixer_that_returns_something_else_is_told_what_to_return(registry, mixer, data, arm, message):
    class Mine(mixer):
        def forward(self, x, precision, context, **more):
            return RETURNED[message](super().forward(x, precision, context, **more))

    registry["mine"] = replace(registry["pooled_mean"], kind=Mine)
    with pytest.raises(UserError, match=message):
        Recommender("sasrec", arm=arm, mixer="mine", epochs=1, hidden_size=8).fit(data)


def test_a_mixer_that_keeps_back_the_precision_it_has_promised_is_told_so(registry, mixer, data):
    class Mine(mixer):
        def forward(self, x, precision, context, **more):
            return super().forward(x, precision, context, **more)._replace(precision=None)

    registry["mine"] = replace(registry["pooled_mean"], kind=Mine)
    with pytest.raises(UserError, match="says that it gives a precision, and returned None in its place"):
        Recommender("sasrec", arm="bft", mixer="mine", epochs=1, hidden_size=8).fit(data)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"precision": "sofmax"}, "precision is 'sofmax'; did you mean 'softmax'"),
        ({"hears": "output_projection"}, r"hears is the text .*; give a tuple of names, such as \('output_projectio"),
        ({"hears": ("colour",)}, "hears is 'colour'; choose one of dropout"),
        ({}, "kind is Identity; derive it from recbft.mixers.Mixer"),
    ],
)
def test_what_a_mixers_entry_cannot_say_is_refused_where_it_is_made(wrong, message):
    with pytest.raises(UserError, match=message):
        MixerSpec(summary="", kind=torch.nn.Identity, **wrong)


def test_hstu_keeps_its_layer_whatever_is_registered(registry):
    registry["mine"] = replace(registry["pointwise"], summary="of one's own")
    assert isinstance(Recommender("hstu").config.build(torch.arange(9)), torch.nn.Module)
    with pytest.raises(UserError, match="mixer 'mine' does not go with model 'hstu'; choose one of pointwise"):
        Recommender("hstu", mixer="mine")


def test_a_run_whose_mixer_is_not_known_says_what_to_do(registry, mixer, data, tmp_path):
    Recommender("sasrec", arm="bft", mixer="pooled_mean", epochs=1, hidden_size=8).fit(data, out=tmp_path / "run")
    lists = Recommender.load(tmp_path / "run").recommend({"u": ["i1"]}, k=2)
    assert len(lists) == 2
    del registry["pooled_mean"]
    said = r"run/config\.yaml has mixer 'pooled_mean', which this program does not know; if it is one of your own, run"
    with pytest.raises(UserError, match=said):
        Recommender.load(tmp_path / "run")
    with pytest.raises(UserError, match=said):
        Recommender.resume(tmp_path / "run", data)


def test_the_example_keeps_the_contract(mixer):
    torch.manual_seed(0)
    mixer = mixer(4, 2).double()
    segment, position = torch.tensor([[0, 0, 0, 1, 1, -1]]), torch.tensor([[0, 1, 2, 0, 1, 0]])
    context = SequenceContext(segment, position)
    x, precision = torch.randn(1, 6, 4).double(), torch.rand(1, 6, 4).double() + 0.1
    innovation, found = mixer(x, precision, context)
    changed = x.clone()
    changed[0, 2] += 9.0
    other, _ = mixer(changed, precision, context)
    assert torch.equal(other[0, [0, 1, 3, 4]], innovation[0, [0, 1, 3, 4]]) and not torch.equal(other, innovation)
    torch.testing.assert_close(found[0, 2], precision[0, :3].sum(dim=0))
