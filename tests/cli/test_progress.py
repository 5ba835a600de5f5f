from __future__ import annotations

import io
from types import SimpleNamespace

from recbft.experiments.queue import Running
from recbft_cli.progress import Lines, MovingBar, progress_for, view_for

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
    drive(progress_for("ndcg@10", stream))
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["continuing at epoch 3", "a [word] to the user"]
    assert lines[2].startswith("epoch 3/4  loss 6.2500  valid ndcg@10 0.0512  51,234 tokens/s  at most 0:00:0")
    assert lines[3] == "epoch 4/4  loss 6.0000  5 tokens/s  at most 0:00:00 left"
    assert len(lines) == 4 and "\x1b" not in stream.getvalue()


def test_a_log_is_told_in_a_long_epoch_how_far_it_is(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("recbft_cli.progress.time.monotonic", lambda: now[0])
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
    assert lines[4:] == ["epoch 4/4  loss 3.7500  step 2 of 2,500"]


def test_a_log_is_told_now_and_then_how_far_many_long_trainings_are(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("recbft_cli.progress.time.monotonic", lambda: now[0])
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
    drive(progress_for("ndcg@10", stream))
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
    drive(progress_for("ndcg@10", stream, quiet=True))
    assert stream.getvalue() == ""
