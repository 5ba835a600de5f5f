"""The temporary folder of a fit goes when nothing is lost with it."""

from __future__ import annotations

import tempfile

import pytest

from recbft.errors import RunError, RunInterruptedError
from recbft.fitted_folder import fitted_folder


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
