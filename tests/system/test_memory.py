"""Keeping what a step has freed: fewer page faults where glibc is, nothing elsewhere; what a shortage is."""

from __future__ import annotations

import ctypes
import json
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch

from recbft.system import memory

FAULTS = """
import ctypes, json, resource, sys
from recbft.system.memory import keep_freed_memory

said = keep_freed_memory() if sys.argv[1] == "keep" else None
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p

def step():
    taken = [library.malloc(6_000_000) for _ in range(30)]
    for address in taken:
        ctypes.memset(address, 1, 6_000_000)
    for address in taken:
        library.free(ctypes.c_void_p(address))

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(json.dumps([said, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before]))
"""


def faults(how):
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_memory_taken_again_costs_no_page_faults():
    (said, kept), (_, usual) = faults("keep"), faults("leave")
    assert said is True
    assert kept < 1000 < usual


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert memory.keep_freed_memory() is False


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 139.80 GiB in all."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        torch.distributed.DistBackendError("NCCL error: ncclUnhandledCudaError ... Cuda failure 2 'out of memory'"),
    ],
    ids=str,
)
def test_the_words_of_every_allocator_are_understood(error):
    assert memory.is_shortage(error)
    assert not memory.is_shortage(RuntimeError("shapes differ"))


def test_what_the_cpu_s_allocators_refuse_is_a_shortage():
    for asked in (
        lambda: np.empty(1 << 50, dtype=np.uint8),
        lambda: torch.empty(1 << 50),
        lambda: torch.empty(1 << 62, 1 << 62),
    ):
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            asked()
        assert memory.is_shortage(caught.value)
