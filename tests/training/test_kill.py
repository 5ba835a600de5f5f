"""Killing the process at random moments and resuming gives the run that was never killed, bit for bit."""

from __future__ import annotations

import multiprocessing
import time

import numpy as np
import pandas as pd
import pytest
import torch

from recbft.datasets.planted import synthetic_dataset
from recbft.datasets.synth import SyntheticConfig
from recbft.runs import checkpoint
from recbft.runs.folder import RunFolder
from recbft.runs.tensors import flatten
from recbft.training import one_run
from recbft.training.run_config import load_run_config

KILLS = 20


def everything(run):
    """Tensors of the last and the best epoch, and the rest as plain values, without what the clock says."""
    loaded = checkpoint.load(run.checkpoint)
    tensors = {}
    flatten([loaded.model_state, loaded.optimizer_state, loaded.rng_state], "last", tensors)
    tensors |= {f"best.{name}": value for name, value in checkpoint.load_best(run.checkpoint).items()}
    metrics = {name: value for name, value in run.metrics.items() if name != "training_seconds"}
    history = pd.DataFrame(run.read_history()).drop(columns=["seconds", "tokens_per_second"])
    per_user = pd.read_parquet(run.per_user_file)
    return tensors, [vars(loaded.state), metrics, history.to_dict("list"), per_user.to_dict("list")]


@pytest.mark.slow
@pytest.mark.skipif(
    "forkserver" not in multiprocessing.get_all_start_methods(), reason="needs processes that are forked"
)
def test_twenty_kills_at_random_moments_change_nothing(tmp_path):
    processes = multiprocessing.get_context("forkserver")
    # A new process then starts at once; PyTorch imports the second for the first optimiser it makes.
    processes.set_forkserver_preload(["recbft.training.one_run", "torch._dynamo"])
    dataset = synthetic_dataset(SyntheticConfig(num_users=60, num_items=60, mean_length=7, seed=1))
    config = load_run_config(
        model="sasrec",
        arm="bft",
        epochs=20,
        hidden_size=8,
        max_length=8,
        batch_size=8,
        patience=50,
        threads=1,
        device="cpu",
    )

    def begin(path):
        """A process that trains the run, or goes on with it."""
        begun = path.exists()
        target, first = (one_run.resume, path) if begun else (one_run.train, config)
        arguments = (first,) if begun else (first, path)
        process = processes.Process(target=target, args=arguments, kwargs={"dataset": dataset}, daemon=True)
        process.start()
        return process

    def finish(path):
        process = begin(path)
        process.join(60)
        assert process.exitcode == 0
        return RunFolder.open(path)

    finish(tmp_path / "warm")
    began = time.monotonic()
    tensors, rest = everything(finish(tmp_path / "whole"))
    seconds = time.monotonic() - began

    rng = np.random.default_rng(0)
    kills, runs, epochs = 0, 0, set()
    while kills < KILLS:
        path = tmp_path / f"killed-{runs}"
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
        runs += 1
        found, found_rest = everything(run)
        assert found_rest == rest
        assert set(found) == set(tensors)
        assert all(torch.equal(found[name], tensors[name]) for name in found)
        assert len(list(run.checkpoint.glob("*.safetensors"))) == 2, "nothing superseded is left behind"
    assert len(epochs) >= 5, f"the kills fell on epochs {sorted(epochs)} only"
