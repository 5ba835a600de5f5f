"""Words that stand where a value is missing, as data bases, spreadsheets and programs write them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

# What pandas takes for a missing value.
PANDAS_WORDS = frozenset(
    ",#N/A,#N/A N/A,#NA,-1.#IND,-1.#QNAN,-NaN,-nan,1.#IND,1.#QNAN,<NA>,N/A,NA,NULL,NaN,None,n/a,nan,null".split(",")  # noqa: SIM905  a table
)
WORDS = frozenset({word.lower() for word in PANDAS_WORDS} | {"nat", "\\n", "(null)", "undefined"})  # in small letters


def stands_for_nothing(text: Any) -> Any:
    """A mask of an arrow column of text: which values are blank, or a word for a missing one in any letters."""
    words = pc.ascii_lower(pc.utf8_trim_whitespace(text.cast(pa.large_string())))
    return pc.fill_null(pc.is_in(words, value_set=pa.array(sorted(WORDS), pa.large_string())), True)
