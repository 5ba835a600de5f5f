"""RecBole's way in: ``import recbft.recbole`` makes the models known to RecBole by name.

    import recbft.recbole
    from recbole.quick_start import run_recbole
    run_recbole(model="SASRecBFT", dataset="ml-100k")

Importing this package imports neither torch nor RecBole: it puts hooks in place that act when RecBole is imported, in
whatever order the two are. ``compat`` holds what an old RecBole needs on a new Python. See docs/recbole.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from recbft.recbole import compat, registry

if TYPE_CHECKING:
    from recbft.recbole.transfer import from_run, recbole_settings, to_run

_TRANSFER = ("from_run", "recbole_settings", "to_run")

__all__ = ["from_run", "recbole_settings", "to_run"]

compat.install()
registry.install()


def __getattr__(name: str) -> Any:
    if name in _TRANSFER:
        compat.require_recbole()
        return getattr(importlib.import_module("recbft.recbole.transfer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
