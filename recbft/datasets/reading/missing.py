"""Values that are lost: the words that data bases, spreadsheets and programs write in their place, and rounded ids."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

# What pandas takes for a missing value.
PANDAS_WORDS = frozenset(
    ",#N/A,#N/A N/A,#NA,-1.#IND,-1.#QNAN,-NaN,-nan,1.#IND,1.#QNAN,<NA>,N/A,NA,NULL,NaN,None,n/a,nan,null".split(",")  # noqa: SIM905  a table
)
WORDS = frozenset({word.lower() for word in PANDAS_WORDS} | {"nat", "\\n", "(null)", "undefined"})  # in small letters

SPREADSHEET_NUMBER = r"^\s*\d(\.\d+)?E\+\d{2,}\s*$"  # 1.23457E+12, in whose place a spreadsheet shows its first digits


def stands_for_nothing(text: Any) -> Any:
    """A mask of an arrow column of text: which values are blank, or a word for a missing one in any letters."""
    words = pc.ascii_lower(pc.utf8_trim_whitespace(text.cast(pa.large_string())))
    return pc.or_(pc.is_null(words), pc.is_in(words, value_set=pa.array(sorted(WORDS), pa.large_string())))


def warn_of_lost_ids(ids: NDArray[Any], counts: NDArray[np.int64], side: str, source: str, *, stacklevel: int) -> None:
    """Warn of ids in the place of lost ones: all events whose own is lost are then those of one user, or one item.

    Args:
        ids: raw ids, each once.
        counts: their numbers of events.
        side: ``"user"`` or ``"item"``.
        stacklevel: 1 for the function that calls this one.
    """
    if ids.dtype != object:
        return
    texts = pa.array(ids, pa.large_string())
    is_rounded = pc.match_substring_regex(texts, SPREADSHEET_NUMBER)
    for mask, said in (
        (
            stands_for_nothing(texts),
            "is a word for a missing id, but counts as any other id; if the id is missing there, leave its rows out",
        ),
        (is_rounded, "looks like a number that a spreadsheet has rounded, several ids to one; export ids as text"),
    ):
        found = np.flatnonzero(mask.to_numpy(zero_copy_only=False))
        if len(found):
            most = found[counts[found].argmax()]
            more = f"; {len(found) - 1:,} more like it" if len(found) > 1 else ""
            warnings.warn(
                f"{source}: {side} id {ids[most]!r} ({counts[most]:,} events{more}) {said}", stacklevel=stacklevel + 1
            )
