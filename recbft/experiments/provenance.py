"""The header of every result: when, on what, with which versions and on which data. No host names, users or paths."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from recbft.datasets import Dataset
from recbft.run_config import RunConfig
from recbft.training.run_folder import environment

ROOT = Path(__file__).resolve().parents[2]

# Options whose values are places on one machine, and the word that a recorded command has instead.
_PLACES = {"--data-root": "DIR", "--out": "OUT", "--json": "FILE", "--config": "FILE"}
_FILES = ("-d", "--dataset")  # a name, or a file of which the name is kept


def recorded(program: str, arguments: Sequence[str]) -> str:
    """A command as it is written beside results: without the places it had on this machine.

    >>> recorded("recbft compare", ["-d", "ml-1m", "--out=/home/ann/x", "--data-root", "/data"])
    'recbft compare -d ml-1m --out OUT --data-root DIR'
    """
    words: list[str] = []
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        if words and words[-1] in _PLACES:
            words.append(_PLACES[words[-1]])
        elif words and words[-1] in _FILES:
            words.append(Path(argument).name)
        elif equals and option in _PLACES:
            words += [option, _PLACES[option]]
        else:
            words.append(argument)
    return f"{program} {shlex.join(words)}".rstrip()


def header(command: str, dataset: Dataset | None = None, *, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Date, command, device, versions, load and data; call ``close`` on it when the work is done."""
    made: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        **environment(device),
        "commit": commit(),
        "load_average_before": os.getloadavg()[0],
    }
    if dataset is not None:
        made["data"] = {
            "name": dataset.name,
            "users": dataset.num_users,
            "items": dataset.num_items,
            "events": dataset.num_events,
            "content_hash": dataset.content_hash,
            "target_hash": dataset.target_hash,
        }
    return made


def close(header: dict[str, Any]) -> dict[str, Any]:
    """Add the load after the work."""
    return header | {"load_average_after": os.getloadavg()[0]}


def lines(header: dict[str, Any]) -> list[str]:
    """The header as text."""
    h = header
    device = h["cpu"] if h["device"] == "cpu" else f"{h['device']}, {h['cpu']}"
    load = f"load average {h['load_average_before']:.1f} before"
    if "load_average_after" in h:
        load += f", {h['load_average_after']:.1f} after"
    text = [
        f"`{h['command']}`",
        f"{h['date']}, {device} ({h['machine']}, {h['system']}), {h['cores']} cores, {h['memory_gib']:g} GiB, "
        f"{h['threads']} threads per process, {load}",
        f"recbft {h['recbft']} (commit {h['commit']}), Python {h['python']}, torch {h['torch']}, numpy {h['numpy']}",
    ]
    if "data" in h:
        data = h["data"]
        text.append(
            f"{data['name']}: {data['users']:,} users, {data['items']:,} items, {data['events']:,} events, "
            f"content {data['content_hash'][:12]}, targets {data['target_hash'][:12]}"
        )
    return text


def device_of(config: RunConfig) -> torch.device:
    """Where a run with this config takes place."""
    name = config.training.device
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


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
    """The commit of the source, marked where tracked files differ from it; "unknown" for an installed package."""
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


def _output(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout.strip()
