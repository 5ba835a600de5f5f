"""The weight of an event: how much it counts as something to learn, 0 for an event that is only read.

Shapes: N rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recbft.datasets.columns import as_floats, is_blank, is_text, refuse_first, stands_for_nothing
from recbft.errors import UserError

_MISSING = "but a weight may not be missing; fill it in (0: the event is read and teaches nothing), or drop the row"
_NO_WEIGHT = "but a weight must be a number >= 0"


def read_weights(column: Any, name: str, source: str) -> NDArray[np.float64]:
    """An arrow column of weights as numbers, (N,).

    Raises:
        UserError: a value is missing, negative, infinite or no number; the message names the first row.

    >>> read_weights(pa.array(["1", "0.5"]), "weight", "events").tolist()
    [1.0, 0.5]
    """
    missing = stands_for_nothing(column) if is_text(column.type) else is_blank(column)
    refuse_first(missing, column, name, source, _MISSING)
    if is_text(column.type):
        text = pc.utf8_trim_whitespace(column.cast(pa.large_string()))
        numbers = np.asarray(pd.to_numeric(text.to_pandas(), errors="coerce"), dtype=np.float64)
    else:
        found = as_floats(column.cast(pa.int8()) if pa.types.is_boolean(column.type) else column)
        if found is None:
            raise UserError(f"{source}: column {name!r} has type {column.type}, {_NO_WEIGHT}")
        numbers = found
    refuse_first(~((numbers >= 0) & (numbers < np.inf)), column, name, source, _NO_WEIGHT)
    return np.array(numbers)  # a copy: arrow's memory is read-only
