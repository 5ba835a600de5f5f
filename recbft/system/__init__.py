"""The machine: files, processes, memory, and the version of what runs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def recbft_version() -> str:
    """The installed version, or "not installed" when the package runs from a bare folder."""
    try:
        return version("recbft")
    except PackageNotFoundError:
        return "not installed"
