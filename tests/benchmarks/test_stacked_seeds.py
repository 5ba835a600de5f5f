from __future__ import annotations

import json

import pytest

from benchmarks import stacked_seeds
from benchmarks.stacked_seeds import main
from recbft.errors import RunError


def test_the_table_and_the_json_hold_every_arm(small, tmp_path, capsys):
    file = tmp_path / "stacked.json"
    assert main([*small, "--seeds", "2", "--rounds", "2", "--json", str(file)]) == 0
    out, result = capsys.readouterr().out, json.loads(file.read_text())
    assert list(result["seconds"]) == ["matched", "bft"] and result["seeds"] == 2
    for label, ways in result["seconds"].items():
        assert f"\n{label} " in out
        assert all(len(times) == 2 and min(times) > 0 for times in ways.values())


def test_no_time_is_taken_of_other_gradients(small, monkeypatch):
    monkeypatch.setattr(stacked_seeds, "TOLERANCE", -1.0)
    with pytest.raises(RunError, match=r"the stacked gradient of .* is off by"):
        main([*small, "--seeds", "2"])
