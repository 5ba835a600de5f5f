"""Numbers beside events. A weight: how much one counts as something to learn, 0 for an event that is only read. A
reliability: how far one can be trusted or how much it says, in any unit, such as a rating or the time spent; it may be
missing.

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
_NO_RELIABILITY = "but a reliability must be a number, or missing"


def read_weights(column: Any, name: str, source: str) -> NDArray[np.float64]:
    """An arrow column of weights as numbers, (N,).

    Raises:
        UserError: a value is missing, negative, infinite or no number; the message names the first row.

    >>> read_weights(pa.array(["1", "0.5"]), "weight", "events").tolist()
    [1.0, 0.5]
    """
    refuse_first(_missing(column), column, name, source, _MISSING)
    numbers = _numbers(column, name, source, _NO_WEIGHT)
    refuse_first(~((numbers >= 0) & (numbers < np.inf)), column, name, source, _NO_WEIGHT)
    return numbers


def read_reliabilities(column: Any, name: str, source: str) -> NDArray[np.float64]:
    """An arrow column of reliabilities as numbers, (N,), NaN where one is missing.

    Raises:
        UserError: a value is infinite or no number; the message names the first row.

    >>> read_reliabilities(pa.array(["5", "", "0.5"]), "rating", "events").tolist()
    [5.0, nan, 0.5]
    """
    numbers = _numbers(column, name, source, _NO_RELIABILITY)
    refuse_first(~(np.isfinite(numbers) | _missing(column)), column, name, source, _NO_RELIABILITY)
    numbers[~np.isfinite(numbers)] = np.nan
    return numbers


def _missing(column: Any) -> NDArray[np.bool_]:
    missing = stands_for_nothing(column) if is_text(column.type) else is_blank(column)
    return np.asarray(missing.to_numpy(zero_copy_only=False))


def _numbers(column: Any, name: str, source: str, said: str) -> NDArray[np.float64]:
    """A copy, since arrow's memory is read-only; NaN for text that is no number."""
    if is_text(column.type):
        text = pc.utf8_trim_whitespace(column.cast(pa.large_string()))
        return np.array(pd.to_numeric(text.to_pandas(), errors="coerce"), dtype=np.float64)
    numbers = as_floats(column.cast(pa.int8()) if pa.types.is_boolean(column.type) else column)
    if numbers is None:
        raise UserError(f"{source}: column {name!r} has type {column.type}, {said}")
    return np.array(numbers)
