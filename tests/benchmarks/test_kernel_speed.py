"""The command that times the CPU paths: what takes turns, and what its table holds."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import kernel_speed
from benchmarks.mixer_speed import Shape
from recbft.errors import UserError


def outputs_of(way):
    found = way.run()
    return [found] if isinstance(found, torch.Tensor) else list(found)


def test_all_ways_of_a_part_compute_the_same():
    (ways,) = kernel_speed.attention([Shape(2, 2, 5, 4)]).values()
    plain, mean, moments, by_pytorch, eager = (outputs_of(way) for way in ways.values())
    torch.testing.assert_close(mean[0], plain[0])
    torch.testing.assert_close(moments, eager)
    torch.testing.assert_close(by_pytorch, eager)
    (losses,) = kernel_speed.vocabulary([(20, 50, 8)]).values()
    plain, *others = (outputs_of(way)[0] for way in losses.values())
    assert len(others) == 1 + hasattr(torch.nn.functional, "linear_cross_entropy")
    for other in others:
        torch.testing.assert_close(other, plain)


def test_the_bayesian_layer_in_chunks_computes_what_its_loop_does(monkeypatch):
    monkeypatch.setattr(kernel_speed, "MEMORY", {7: (2, 1, 7, 4)})
    ((shape, ways),) = kernel_speed.memory([7]).items()
    assert shape == "2x1x7x4"
    loop, chunks = (outputs_of(way) for way in ways.values())
    torch.testing.assert_close(chunks, loop, rtol=1e-4, atol=1e-5)


def test_the_command_prints_ratios_to_the_first_way(tmp_path, capsys):
    file = tmp_path / "speed.json"
    named = ["--parts", "attention", "--shapes", "2x2x5x4,1x1x3x4", "--rounds", "2", "--json", str(file)]
    assert kernel_speed.main(named) == 0
    rows = json.loads(file.read_text())["kernel_speed"]
    assert [row["shape"] for row in rows] == ["2x2x5x4"] * 5 + ["1x1x3x4"] * 5
    assert all(rows[first][f"{part}_x"] == 1.0 for first in (0, 5) for part in ("forward", "both"))
    assert "recbft moments" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["--parts", "atention"], "unknown part 'atention'; did you mean 'attention'"),
        (["--parts", "attention", "--shapes", "3x4"], "shape '3x4' is not BxHxTxK"),
        (["--json", "nowhere/a.json"], "folder nowhere does not exist"),
    ],
)
def test_what_cannot_be_timed_is_named(named, message):
    with pytest.raises(UserError, match=message):
        kernel_speed.main(named)
