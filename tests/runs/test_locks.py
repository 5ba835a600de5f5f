"""One process has a lock: another is refused, and nothing is left when its holder ends or dies."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import subprocess
import sys

import pytest
import torch

from recbft.datasets.planted import synthetic_dataset
from recbft.datasets.synth import SyntheticConfig
from recbft.errors import UserError
from recbft.runs import locks
from recbft.training import one_run
from recbft.training.many_seeds import train_seeds
from recbft.training.progress import Silent
from recbft.training.run_config import load_run_config

TAKEN = "is being trained by another process; wait until it has ended, or end it"
HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "rb+")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def dataset():
    return synthetic_dataset(SyntheticConfig(num_users=50, num_items=60, mean_length=7, seed=1))


def config(dataset, **settings):
    small = {"hidden_size": 8, "max_length": 8, "batch_size": 32, "epochs": 1, "arm": "matched", "device": "cpu"}
    return load_run_config(dataset=dataset.name, **{**small, **settings})


@pytest.fixture
def begun(dataset, tmp_path):
    """A run that was stopped before its first step."""
    return one_run.begin(config(dataset), tmp_path / "run", dataset, torch.device("cpu"), Silent()).run


def contents(run):
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_a_run_in_training_is_refused_to_another_process_until_its_holder_dies(begun, dataset):
    before = contents(begun)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, begun.config_file], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=TAKEN):
            one_run.resume(begun.path, dataset=dataset)
        with pytest.raises(UserError, match=TAKEN):
            one_run.train(config(dataset), begun.path, dataset=dataset, overwrite=True)
        with pytest.raises(UserError, match=TAKEN):  # it has not stopped
            one_run.train(config(dataset), begun.path, dataset=dataset)
        with pytest.raises(UserError, match=TAKEN):
            train_seeds(
                [config(dataset, seed=1), config(dataset)], [begun.path.parent / "1", begun.path], dataset=dataset
            )
        assert contents(begun) == before and os.listdir(begun.path.parent) == ["run"]
        holder.kill()
    run = one_run.resume(begun.path, dataset=dataset)
    files = "card.md checkpoint config.yaml environment.json history.csv metrics.json per_user.parquet protocol.json"
    assert run.is_finished and sorted(os.listdir(run.path)) == files.split()


@pytest.mark.parametrize("together", [False, True])
def test_a_run_is_held_while_it_is_trained_and_given_back_whatever_ends_it(together, dataset, tmp_path):
    class Rival(Silent):
        def epoch(self, row):
            with pytest.raises(UserError, match=TAKEN):
                one_run.resume(tmp_path / "run", dataset=dataset)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        if together:
            train_seeds([config(dataset)], [tmp_path / "run"], dataset=dataset, progresses=[Rival()])
        else:
            one_run.train(config(dataset), tmp_path / "run", dataset=dataset, progress=Rival())
    assert one_run.resume(tmp_path / "run", dataset=dataset).is_finished


def test_a_run_that_was_replaced_in_the_meantime_is_not_trained(begun, monkeypatch):
    flock = fcntl.flock

    def late(file, operation):
        text = begun.config_file.read_text()
        begun.config_file.unlink()
        begun.config_file.write_text(text)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(UserError, match="was removed or replaced by another process just now"), begun.locked():
        pass
    begun.config_file.unlink()
    with pytest.raises(UserError, match="was removed or replaced by another process just now"), begun.locked():
        pass


def test_where_files_cannot_be_locked_a_run_is_trained_with_a_warning(begun, monkeypatch):
    def refused(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.warns(UserWarning, match=r"cannot be locked \(no locks available\); see that no other"), begun.locked():
        pass


def test_where_files_cannot_be_locked_a_queue_goes_on(tmp_path, monkeypatch):
    def refused(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    lock = locks.acquire(tmp_path / "queue", "run")
    assert not locks.is_held(tmp_path / "queue", "run")
    lock.release()
    assert list((tmp_path / "queue").iterdir()) == []


def test_a_run_on_a_file_system_that_may_only_be_read_can_be_locked_for_a_copy(begun, monkeypatch):
    def read_only(path, mode="r", *more, **how):
        if "+" in mode:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return io.open(path, mode, *more, **how)  # noqa: UP020

    monkeypatch.setattr(locks, "open", read_only, raising=False)
    with begun.locked(alone=False), begun.locked(alone=False):
        pass


def test_where_files_have_no_such_locks_it_is_said_where_recbft_runs(tmp_path):
    code = "import sys; sys.modules['fcntl'] = None; from recbft_cli.main import main; sys.exit(main(['train']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    said = "error: recbft trains, and opens runs, on Linux and macOS alone; on Windows run it inside WSL\n"
    assert (done.returncode, done.stderr) == (2, said)


TAKE = (
    "import sys; from pathlib import Path; from recbft.runs import locks\n"
    "lock = locks.acquire(Path(sys.argv[1]), 'run'); print(int(lock is not None), flush=True); sys.stdin.read()"
)


@pytest.fixture
def takers(tmp_path):
    """Four processes of which each has tried to take the lock, by what they got: one has it."""
    (tmp_path / "run.lock").touch()  # as a killed process leaves it
    processes = [
        subprocess.Popen([sys.executable, "-c", TAKE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    yield {process: process.stdout.readline().strip() == b"1" for process in processes}
    for process in processes:
        process.kill()
        process.communicate()


def test_a_lock_is_taken_once_and_given_back(tmp_path):
    folder = tmp_path / "queue"
    assert not locks.is_held(folder, "run")
    lock = locks.acquire(folder, "run")
    assert locks.is_held(folder, "run") and locks.acquire(folder, "run") is None
    locks.clear(folder, "run")
    assert locks.is_held(folder, "run"), "nobody gives back another's lock"
    lock.release()
    again = locks.acquire(folder, "run")
    lock.release()
    assert locks.is_held(folder, "run"), "who has given a lock back gives back no other"
    again.release()
    assert not locks.is_held(folder, "run") and list(folder.iterdir()) == []


def test_of_many_processes_one_gets_a_lock_and_loses_it_when_it_is_killed(tmp_path, takers):
    (owner,) = (process for process, got in takers.items() if got)
    assert locks.is_held(tmp_path, "run") and locks.acquire(tmp_path, "run") is None
    owner.kill()
    owner.wait()
    assert not locks.is_held(tmp_path, "run") and (tmp_path / "run.lock").exists()
    locks.clear(tmp_path, "run")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_on_the_file_that_stands_there(tmp_path, monkeypatch):
    first = locks.acquire(tmp_path, "run")
    take, others = locks._take, []

    def after_its_holder_has_given_it_back_and_another_has_it(file, how):
        monkeypatch.setattr(locks, "_take", take)
        first.release()
        others.append(locks.acquire(tmp_path, "run"))
        return take(file, how)

    monkeypatch.setattr(locks, "_take", after_its_holder_has_given_it_back_and_another_has_it)
    assert locks.acquire(tmp_path, "run") is None, "the file that stands there is another's"
    others[0].release()
    assert locks.acquire(tmp_path, "run") is not None
