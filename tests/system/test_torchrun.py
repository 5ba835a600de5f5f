"""What torchrun says of a process is believed where it adds up, and refused in one line where it does not."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from recbft.errors import UserError
from recbft.experiments.missing_runs import prepare
from recbft.system.torchrun import Process, this_process
from recbft.training import one_run
from recbft.training.process_settings import run_settings
from recbft.training.run_config import load_run_config

CONFIG = load_run_config(model="sasrec", dataset="synthetic", epochs=1, device="cpu")


def set_environment(monkeypatch, **environment):
    """As torchrun sets it, but for what is given."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} | environment).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, Process()),
        ({"WORLD_SIZE": ""}, Process()),
        ({"WORLD_SIZE": "1"}, Process()),
        ({"WORLD_SIZE": "2", "RANK": "1"}, Process(1, 2, 1, 2)),
        (
            {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            Process(5, 8, 1, 4),
        ),
    ],
)
def test_the_environment_says_which_process_this_is(environment, wanted, monkeypatch):
    set_environment(monkeypatch, **environment)
    assert this_process() == wanted
    assert wanted.leads == (wanted.rank == 0)


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"RANK": ""}, "WORLD_SIZE is 2, but RANK is not set; begin the processes with torchrun, or unset WORLD_SIZE"),
        ({"RANK": "1", "MASTER_ADDR": ""}, "WORLD_SIZE is 2, but MASTER_ADDR is not set"),
        ({"RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
    ],
)
def test_an_environment_that_does_not_add_up_is_refused(environment, wanted, tmp_path, monkeypatch):
    set_environment(monkeypatch, **{"WORLD_SIZE": "2", **environment})
    with pytest.raises(UserError, match=wanted):
        one_run.train(CONFIG, tmp_path / "new")
    assert not os.listdir(tmp_path)


def test_a_group_of_other_processes_is_refused(tmp_path, monkeypatch):
    set_environment(monkeypatch, WORLD_SIZE="2", RANK="1")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with pytest.raises(UserError, match=r"process 0 of 1, but RANK is 1 and WORLD_SIZE is 2; make the group"):
            one_run.train(CONFIG, tmp_path / "new")
    finally:
        dist.destroy_process_group()
    assert not os.listdir(tmp_path)


def test_commands_that_begin_processes_are_refused(tmp_path, monkeypatch):
    set_environment(monkeypatch, WORLD_SIZE="2", RANK="0")
    with pytest.raises(
        UserError, match=r"WORLD_SIZE is 2: processes that the command itself begins .* without torchrun"
    ):
        prepare([], [], tmp_path, lambda arm, seed: CONFIG)


@pytest.mark.parametrize(
    ("device", "count", "wanted"),
    [
        ("cuda:1", 4, r"device is 'cuda:1', but 2 processes train this run, each on a GPU; give cuda"),
        ("cuda", 1, "2 processes began on this machine, but PyTorch sees 1 CUDA devices"),
        ("cuda", 0, "device is 'cuda', but PyTorch sees 0 CUDA devices; use cpu or auto"),
    ],
)
def test_each_process_needs_a_gpu_of_its_own(device, count, wanted, monkeypatch):
    set_environment(monkeypatch, WORLD_SIZE="2", RANK="1", LOCAL_WORLD_SIZE="2", LOCAL_RANK="1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(UserError, match=wanted), run_settings(load_run_config(device=device).training):
        pass
