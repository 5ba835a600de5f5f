from __future__ import annotations

from benchmarks.command import recorded


def test_a_recorded_command_has_no_places_of_the_machine():
    given = ["--dataset", "ml-1m", "--data-root", "/home/x/data", "--out=/tmp/y", "--set", "epochs=2", "--json", "z"]
    assert recorded("train_speed", given) == (
        "python -m benchmarks.train_speed --dataset ml-1m --data-root DIR --out OUT --set epochs=2 --json FILE"
    )
