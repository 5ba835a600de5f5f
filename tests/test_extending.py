"""docs/extending.md: its example is a mixer that trains, and is short enough."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recbft.mixers import MIXERS

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


def test_the_example_of_a_mixer_takes_less_than_sixty_lines():
    assert 0 < len(blocks()[0].splitlines()) < 60


def test_the_example_trains_under_the_kalman_update_and_as_a_plain_layer(registry, capsys):
    mixer, use = blocks()
    names: dict[str, object] = {}
    exec(mixer, names)
    exec(use.replace("epochs=2", "epochs=1"), names)
    assert "ndcg@10" in capsys.readouterr().out
    exec(use.replace("epochs=2", "epochs=1").replace('arm="bft"', 'arm="matched"'), names)
    assert "pooled_mean" in registry


def test_the_example_keeps_the_contract(registry):
    import torch

    from recbft.core import SequenceContext

    names: dict[str, object] = {}
    exec(blocks()[0], names)
    torch.manual_seed(0)
    mixer = names["PooledMean"](4, 2).double()  # type: ignore[operator]
    segment, position = torch.tensor([[0, 0, 0, 1, 1, -1]]), torch.tensor([[0, 1, 2, 0, 1, 0]])
    context = SequenceContext(segment, position)
    x, precision = torch.randn(1, 6, 4).double(), torch.rand(1, 6, 4).double() + 0.1
    innovation, found = mixer(x, precision, context)
    changed = x.clone()
    changed[0, 2] += 9.0
    other, _ = mixer(changed, precision, context)
    assert torch.equal(other[0, [0, 1, 3, 4]], innovation[0, [0, 1, 3, 4]]) and not torch.equal(other, innovation)
    torch.testing.assert_close(found[0, 2], precision[0, :3].sum(dim=0))
