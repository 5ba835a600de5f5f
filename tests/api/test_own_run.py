"""The temporary folder of a fit goes when nothing is lost with it."""

from __future__ import annotations

import os
import tempfile
from types import SimpleNamespace

import pytest

from recbft.api.own_run import fitted_folder
from recbft.errors import RunError, RunInterruptedError


@pytest.mark.parametrize(
    ("error", "begun", "stays"),
    [(RunInterruptedError, True, True), (RunInterruptedError, False, False), (RunError, True, False)],
)
def test_a_temporary_folder_stays_after_an_interruption_if_it_holds_a_run(error, begun, stays, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(error), fitted_folder(None) as place:
        if begun:
            place.path.mkdir()
        raise error("stopped")
    assert bool(list(tmp_path.iterdir())) == stays


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_temporary_folder_outlives_a_process_forked_from_the_one_that_made_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = SimpleNamespace()
    with fitted_folder(None) as place:
        place.path.mkdir()
        place.go_with(run)
    child = os.fork()
    if child == 0:
        del run
        os._exit(0)
    os.waitpid(child, 0)
    assert place.path.is_dir(), "the child let go of its copy of the run"
    del run
    assert not list(tmp_path.iterdir()), "whoever made it removes it"
