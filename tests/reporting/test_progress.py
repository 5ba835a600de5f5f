from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from recbft.errors import UserError
from recbft.experiments.queue import Running
from recbft.reporting.progress import Lines, MovingBar, listener, view_for
from recbft.training.progress import Silent

ROW = {"epoch": 3, "loss": 6.25, "tokens_per_second": 51234.5, "valid_hr@10": 0.1, "valid_ndcg@10": 0.0512}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def drive(progress):
    progress.start(total_epochs=4, first_epoch=3)
    progress.note("a [word] to the user")
    progress.batch(done=1, total=2, loss=6.5, tokens=100)
    progress.epoch(ROW)
    progress.batch(done=2, total=2, loss=6.0, tokens=200)
    progress.epoch({"epoch": 4, "loss": 6.0, "tokens_per_second": 5.0})
    progress.stop()


def test_a_log_gets_one_plain_line_per_epoch():
    stream = io.StringIO()
    drive(listener(True, "ndcg@10", stream))
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["continuing at epoch 3", "a [word] to the user"]
    assert lines[2].startswith("epoch 3/4  loss 6.2500  valid ndcg@10 0.0512  51,234 tokens/s  at most 0:00:0")
    assert lines[3] == "epoch 4/4  loss 6.0000  5 tokens/s  at most 0:00:00 left"
    assert len(lines) == 4 and "\x1b" not in stream.getvalue()


def test_a_log_is_told_in_a_long_epoch_how_far_it_is(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("recbft.reporting.progress.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = Lines(stream, "ndcg@10")
    progress.start(total_epochs=4, first_epoch=3)
    for done in range(1, 6):  # every 40 seconds
        now[0] += 40
        progress.batch(done=done, total=2500, loss=7 - done / 2, tokens=100)
    progress.epoch(ROW)
    now[0] += 59
    progress.batch(done=1, total=2500, loss=4.0, tokens=20)
    now[0] += 1
    progress.batch(done=2, total=2500, loss=3.75, tokens=40)
    lines = stream.getvalue().splitlines()
    assert lines[1:3] == ["epoch 3/4  loss 6.0000  step 2 of 2,500", "epoch 3/4  loss 5.0000  step 4 of 2,500"]
    assert lines[3].startswith("epoch 3/4  loss 6.2500  valid")
    assert lines[4:] == ["epoch 4/4  loss 3.7500  valid ndcg@10 0.0512  step 2 of 2,500"]


def test_a_log_is_told_now_and_then_how_far_many_long_trainings_are(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("recbft.reporting.progress.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    view = view_for(stream)
    view.start(total=4, finished=0)
    for epoch in range(1, 6):  # every 200 seconds
        now[0] += 200
        ours = Running(SimpleNamespace(name="bft-seed0"), epoch, 9, None, 1.0, None, elsewhere=False)
        theirs = Running(SimpleNamespace(name="bft-seed1"), 2 * epoch, 60, None, 1.0, None, elsewhere=True)
        view.look([ours, theirs], waiting=3)
    standing = "0 of 4 runs finished, 2 in training, 2 waiting: epoch"
    assert stream.getvalue().splitlines() == [
        f"{standing} bft-seed0 2/9, bft-seed1 4/60",
        f"{standing} bft-seed0 4/9, bft-seed1 8/60",
    ]


def test_a_terminal_gets_a_bar_with_loss_metric_and_speed(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    drive(listener(True, "ndcg@10", stream))
    seen = stream.getvalue()
    assert "a [word] to the user" in seen and "ndcg@10 0.0512" in seen and "tokens/s" in seen and "epoch 4/4" in seen


def test_stopping_twice_or_before_the_start_is_harmless():
    for progress in (Lines(io.StringIO(), "mrr"), MovingBar(io.StringIO(), "mrr")):
        progress.stop()
        progress.start(2, 1)
        progress.stop()
        progress.stop()


def test_quiet_says_nothing():
    stream = io.StringIO()
    drive(listener(False, "ndcg@10", stream))
    assert stream.getvalue() == ""


def in_notebook(monkeypatch, kernel):
    shell = SimpleNamespace(kernel=kernel)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


@pytest.mark.parametrize(
    ("progress", "where", "told"),
    [
        *((None, "log", Silent), (None, "terminal", MovingBar), (None, "notebook", Lines), (None, "IPython", Silent)),
        *((True, "log", Lines), (False, "notebook", Silent), (False, "terminal", Silent)),
    ],
)
def test_a_person_who_is_likely_to_look_is_told_by_default(progress, where, told, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal() if where == "terminal" else io.StringIO())
    in_notebook(monkeypatch, object() if where == "notebook" else None)
    assert type(listener(progress, "ndcg@10")) is told


def test_listeners_of_the_caller_s_are_kept_and_anything_else_is_refused():
    own = Silent()
    assert listener(own, "mrr") is own
    with pytest.raises(UserError, match="progress is 3; give True, False, or an object"):
        listener(3, "mrr")


def test_a_notebook_has_one_line_that_is_written_over_and_left_at_the_end(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("recbft.reporting.progress.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    line = Lines(stream, "mrr", moves=True)
    line.start(3, 2)
    now[0] = 100.0
    line.batch(1, 4, 2.5, 10)
    line.batch(2, 4, 2.5, 10)  # too soon
    line.epoch({"epoch": 2, "loss": 2.0, "valid_mrr": 0.25})
    line.epoch({"epoch": 3, "loss": 1.0})
    line.stop()
    assert [part.rstrip() for part in stream.getvalue().split("\r")[1:]] == [
        "continuing at epoch 2",
        "epoch 2/3  loss 2.5000  step 1 of 4",
        "epoch 2/3  loss 2.0000  valid mrr 0.2500  at most 0:01:40 left",
        "epoch 3/3  loss 1.0000  at most 0:00:00 left",
    ]
    assert stream.getvalue().endswith(" \n") and stream.getvalue().count("\n") == 2
