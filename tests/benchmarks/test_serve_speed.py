from __future__ import annotations

import json

from benchmarks.serve_speed import main


def test_every_run_is_timed_at_every_size(train_arms, tmp_path, capsys):
    runs = [str(tmp_path / "out" / "runs" / f"{arm}-seed0") for arm in ("matched", "bft")]
    train_arms("matched,bft")
    main([*runs, "--users", "1", "7", "--calls", "3", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert [run["run"] for run in found["runs"]] == ["matched-seed0", "bft-seed0"]
    for run in found["runs"]:
        for users in (1, 7):
            told = run[f"users_{users}"]
            assert told["calls"] == 3 and 0 < told["median_ms"] <= told["p99_ms"]
    assert "7 users, ms (99 %)" in capsys.readouterr().out
