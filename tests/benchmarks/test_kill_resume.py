from __future__ import annotations

import json

import pytest

from benchmarks.kill_resume import differences, main
from recbft.training.one_run import train
from recbft.training.run_config import load_run_config


def test_equal_runs_do_not_differ_and_another_seed_is_noticed_everywhere(events, small, tmp_path):
    settings = [word for word in small[2:] if word != "--set"]
    runs = [
        train(load_run_config(None, settings, dataset=str(events), seed=seed), tmp_path / name)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert differences(runs[0], runs[1]) == []
    found = differences(runs[0], runs[2])
    for part in ("weights item_embedding.weight", "best weights item_embedding.weight", "random state cpu"):
        assert part in found
    assert any(name.startswith("optimiser") for name in found)
    assert {"checkpoint state", "history.csv", "per_user.parquet", "metrics.json"} <= set(found)


@pytest.mark.slow
def test_training_killed_at_random_moments_ends_as_if_it_had_not_been(small, tmp_path, capsys):
    file = tmp_path / "kills.json"
    code = main([*small, "--set", "epochs=10", "--kills", "3", "--json", str(file)])
    result = json.loads(file.read_text())
    assert code == 0 and result["differences"] == []
    assert [kill["moment"] for kill in result["kills"]] == ["any time", "training", "saving"]
    assert "all weights and metrics equal the uninterrupted run's" in capsys.readouterr().out
