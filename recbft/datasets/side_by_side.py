"""Batches of several seeds laid side by side: the same number of rows of the same width for each.

Every seed has its own batch, packed as if it trained alone. Here its histories are packed once more, into rows as wide
as the longest history of all seeds; the rows of a seed follow those of the seed before it. What depended on the place
of a token in its own batch (which random bits drop it) is found through ``origin``.

Shapes: S seeds, B rows of each, T tokens per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from recbft.datasets.batches import Batch, place_histories


class SideBySide(NamedTuple):
    """One step's batches of all seeds."""

    batch: Batch  # of S B rows; histories are numbered through all seeds
    num_seeds: int
    origin: Tensor  # (S, B T) flat index of each token in its seed's own batch, 0 for padding
    place: Tensor  # (S, B T) the same where the batches of all seeds are put end to end
    widths: list[int]  # tokens per row of each seed's own batch
    sizes: list[int]  # cells of each seed's own batch, padding included

    @property
    def num_rows(self) -> int:
        """B, rows per seed."""
        return int(self.batch.items.shape[0]) // self.num_seeds


def lay_side_by_side(batches: Sequence[Batch]) -> SideBySide:
    """Lay one batch of every seed beside the others; all have the same kinds of tensors."""
    lasts = [batch.last.numpy() for batch in batches]
    lengths = [b.position.flatten().numpy()[last] + 1 for b, last in zip(batches, lasts, strict=True)]
    width = max(int(found.max()) for found in lengths)
    placed = [place_histories(found, width) for found in lengths]
    rows = max(num_rows for _, _, num_rows, _ in placed)
    sizes = [batch.items.numel() for batch in batches]
    shifts = np.cumsum([0, *sizes[:-1]])  # of each seed's own batch when all are put end to end
    origin = np.full((len(batches), rows * width), -1, dtype=np.int64)
    new_last = []
    for seed, (row, column, _, _) in enumerate(placed):
        count = lengths[seed]
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        first = row * width + column
        origin[seed, np.repeat(first, count) + within] = np.repeat(lasts[seed] - count + 1, count) + within
        new_last.append(first + count - 1 + seed * rows * width)
    padding = torch.from_numpy(origin < 0).view(-1, width)
    origin = origin.clip(min=0)
    place = torch.from_numpy(origin + shifts[:, None])
    source = place.view(-1, width)

    def join(name: str, empty: float, shifted_by: Sequence[int] | None = None) -> Tensor | None:
        fields = [getattr(batch, name) for batch in batches]
        if fields[0] is None:
            return None
        shifted = fields if shifted_by is None else [f + n for f, n in zip(fields, shifted_by, strict=True)]
        return torch.cat([field.flatten() for field in shifted])[source].masked_fill_(padding, empty)

    histories = np.cumsum([0, *(last.size for last in lasts[:-1])]).tolist()
    items, segment, position = join("items", 0), join("segment", -1, histories), join("position", 0)
    assert items is not None and segment is not None and position is not None
    batch = Batch(
        items=items,
        segment=segment,
        position=position,
        time=join("time", 0),
        target=join("target", 0),
        last=torch.from_numpy(np.concatenate(new_last)),
        next_time=join("next_time", 0),
        earlier=_end_to_end([batch.earlier for batch in batches]),
        num_earlier=_end_to_end([batch.num_earlier for batch in batches]),
        weight=join("weight", 0),
        reliability=join("reliability", float("nan")),
    )
    widths = [int(batch.items.shape[1]) for batch in batches]
    return SideBySide(batch, len(batches), torch.from_numpy(origin), place, widths, sizes)


def _end_to_end(parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None
