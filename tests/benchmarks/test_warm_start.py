from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.warm_start import METRICS, earlier, main, table
from recbft.datasets import Dataset
from recbft.errors import UserError


def test_older_data_are_the_events_up_to_a_time_for_all_users(events):
    dataset = Dataset.load(events, time="timestamp")
    older = earlier(dataset, 0.7)
    latest = np.quantile(dataset.times, 0.7)
    assert older.times.max() <= latest
    of = dict(zip(dataset.user_ids.tolist(), np.split(dataset.times, dataset.offsets[1:-1]), strict=True))
    kept = {user: int((times <= latest).sum()) for user, times in of.items()}
    assert dict(zip(older.user_ids.tolist(), older.lengths.tolist(), strict=True)) == {
        user: number for user, number in kept.items() if number >= 3
    }


def test_all_ways_to_begin_are_measured(small, tmp_path, capsys):
    main([*small, "--seeds", "0-1", "--share", "0.8", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    for row in found["seeds"]:
        assert row["as it was"]["epochs"] == 0 < row["afresh"]["epochs"]
        for keep in ("1 kept", "0.4 kept"):
            assert 1 <= row[keep]["epochs"] <= 2 and 0 <= row[keep]["filtered"] <= 1
    assert "| 0.4 kept |" in capsys.readouterr().out


def test_of_a_beginning_without_a_hit_nothing_is_said_relative_to_it():
    rows = [
        {start: dict.fromkeys(("epochs", "seconds", *METRICS), value * seed) for start, value in starts.items()}
        for seed in (1, 2)
        for starts in [{"afresh": 0.0, "1 kept": 0.2}]
    ]
    assert table(rows).splitlines()[-1].count("| 0.3000 (p 0.205, 2 of 2) ") == len(METRICS)


def test_a_share_of_everything_is_refused(small):
    with pytest.raises(UserError, match="between 0 and 1"):
        main([*small, "--share", "1"])
