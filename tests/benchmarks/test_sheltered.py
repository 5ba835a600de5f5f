"""What dies, hangs or is spoilt in the sheltered process is a row, and the next unit has a process that works.

A process imports this file: nothing here imports PyTorch.
"""

from __future__ import annotations

import os
import time

from benchmarks.sheltered import Inline, Sheltered, Unit

SPOILT = []  # of one process


def two_rows():
    yield {"pid": os.getpid()}
    yield {"x": 2.5}


def fails():
    yield {"x": 1}
    raise RuntimeError("out of registers")


def dies():
    yield {"x": 1}
    os._exit(7)


def hangs():
    yield {"x": 1}
    time.sleep(600)


def spoils():
    SPOILT.append(1)
    raise RuntimeError("an illegal memory access was encountered")
    yield


def make(first):
    work = (two_rows, fails, dies, hangs, spoils, two_rows)
    return [Unit("part", {"unit": first + number}, run) for number, run in enumerate(work)]


def healthy():
    if SPOILT:
        raise RuntimeError("spoilt")


def test_what_a_unit_does_to_its_process_is_told_and_the_next_has_another():
    worker = Sheltered(make, 10, patience=20.0, healthy=healthy)
    try:
        [first, second] = worker.rows(0)
        assert first["unit"] == 10 and first["pid"] != os.getpid() and second == {"unit": 10, "x": 2.5}
        assert list(worker.rows(1)) == [{"unit": 11, "x": 1}, {"unit": 11, "failed": "RuntimeError: out of registers"}]
        assert next(worker.rows(0))["pid"] == first["pid"]  # it went on after a failure
        for number, patience, why in (
            (2, 20.0, "its process ended with code 7"),
            (3, 1.0, "nothing came within 1 s"),
            (4, 20.0, "RuntimeError: an illegal memory access was encountered"),
        ):
            [before, _] = worker.rows(5)
            worker.patience = patience
            assert list(worker.rows(number))[-1] == {"unit": 10 + number, "failed": why}
            worker.patience = 20.0
            assert next(worker.rows(0))["pid"] not in (before["pid"], os.getpid())
        assert next(worker.rows(1)) == {"unit": 11, "x": 1}
        assert [row["unit"] for row in worker.rows(5)] == [15, 15]  # what nobody waited for is not taken for these
    finally:
        worker.close()
    assert list(Inline(make, 10).rows(1))[1] == {"unit": 11, "failed": "RuntimeError: out of registers"}
