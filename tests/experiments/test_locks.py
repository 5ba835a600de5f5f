"""A lock is its owner's as long as that lives."""

from __future__ import annotations

import subprocess
import sys

import pytest

from recbft.experiments import locks

TAKE = (
    "import sys; from pathlib import Path; from recbft.experiments import locks\n"
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
