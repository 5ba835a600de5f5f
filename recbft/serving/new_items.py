"""Items that came after training: a model that reads item features lists them at once, by their content alone.

Shapes: V items known in training, N new ones, F content width.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recbft.datasets.columns import flat
from recbft.datasets.content import Content, ItemContent
from recbft.datasets.features import ItemFeatures
from recbft.datasets.vocabulary import Vocabulary, joined_ids, shown_id
from recbft.errors import UserError
from recbft.models.backbone import Backbone
from recbft.models.content_cosine import ContentCosine
from recbft.models.contract import SequenceModel
from recbft.models.join import PARTS, Join


class Grown(NamedTuple):
    """A model with more items."""

    model: SequenceModel
    vocabulary: Vocabulary
    counts: Tensor  # (V + N + 1,) events of each item in training, 0 for the new ones
    num_new: int  # N
    features: ItemFeatures | None  # of the new ones, in their order


def with_items(
    model: Any,
    vocabulary: Vocabulary,
    counts: Tensor,
    folder: Path,
    given: Any,
    *,
    item: str | None = None,
    events: Mapping[Any, int] | None = None,
) -> Grown:
    """The model with the items that ``given`` has and the vocabulary lacks; see ``Recommender.with_items``.

    Args:
        folder: that of the transform of the run's features.
        given: a frame, a file or several, or features.
        item: the column with the item ids, if it is neither that of the features in training nor ``item_id``.
        events: raw id -> how many events a new item has had so far; 0 unless given.

    Raises:
        UserError: the model, or one of those joined, reads no item features; no column of it is there; a value does not
            fit its kind.
    """
    transforms = [ItemContent.load(place) for place in _places(model, folder)]
    read = [transform.read(given, item=item) for transform in transforms]
    features = read[0]
    new = np.flatnonzero(vocabulary.encode(features.ids) == 0)
    if not len(new):
        warnings.warn(
            f"{features.source} has no new item: the model knows all {len(features.ids):,}, and what it learned of "
            "them stays, also where their features changed (training again takes these up)",
            stacklevel=3,
        )
        return Grown(model, vocabulary, counts, 0, None)
    chosen = features.aligned(features.ids[new])
    of_new = [columns.aligned(chosen.ids) for columns in read]
    each = [own.matrix(columns) for own, columns in zip(transforms, of_new, strict=True)]
    unknown = ~np.any([content.known[1:] for content in each], axis=0)
    if unknown.any():
        warnings.warn(
            f"{features.source}: {int(unknown.sum()):,} of {len(new):,} new items have no value that the model knows, "
            f"first {shown_id(chosen.ids[unknown][0])}; they stand where an item without features does",
            stacklevel=3,
        )
    elif silent := {
        name: value
        for content, columns in zip(each, of_new, strict=True)
        for name, value in _silent_columns(content, columns).items()
    }:
        name, value = next(iter(silent.items()))
        warnings.warn(
            f"{features.source}: the model knows no value that the new items have of {', '.join(map(repr, silent))} "
            f"(of {name!r} such as {value!r}), so that these columns tell nothing of them; if they should, write the "
            "values as in training",
            stacklevel=3,
        )
    longer = Vocabulary(joined_ids(vocabulary.ids, chosen.ids))
    if longer.ids.dtype != vocabulary.ids.dtype:
        warnings.warn(
            f"{features.source}: item ids were whole numbers in training, and some of the new ones are not, as "
            f"{shown_id(max(chosen.ids.tolist(), key=_is_text))}: the ids in all answers are text now",
            stacklevel=3,
        )
    seen = torch.zeros(len(longer) + 1, dtype=torch.int64)
    if events is not None:
        index = longer.encode(list(events))
        if unknown_ids := [one for one, known in zip(events, index > len(vocabulary), strict=True) if not known]:
            raise UserError(f"events counts {shown_id(unknown_ids[0])}, which is none of the new items")
        seen[torch.from_numpy(index)] = torch.tensor([int(number) for number in events.values()])
    contents = iter([torch.from_numpy(content.values[1:]) for content in each])
    grown = _grown(model, contents, seen[len(vocabulary) + 1 :])
    return Grown(grown, longer, torch.cat([counts, counts.new_zeros(len(new))]), len(new), chosen)


def _silent_columns(content: Content, features: ItemFeatures) -> dict[str, Any]:
    """The columns of which items have values, and none that is known; and the first value of each."""
    found = {}
    for name, block in content.blocks.items():
        if name in features.kinds:
            column = flat(features.table, name)
            has_value = column.is_valid().to_numpy(zero_copy_only=False)
            if has_value.any() and not content.values[1:, block].any():
                found[name] = column[int(has_value.argmax())].as_py()
    return found


def _is_text(raw: Any) -> bool:
    return not str(raw).isdecimal()


def _places(model: Any, folder: Path, who: str = "this model") -> list[Path]:
    """Where the transform of each model's features lies: of the models that are joined in their order."""
    if isinstance(model, Join):
        named = zip(PARTS, model.parts, strict=True)
        return [
            place for name, part in named for place in _places(part, folder / name, f"the {name} model of this join")
        ]
    if isinstance(model, ContentCosine) or (isinstance(model, Backbone) and model.item_belief is not None):
        return [folder]
    raise UserError(
        f"{who} knows items by their numbers alone, so it cannot list new ones; train it with item features "
        "(Dataset.from_frame(events, items=...), or --items in a shell)"
    )


def _grown(model: Any, contents: Iterator[Tensor], counts: Tensor) -> Any:
    """The model, or both of a join, with N more items, of content as it comes and with ``counts`` events so far."""
    if isinstance(model, Join):
        first, second = (_grown(part, contents, counts) for part in model.parts)
        return model.of_grown(first, second, len(counts))
    content = next(contents)
    return model.with_items(content) if isinstance(model, ContentCosine) else model.with_items(content, counts)
