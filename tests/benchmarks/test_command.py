from __future__ import annotations

import importlib

import pytest

from benchmarks.command import recorded

COUNTS = {
    "kernel_speed": ["--threads"],
    "kill_resume": ["--kills"],
    "many_seeds": ["--dataset", "d", "--repeats"],
    "mechanisms.random_keys": ["--steps"],
    "mixer_speed": ["--rounds"],
    "peer_speed": ["--library", "replay", "--dataset", "d", "--epochs"],
    "train_speed": ["--dataset", "d", "--chunk-steps"],
}


def test_a_recorded_command_has_no_places_of_the_machine():
    given = ["--dataset", "ml-1m", "--data-root", "/home/x/data", "--out=/tmp/y", "--set", "epochs=2", "--json", "z"]
    assert recorded("train_speed", given) == (
        "python -m benchmarks.train_speed --dataset ml-1m --data-root DIR --out OUT --set epochs=2 --json FILE"
    )


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_number_of_something_is_at_least_one(name, text, capsys):
    command = importlib.import_module(f"benchmarks.{name}")
    with pytest.raises(SystemExit) as ended:
        command.main([*COUNTS[name], text])
    assert ended.value.code == 2
    option = COUNTS[name][-1]
    assert f"argument {option}: is {text}; give a whole number of at least 1" in capsys.readouterr().err
