"""A small data set, a run on it and a comparison, for the commands."""

from __future__ import annotations

import pytest

from recbft_cli.main import main
from tests.experiments.conftest import SMALL, events

__all__ = ["events"]

SETTINGS = [word for setting in SMALL for word in ("--set", setting)]


def run(capsys, *arguments):
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def train(capsys, events, out, *more):
    return run(capsys, "train", "-d", events, "--out", out, *SETTINGS, "--set", "epochs=3", *more)


@pytest.fixture(scope="session")
def finished(events, tmp_path_factory):
    """A finished run; tests that change it work on a copy."""
    out = tmp_path_factory.mktemp("runs")
    words = ["train", "-d", str(events), "--out", str(out), "-q", *SETTINGS, "--set", "epochs=3"]
    assert main(words) == 0
    return out / "sasrec-bft-tiny-seed0"


@pytest.fixture(scope="session")
def made(events, tmp_path_factory):
    """The folder of a finished comparison; tests that change it work on a copy."""
    out = tmp_path_factory.mktemp("made") / "out"
    assert main(["compare", *map(str, comparing(events, out, "--jobs", "2"))]) == 0
    return out


def comparing(events, out, *more):
    """The options of that comparison."""
    return ["-d", events, *SETTINGS, "--arms", "matched,bft[lam_max=10]", "--seeds", "0-1", "--out", out, *more]
