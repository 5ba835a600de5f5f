"""Processes forked from one that has loaded a model answer, as workers of a server that loads before it forks must."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from recbft import Dataset, Recommender

# The child leaves with its number of threads; 9 where its lists are not those of its parent.
SCRIPT = """
import os, sys, time
import torch
from recbft import Dataset, Recommender

def answer():
    return recommender.recommend({user: items for user in range(300)}, k=5)

torch.set_num_threads(2)
dataset = Dataset.load("synthetic")
items = dataset.decode(dataset.items[:20]).tolist()
recommender = Recommender.load(sys.argv[1])
expected = answer() if "asked" in sys.argv else None
child = os.fork()
if child == 0:
    if "fitted" in sys.argv:
        Recommender("sasrec", epochs=1, hidden_size=8, threads=2).fit(dataset)
    own = answer()
    os._exit(torch.get_num_threads() if expected is None or own.equals(expected) else 9)
ends = time.monotonic() + 120
while time.monotonic() < ends:
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        assert torch.get_num_threads() == 2
        sys.exit(os.waitstatus_to_exitcode(status))
    time.sleep(0.05)
os.kill(child, 9)
sys.exit("the child hangs")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("forked") / "run"
    Recommender("sasrec", arm="bft", hidden_size=8, epochs=1).fit(Dataset.load("synthetic"), out=path)
    return path


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("parent_and_child", ["loaded", "asked fitted"])
def test_a_process_forked_from_one_that_works_with_a_model_answers_with_one_thread(run, parent_and_child):
    ended = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SCRIPT, run, *parent_and_child.split()],
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (1, "")
