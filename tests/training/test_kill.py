"""Killing the process at random moments and resuming gives the run that was never killed, bit for bit."""

from __future__ import annotations

import multiprocessing
import time

import numpy as np
import pytest

from recbft.runs import checkpoint
from recbft.runs.folder import RunFolder
from recbft.training import one_run
from tests.training.conftest import assert_equal_runs, config

KILLS = 6


@pytest.mark.slow
@pytest.mark.skipif(
    "forkserver" not in multiprocessing.get_all_start_methods(), reason="needs processes that are forked"
)
def test_kills_at_random_moments_change_nothing(dataset, tmp_path):
    processes = multiprocessing.get_context("forkserver")
    # A new process then starts at once; PyTorch imports the second for the first optimiser it makes.
    processes.set_forkserver_preload(["recbft.training.many_seeds", "torch._dynamo"])
    asked = config(epochs=12, batch_size=8, patience=50, threads=1)

    def begin(path):
        """A process that trains the run, or goes on with it."""
        begun = path.exists()
        target, first = (one_run.resume, path) if begun else (one_run.train, asked)
        arguments = (first,) if begun else (first, path)
        process = processes.Process(target=target, args=arguments, kwargs={"dataset": dataset}, daemon=True)
        process.start()
        return process

    def finish(path):
        process = begin(path)
        process.join(300)
        assert process.exitcode == 0
        return RunFolder.open(path)

    finish(tmp_path / "warm")
    began = time.monotonic()
    whole = finish(tmp_path / "whole")
    seconds = time.monotonic() - began

    rng, path = np.random.default_rng(0), tmp_path / "killed"
    kills, epochs = 0, set()
    while kills < KILLS and not (path.exists() and RunFolder.open(path).is_finished):
        process = begin(path)
        process.join(rng.uniform(0, 0.4 * seconds))
        killed = process.is_alive()
        process.kill()
        process.join()
        kills += killed
        if killed and path.exists() and RunFolder.open(path).has_checkpoint:
            epochs.add(checkpoint.load_state(path / "checkpoint").epoch)
    run = finish(path)
    assert_equal_runs(run, whole)
    assert len(list(run.checkpoint.glob("*.safetensors"))) == 2, "nothing superseded is left behind"
    assert len(epochs) >= 2, f"the kills fell on epochs {sorted(epochs)} only"
