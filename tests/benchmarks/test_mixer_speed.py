"""The command that times mixers: what takes part, and what its table holds."""

from __future__ import annotations

import json

import pytest

from benchmarks import mixer_speed
from recbft.errors import UserError
from recbft.mixers import MIXERS


def test_every_mixer_takes_part_with_and_without_the_precision_it_has():
    cases = mixer_speed.cases_of(mixer_speed._mixers("all"))
    assert cases[0] == mixer_speed.Case("attention", False)
    assert {case.mixer for case in cases} == {name for name, spec in MIXERS.items() if spec.precision != "silu"}
    assert not any(case.precision and MIXERS[case.mixer].precision == "none" for case in cases)
    for case in cases:
        mixer_speed.make_pass(case, mixer_speed.Shape(2, 2, 5, 4))()


def test_memory_is_what_a_fresh_process_takes():
    assert mixer_speed.memory_of(mixer_speed.Case("boosted[rounds=3]", True), mixer_speed.Shape(3, 2, 6, 4)) >= 0


def test_the_command_prints_ratios_to_softmax_and_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mixer_speed, "memory_of", lambda case, shape: 2.5)
    file = tmp_path / "speed.json"
    named = ["--mixers", "alibi,boosted[rounds=3]", "--shapes", "3x2x6x4", "--rounds", "2", "--json", str(file)]
    assert mixer_speed.main(named) == 0
    rows = json.loads(file.read_text())["mixer_speed"]
    assert [(row["mixer"], row["precision"]) for row in rows] == [
        ("attention", False),
        *((name, precision) for name in ("alibi", "boosted[rounds=3]") for precision in (False, True)),
    ]
    assert rows[0]["ratio"] == 1.0 and all(len(row["seconds"]) == 2 and row["memory_mb"] == 2.5 for row in rows)
    assert "boosted[rounds=3] with precision" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["--mixers", "rfaa"], "unknown mixer 'rfaa'; did you mean 'rfa'"),
        (["--mixers", "rfa[width=3]"], "unknown key"),
        (["--shapes", "3x4"], "shape '3x4' is not BxHxTxK"),
    ],
)
def test_what_cannot_be_timed_is_named(named, message):
    with pytest.raises(UserError, match=message):
        mixer_speed.main(named)
