from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from benchmarks import command
from benchmarks.command import recorded
from recbft.errors import UserError

COUNTS = {
    "kernel_speed": ["--threads"],
    "kill_resume": ["--kills"],
    "many_seeds": ["--dataset", "d", "--repeats"],
    "mechanisms.random_keys": ["--steps"],
    "mixer_speed": ["--rounds"],
    "peer_speed": ["--library", "replay", "--dataset", "d", "--epochs"],
    "train_speed": ["--dataset", "d", "--chunk-steps"],
}


def test_a_recorded_command_has_no_places_of_the_machine():
    given = ["--dataset", "ml-1m", "--data-root", "/home/x/data", "--out=/tmp/y", "--set", "epochs=2", "--json", "z"]
    assert recorded("train_speed", given) == (
        "python -m benchmarks.train_speed --dataset ml-1m --data-root DIR --out OUT --set epochs=2 --json FILE"
    )


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_number_of_something_is_at_least_one(name, text, capsys):
    command = importlib.import_module(f"benchmarks.{name}")
    with pytest.raises(SystemExit) as ended:
        command.main([*COUNTS[name], text])
    assert ended.value.code == 2
    option = COUNTS[name][-1]
    assert f"argument {option}: is {text}; give a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("release, missing, said", [
    ((3, 3), None, "needs Triton 3.4 or later, which comes with PyTorch 2.8, got 3.3"),
    ((3, 4), "Triton is not installed; pip install triton", "Triton is not installed; pip install triton"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["gpu_registers", "gpu_rehearsal"])
def test_a_triton_that_compiles_for_no_absent_gpu_is_refused(name, release, missing, said, monkeypatch):
    monkeypatch.setattr(command, "missing", lambda name: missing)
    monkeypatch.setattr(command, "release", lambda package: release)
    with pytest.raises(UserError) as refused:
        importlib.import_module(f"benchmarks.{name}").main([])
    assert str(refused.value) == said


def test_what_compiles_kernels_is_imported_without_triton():
    code = "import sys; sys.modules['triton'] = None; import benchmarks.gpu_registers, benchmarks.gpu_rehearsal"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
