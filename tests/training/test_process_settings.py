"""The random state of a run is that of the device it trains on."""

from __future__ import annotations

import contextlib
import os
import sys
from multiprocessing import get_context
from threading import Event, Thread

import pytest
import torch

from recbft.errors import OneProcessError
from recbft.system.torchrun import Process
from recbft.training import process_settings
from recbft.training.process_settings import rng_state, set_rng_state
from recbft.training.process_team import Team, departure_explained
from recbft.training.run_config import TrainingConfig
from tests.training.conftest import config


def test_the_random_state_is_of_the_device_that_is_trained_on(monkeypatch):
    states = {torch.device("cuda:0"): 10, torch.device("cuda:1"): 11}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device="cuda:0": states[torch.device(device)])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device="cuda:0": states.update({device: state}))
    generator, second = torch.Generator().manual_seed(3), torch.device("cuda:1")
    saved = rng_state(generator, second)
    assert saved["cuda"] == 11
    torch.rand(5, generator=generator)
    states[second] = 12
    set_rng_state(generator, saved, second)
    assert states == {torch.device("cuda:0"): 10, second: 11}
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(3).get_state())


def test_a_generator_on_the_gpu_stands_for_the_gpu_s_own():
    class OnGpu:
        device = torch.device("cuda:1")

        def __init__(self, state):
            self.state = state

        def get_state(self):
            return self.state

        def set_state(self, state):
            self.state = state

    before, kept = torch.get_rng_state(), torch.ones(16, dtype=torch.uint8)
    saved = rng_state(OnGpu(kept), OnGpu.device)
    assert torch.equal(saved["cuda"], kept) and torch.equal(saved["cpu"], before)
    other = OnGpu(torch.zeros(16, dtype=torch.uint8))
    set_rng_state(other, {"cpu": torch.Generator().get_state()}, OnGpu.device)  # of a run that was on a CPU so far
    assert not other.state.any() and torch.equal(torch.get_rng_state(), before)
    set_rng_state(other, saved, OnGpu.device)
    assert torch.equal(other.state, kept)


def test_on_the_cpu_a_gpu_s_random_state_is_left_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    generator, cpu = torch.Generator(), torch.device("cpu")
    assert set(rng_state(generator, cpu)) == {"cpu"}
    set_rng_state(generator, {"cpu": generator.get_state(), "cuda": torch.zeros(16, dtype=torch.uint8)}, cpu)


@pytest.mark.parametrize(("device", "gpus"), [("cpu", []), ("cuda", [7])])
def test_the_random_numbers_of_a_run_begin_on_its_own_device_alone(device, gpus, monkeypatch):
    begun = []
    monkeypatch.setattr(torch.cuda, "manual_seed", begun.append)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("other GPUs belong to the caller"))
    with torch.random.fork_rng(devices=[]):
        process_settings.seed_everything(7, torch.device(device))
        assert torch.initial_seed() == 7 and begun == gpus


@pytest.fixture
def any_device(monkeypatch):
    """Every device that is named is there."""
    monkeypatch.setattr(process_settings, "chosen_device", lambda name, here: torch.device(name))
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())


@pytest.mark.parametrize(("given", "kept"), [("", ":4096:8"), (":16:8", ":16:8")])
def test_a_deterministic_run_on_a_gpu_has_what_its_products_ask_for(given, kept, any_device, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
    if not given:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with process_settings.run_settings(TrainingConfig(device="cuda", deterministic=True)):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == kept and torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("device", "wanted"), [("cuda:3", ["cuda:3"]), ("cuda", []), ("cpu", [])])
def test_a_gpu_chosen_by_number_is_the_current_one(device, wanted, any_device, monkeypatch):
    made_current = []

    @contextlib.contextmanager
    def current(device):
        made_current.append(str(device))
        yield

    monkeypatch.setattr(torch.cuda, "device", current)
    with process_settings.run_settings(TrainingConfig(device=device)):
        assert made_current == wanted


def surrounded(inside=None, leave=None):
    with process_settings.run_settings(TrainingConfig(device="cpu")):
        if inside is not None:
            inside.set()
            leave.wait()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # that it has threads, from Python 3.12 on
def test_a_forked_process_does_not_wait_for_a_run_of_its_parent():
    inside, leave = Event(), Event()
    thread = Thread(target=surrounded, args=(inside, leave))
    thread.start()
    inside.wait()
    child = get_context("fork").Process(target=surrounded)
    child.start()
    child.join(30)
    found = child.exitcode
    child.kill()
    leave.set()
    thread.join()
    assert found == 0


def test_what_ends_a_run_is_not_hidden_by_an_import_that_it_broke_off(monkeypatch):
    with pytest.raises(KeyboardInterrupt), process_settings.run_settings(TrainingConfig(device="cpu")):
        monkeypatch.setitem(sys.modules, "torch._inductor.config", None)  # cannot be imported from now on
        raise KeyboardInterrupt


def test_a_run_out_of_memory_names_the_settings_that_matter():
    asked = config(loss="bce", num_negatives=3)
    with pytest.raises(OneProcessError) as caught, process_settings.memory_explained(asked):
        raise RuntimeError("can't allocate memory: you tried to allocate 9 bytes.\nand where")
    assert str(caught.value) == (
        "out of memory (can't allocate memory: you tried to allocate 9 bytes.); lower training.batch_size (16), "
        "backbone.max_length (8), backbone.hidden_size (8), backbone.num_negatives (3) or, where it was ranking users, "
        "evaluation.memory_mb (256)"
    )
    lost = departure_explained(Team(Process.of(2)))
    with (
        pytest.raises(OneProcessError, match=r"lower training.batch_targets \(64\)"),
        process_settings.memory_explained(config(batch_targets=64)),
        lost,
    ):
        raise torch.distributed.DistBackendError("Cuda failure 2 'out of memory'")
    with pytest.raises(RuntimeError, match="shapes differ"), process_settings.memory_explained(asked):
        raise RuntimeError("shapes differ")
