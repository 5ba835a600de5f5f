"""Processes forked from one that has loaded a model answer, as workers of a server that loads before it forks must."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from recbft import Recommender
from recbft.datasets.planted import synthetic_dataset
from recbft.datasets.synth import SyntheticConfig

# The child leaves with its number of threads; 9 where its lists are not those of its parent.
SCRIPT = """
import os, sys, time
import torch
from recbft import Recommender
from recbft.datasets.planted import synthetic_dataset
from recbft.datasets.synth import SyntheticConfig

def ended(child):
    ends = time.monotonic() + 120
    while time.monotonic() < ends:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, 9)
    sys.exit("the child hangs")

def answer():
    return recommender.recommend({user: items for user in range(300)}, k=5)

torch.set_num_threads(2)
dataset = synthetic_dataset(SyntheticConfig(num_users=60, num_items=80, mean_length=8))
items = dataset.decode(dataset.items[:20]).tolist()
recommender = Recommender.load(sys.argv[1])
for asked in (False, True):
    expected = answer() if asked else None
    child = os.fork()
    if child == 0:
        if asked:
            Recommender("sasrec", epochs=1, hidden_size=8, threads=2).fit(dataset)
        own = answer()
        os._exit(torch.get_num_threads() if expected is None or own.equals(expected) else 9)
    assert ended(child) == 1, asked
assert torch.get_num_threads() == 2
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_from_one_that_works_with_a_model_answers_with_one_thread(tmp_path):
    data = synthetic_dataset(SyntheticConfig(num_users=60, num_items=80, mean_length=8))
    Recommender("sasrec", arm="bft", hidden_size=8, epochs=1).fit(data, out=tmp_path / "run")
    ended = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SCRIPT, tmp_path / "run"],
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
