"""Leave-one-out by offset arithmetic: a user's last event tests, the one before validates, the rest train.

    history of user u     e_1 ... e_{n-2}   e_{n-1}       e_n
                          training          validation    test          n = offsets[u+1] - offsets[u] >= 3

Validation ranks from the training events, test from training and validation events. Nothing is copied and no prefix is
written out: a view is two bounds and a target per user.

Shapes: U users.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recbft.datasets.dataset import Dataset


class View(NamedTuple):
    """One prediction task per user: from ``items[start:stop]`` predict ``target``."""

    start: NDArray[np.int64]  # (U,)
    stop: NDArray[np.int64]  # (U,) stop > start
    target: NDArray[np.int64]  # (U,) item index

    def rows(self, which: NDArray[np.int64] | slice) -> View:
        """The tasks of some users, by row."""
        return View(self.start[which], self.stop[which], self.target[which])


class Split(NamedTuple):
    """Training bounds and the two prediction tasks, users in the data set's order."""

    training_start: NDArray[np.int64]  # (U,)
    training_stop: NDArray[np.int64]  # (U,)
    validation: View
    test: View


def leave_one_out(dataset: Dataset) -> Split:
    """Split every history of a data set.

    >>> import pandas as pd
    >>> dataset = Dataset.from_frame(pd.DataFrame({"user_id": [1, 1, 1, 1], "item_id": list("abcd")}))
    >>> split = leave_one_out(dataset)
    >>> split.training_stop.tolist(), split.validation.target.tolist(), split.test.target.tolist()
    ([2], [3], [4])
    """
    start, stop = dataset.offsets[:-1], dataset.offsets[1:]
    return Split(
        training_start=start,
        training_stop=stop - 2,
        validation=View(start=start, stop=stop - 2, target=dataset.items[stop - 2]),
        test=View(start=start, stop=stop - 1, target=dataset.items[stop - 1]),
    )
