"""recbft: sequential recommendation whose models know how sure they are.

>>> from recbft import Dataset, Recommender
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recbft.api import Dataset, Recommender

__all__ = ["Dataset", "Recommender", "__version__"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``import recbft`` stays light."""
    if name == "__version__":
        from recbft.version import recbft_version

        return recbft_version()
    if name in __all__:
        from recbft import api

        return getattr(api, name)
    raise AttributeError(f"module 'recbft' has no attribute {name!r}")
