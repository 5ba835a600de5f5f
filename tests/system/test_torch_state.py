"""Processes forked from one that has loaded a model answer, as workers of a server that loads before it forks must."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from recbft import Recommender
from recbft.datasets.planted import synthetic_dataset
from recbft.datasets.synth import SyntheticConfig
from recbft.system.torch_state import FEW_PRODUCTS, threads_for

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
    return recommender.recommend({user: items for user in range(3000)}, k=5)

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


def test_few_multiplications_are_done_on_one_thread_and_the_caller_s_threads_come_back():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for products, threads in ((FEW_PRODUCTS, 1), (FEW_PRODUCTS + 1, 2)):
            with pytest.raises(KeyError), threads_for(products):
                assert torch.get_num_threads() == threads
                raise KeyError
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("own", "spins"), [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_idle_threads_sleep_soon_unless_the_caller_says_otherwise(own, spins):
    code = "import os, recbft; print(os.environ.get('GOMP_SPINCOUNT'))"
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    found = subprocess.run([sys.executable, "-c", code], env={**kept, **own}, capture_output=True, text=True)
    assert found.stdout.strip() == spins
