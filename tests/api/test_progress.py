"""How far a fit is: by default where a person sees it, and never elsewhere."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from recbft import Recommender
from recbft.api.progress import EpochLine, listener
from recbft.errors import UserError
from recbft.training.progress import Silent
from tests.serving.conftest import SMALL, dataset

__all__ = ["dataset"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def in_notebook(monkeypatch, kernel):
    shell = SimpleNamespace(kernel=kernel)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


@pytest.mark.parametrize(
    ("progress", "where", "told"),
    [
        *((None, "log", False), (None, "terminal", True), (None, "notebook", True), (None, "IPython", False)),
        *((True, "log", True), (False, "notebook", False), (False, "terminal", False)),
    ],
)
def test_a_line_is_there_by_default_where_a_person_sees_it(progress, where, told, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal() if where == "terminal" else io.StringIO())
    in_notebook(monkeypatch, object() if where == "notebook" else None)
    assert isinstance(listener(progress, "ndcg@10"), EpochLine) is told


def test_listeners_of_the_caller_s_are_kept_and_anything_else_is_refused():
    own = Silent()
    assert listener(own, "mrr") is own
    with pytest.raises(UserError, match="progress is 3; give True, False, or an object"):
        listener(3, "mrr")


def test_a_line_is_written_over_and_left_at_the_end(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("recbft.api.progress.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    line = EpochLine(stream, "mrr", moves=True)
    line.start(3, 2)
    now[0] = 100.0
    line.batch(1, 4, 2.5, 10)
    line.batch(2, 4, 2.5, 10)  # too soon
    line.epoch({"epoch": 2, "loss": 2.0, "valid_mrr": 0.25})
    line.epoch({"epoch": 3, "loss": 1.0})
    line.stop()
    said = [part.rstrip() for part in stream.getvalue().split("\r")[1:]]
    assert said == [
        "epoch 2/3  step 1/4  loss 2.5000",
        "epoch 2/3  loss 2.0000  valid mrr 0.2500  at most 0:01:40 left",
        "epoch 3/3  loss 1.0000  valid mrr 0.2500  at most 0:00:00 left",
    ]
    assert stream.getvalue().endswith("\n")


def test_a_fit_says_a_line_per_epoch_in_a_log_if_asked(dataset, capsys):
    Recommender("sasrec", arm="matched", **SMALL).fit(dataset, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("epoch")] == ["epoch 1/2", "epoch 2/2"]
    Recommender("pop").fit(dataset)
    assert capsys.readouterr().err == ""
