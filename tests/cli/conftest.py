"""A small data set and a run on it, for the commands."""

from __future__ import annotations

import pytest

from recbft.datasets.synth import SyntheticConfig, generate
from recbft_cli.main import main

SMALL = ["epochs=3", "hidden_size=8", "max_length=10", "batch_size=32", "device=cpu"]
SETTINGS = [word for setting in SMALL for word in ("--set", setting)]


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def train(capsys, events, out, *more):
    return run(capsys, "train", "-d", events, "--set", "time=timestamp", "--out", out, *SETTINGS, *more)


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "tiny.parquet"
    config = SyntheticConfig(num_users=120, num_items=80, mean_length=8.0, seed=3)
    generate(config).events.to_parquet(path)
    return path


@pytest.fixture(scope="module")
def finished(events, tmp_path_factory):
    """A finished run and what training printed; tests that change it work on a copy."""
    out = tmp_path_factory.mktemp("runs")
    assert main(["train", "-d", str(events), "--set", "time=timestamp", "--out", str(out), "-q", *SETTINGS]) == 0
    return out / "sasrec-bft-tiny-seed0"
