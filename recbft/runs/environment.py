"""Where and with what something was made: the day, the versions, the kind of machine; not whose it is."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from recbft.kernels import c_library, dispatch
from recbft.system import recbft_version

ROOT = Path(__file__).resolve().parents[2]
BUILT_FROM = Path(__file__).with_name("commit.txt")  # which setup.py writes


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """What a run and the header of a result keep of the machine, the day and the versions."""
    kind = torch.device(device).type
    return {
        "date": datetime.date.today().isoformat(),
        "recbft": recbft_version(),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "pandas": pd.__version__,
        "pyarrow": pa.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "device": torch.cuda.get_device_name(device) if kind == "cuda" else kind,
        "threads": torch.get_num_threads(),
        # Both are the process's; they decide digits.
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "matmul_precision": matmul_precision(),
        "kernels": _kernels_in_c(),  # on a CPU
    }


def digits_from(device: torch.device | str = "cpu") -> dict[str, Any]:
    """What else than its configuration and data decides the last digits of a run."""
    kind = torch.device(device).type
    made = {"torch": torch.__version__, "matmul_precision": matmul_precision()}
    if kind == "cpu":
        return {"device": cpu_model(), "threads": torch.get_num_threads(), "kernels": _kernels_in_c(), **made}
    triton = "plain" if dispatch.missing("triton") else "triton"
    return {"device": torch.cuda.get_device_name(device), "kernels": triton, **made}


def matmul_precision() -> str:
    """How products of float32 are rounded: in one word, or by backend where ``fp32_precision`` was set."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        gpu, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        return f"cuda {gpu.fp32_precision}, mkldnn {cpu.fp32_precision}"


def cpu_model() -> str:
    """The processor's model as the system names it."""
    try:
        if sys.platform == "darwin":
            return _output("sysctl", "-n", "machdep.cpu.brand_string")
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    return platform.processor() or "unknown CPU"


def commit() -> str:
    """The commit of the source, or of what an installed package was built from; marked where tracked files differed."""
    if BUILT_FROM.is_file():
        return BUILT_FROM.read_text().strip()
    try:
        # An installed package may lie inside a repository of its user's, whose commit says nothing about it.
        if Path(_output("git", "rev-parse", "--show-toplevel")).resolve() != ROOT:
            return "unknown"
        changed = _output("git", "status", "--porcelain", "--untracked-files=no")
        return _output("git", "rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _kernels_in_c() -> str:
    return "plain" if c_library.missing() else "c"


def _output(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return os.fsdecode(done.stdout).strip()  # names of folders are not UTF-8 everywhere
