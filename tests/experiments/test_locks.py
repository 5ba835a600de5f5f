"""A lock is its owner's as long as that lives, on this machine or another."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from recbft.experiments import locks
from recbft.system.files import write_json


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def lock_as(folder, pid, started, host=None):
    me = locks._me()
    write_json(folder / "run.lock", {"pid": pid, "host": host or me.host, "started": started})


def test_a_lock_is_taken_once_and_given_back(tmp_path):
    folder = tmp_path / "queue"
    assert locks.acquire(folder, "run") and locks.holder(folder, "run").pid == os.getpid()
    assert locks.acquire(folder, "run"), "its owner has it already"
    locks.release(folder, "run")
    assert locks.holder(folder, "run") is None and not (folder / "run.lock").exists()


def test_a_living_owner_keeps_its_lock(tmp_path, sleeper):
    lock_as(tmp_path, sleeper.pid, locks.started(sleeper.pid))
    assert not locks.acquire(tmp_path, "run")
    locks.release(tmp_path, "run")
    assert locks.holder(tmp_path, "run").pid == sleeper.pid, "nobody gives back another's lock"


def test_a_killed_owner_loses_its_lock_even_before_it_is_reaped(tmp_path, sleeper):
    lock_as(tmp_path, sleeper.pid, locks.started(sleeper.pid))
    sleeper.kill()
    deadline = time.monotonic() + 20
    while locks.holder(tmp_path, "run") is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert locks.acquire(tmp_path, "run")


def test_another_process_with_the_owners_number_holds_nothing(tmp_path, sleeper):
    lock_as(tmp_path, sleeper.pid, "another boot 12345")
    assert locks.holder(tmp_path, "run") is None and locks.acquire(tmp_path, "run")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process is asked after by ps")
def test_an_owner_may_be_named_for_half_a_letter(tmp_path):
    python = tmp_path / "fourteen bytesä"  # Linux keeps 15 bytes of a command's name
    python.symlink_to(sys.executable)
    process = subprocess.Popen([python, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        lock_as(tmp_path, process.pid, locks.started(process.pid))
        assert not locks.acquire(tmp_path, "run")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(shutil.which("ps") is None, reason="there is no ps")
def test_where_ps_is_asked_an_owner_lives_on_in_another_time_zone(sleeper, monkeypatch):
    monkeypatch.setenv("TZ", "UTC0")
    began = locks._started_by_ps(sleeper.pid)
    monkeypatch.setenv("TZ", "EST5")  # a laptop that has travelled
    assert began is not None and locks._started_by_ps(sleeper.pid) == began


def test_an_owner_on_another_host_lives_as_long_as_it_touches_its_lock(tmp_path):
    lock_as(tmp_path, 1, "whenever", host="another-host")
    assert not locks.acquire(tmp_path, "run")
    old = time.time() - locks.SILENT_SECONDS - 5
    os.utime(tmp_path / "run.lock", (old, old))
    assert locks.acquire(tmp_path, "run")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"pid": 1}', b"\xff"])
def test_a_damaged_lock_holds_nothing(tmp_path, content):
    (tmp_path / "run.lock").write_bytes(content)
    assert locks.acquire(tmp_path, "run")
    assert json.loads((tmp_path / "run.lock").read_bytes())["pid"] == os.getpid()


def test_of_many_processes_one_gets_the_lock(tmp_path):
    lock_as(tmp_path, 2**22 + 1, "dead long ago")
    code = (
        "import sys, time; from pathlib import Path; from recbft.experiments import locks\n"
        "got = locks.acquire(Path(sys.argv[1]), 'run'); print(int(got), flush=True); sys.stdin.read()"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    got = [process.stdout.readline().strip() for process in processes]
    for process in processes:
        process.communicate()
    assert sorted(got) == ["0", "0", "0", "1"]
