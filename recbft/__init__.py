"""recbft: sequential recommendation with models that carry uncertainty.

>>> from recbft import Dataset, Recommender, compare

``Dataset.from_frame`` and ``Dataset.load`` make histories of events. ``Recommender(model, arm=...).fit(dataset)``
trains a model, which then evaluates, recommends and explains. ``compare`` tests arms, which are configurations of a
model, against each other over seeds.
"""

from __future__ import annotations

import importlib
import os
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recbft.api import Dataset, Recommender
    from recbft.api.compare import compare

__all__ = ["Dataset", "Recommender", "__version__", "compare"]
_PLACES = {"Dataset": "recbft.api", "Recommender": "recbft.api", "compare": "recbft.api.compare"}

# Idle OpenMP threads spin for milliseconds by default. Where another program takes a core everyone waits for them: an
# epoch of 0.1 s lasted up to 30 s on 2 cores, below 1 s with this count, and on a quiet machine no longer than before.
# GNU's OpenMP reads it when PyTorch is imported, here or in a process that this one begins.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def _check_pair() -> None:
    """Say which pyarrow goes with which numpy: a requirement cannot, and pyarrow itself names no way out."""
    try:
        arrow, numpy = (metadata.version(name) for name in ("pyarrow", "numpy"))
    except metadata.PackageNotFoundError:
        return
    if int(arrow.split(".")[0]) >= 26 and int(numpy.split(".")[0]) < 2:
        raise ImportError(
            f"pyarrow {arrow} needs numpy 2 or later, and numpy is {numpy}; pip install 'pyarrow<26', or 'numpy>=2' if "
            "nothing else here needs numpy 1"
        )


_check_pair()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``import recbft`` stays light."""
    if name == "__version__":
        from recbft.system import recbft_version

        return recbft_version()
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'recbft' has no attribute {name!r}")
