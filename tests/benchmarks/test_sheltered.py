"""What dies, hangs or is spoilt in the sheltered process is a row, and the next unit has a process that works."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest

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


@pytest.fixture
def worker():
    made = Sheltered(make, 10, patience=20.0, healthy=healthy)
    yield made
    made.close()


def test_rows_come_with_their_labels_from_one_process_that_goes_on_after_failures(worker):
    [first, second] = worker.rows(0)
    assert first["unit"] == 10 and first["pid"] != os.getpid() and second == {"unit": 10, "x": 2.5}
    assert list(worker.rows(1)) == [{"unit": 11, "x": 1}, {"unit": 11, "failed": "RuntimeError: out of registers"}]
    assert [row["pid"] for row in worker.rows(5) if "pid" in row] == [first["pid"]]


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (2, "its process ended with code 7"),
        (3, "nothing came within 2 s"),
        (4, "RuntimeError: an illegal memory access was encountered"),
    ],
)
def test_what_a_unit_does_to_its_process_is_told_and_the_next_has_another(worker, number, why):
    [before, _] = worker.rows(0)
    worker.patience = 2.0
    rows = list(worker.rows(number))
    worker.patience = 20.0
    assert rows[-1] == {"unit": 10 + number, "failed": why}
    [after, _] = worker.rows(5)
    assert after["pid"] not in (before["pid"], os.getpid())


def test_what_nobody_waits_for_is_not_taken_for_the_next_unit_s(worker):
    assert next(worker.rows(1)) == {"unit": 11, "x": 1}
    assert [row["unit"] for row in worker.rows(5)] == [15, 15]


def test_in_this_process_rows_are_the_same():
    inline = Inline(partial(make, 10))
    assert list(inline.rows(1)) == [{"unit": 11, "x": 1}, {"unit": 11, "failed": "RuntimeError: out of registers"}]
    assert next(inline.rows(0))["pid"] == os.getpid()


def test_nothing_is_waited_for_after_the_last_moment(worker):
    assert len(list(worker.rows(0))) == 2
    worker.last = time.monotonic() + 1.0
    assert list(worker.rows(3))[-1] == {"unit": 13, "failed": "nothing came within 1 s"}
    assert list(worker.rows(0))[-1]["failed"] == "nothing came within 0 s"
