from __future__ import annotations

import json

import pytest

from benchmarks import many_seeds
from benchmarks.many_seeds import main
from recbft.errors import RunError


def test_the_table_and_the_json_hold_every_arm(small, tmp_path, capsys):
    file = tmp_path / "seeds.json"
    options = ["--seeds", "3", "--epochs", "1", "--repeats", "2", "--threads", "1", "--json", str(file)]
    assert main([*small, *options]) == 0
    out = capsys.readouterr().out
    result = json.loads(file.read_text())
    assert list(result["arms"]) == ["matched", "bft"] and result["seeds"] == 3
    for label, arm in result["arms"].items():
        assert f"\n{label} " in out
        assert result["equality"][label] <= many_seeds.TOLERANCE
        for kind in many_seeds.KINDS:
            times = arm["times"][kind]
            assert all(len(values) == 2 and min(values) > 0 for values in times.values())
            assert max(times["training"]) < max(times["whole"])
        for ratio in arm["ratio"].values():
            assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]


def test_no_time_is_printed_where_seeds_do_not_agree(small, capsys, monkeypatch):
    monkeypatch.setattr(many_seeds, "TOLERANCE", -1.0)
    with pytest.raises(RunError, match=r"differs by .* between seeds trained together and alone .* no time is taken"):
        main([*small, "--seeds", "2", "--threads", "1"])
    assert capsys.readouterr().out == ""
