"""Pairs of tokens in a history that are asked for at its end, by depth and length, in the place of RULER.

    ... k1 v1 ... k2 v2 ... k3 v3 ... k4 v4 ... k2 k4 k1 k3        the answer at each key is the value that followed it

Four pairs stand at random places of a window of text. Keys and values are two sets of the training text's rarest
tokens; an answer is right where its value scores highest among all values. Depth is the pair's place as a share of the
tokens before the questions, 0 the earliest, in tenths.

RULER asks in words, of models large enough to copy what they read once. Models of this size do so only where training
shows it, so that windows can be planted there likewise (``Arm.needles``). Planted tokens have no loss but for answers.

Source: Hsieh et al., RULER (arXiv 2404.06654), multi-key retrieval; Dowling et al., Memory by Design, section 4.3.
Shapes: B windows, T tokens, R planted windows, P pairs, N keys or values to choose from.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.language.text import Corpus, Windows
from recbft.datasets.batches import Batch
from recbft.evaluation.views import evaluation_mode

PAIRS, KINDS, DEPTHS = 4, 32, 10
WINDOWS = 512  # at most, of a length


class Needles(NamedTuple):
    """What pairs are made of."""

    keys: Tensor  # (N,)
    values: Tensor  # (N,)


def needles_of(corpus: Corpus) -> Needles:
    """The rarest tokens of the training text, every other one a key."""
    counts = torch.bincount(corpus.train, minlength=corpus.vocabulary + 1)[1:]
    rare = counts.argsort(stable=True)[: 2 * min(KINDS, corpus.vocabulary // 3)] + 1
    return Needles(rare[0::2], rare[1::2])


def plant(batch: Batch, needles: Needles, generator: torch.Generator, *, share: float = 1.0) -> tuple[Batch, Tensor]:
    """A batch on the CPU with pairs in a share of its windows, the first ones.

    Returns:
        The batch, and where the key stands that each of the last P places asks for, (R, P).
    """
    assert batch.target is not None
    R, T = round(share * len(batch.items)), batch.items.shape[1]
    items, target = batch.items.clone(), batch.target.clone()
    slots = (T - PAIRS) // 2

    def some(kinds: int) -> Tensor:
        return torch.rand(R, kinds, generator=generator).argsort(dim=1)[:, :PAIRS]

    place, (keys, values) = 2 * some(slots), (kinds[some(len(kinds))] for kinds in needles)
    # Column t of a target stands for token t + 1.
    planted = torch.zeros(R, T + 1, dtype=torch.bool).scatter(1, torch.cat([place, place + 1], dim=1), True)
    planted[:, T - PAIRS : T] = True
    target[:R].masked_fill_(planted[:, 1:], 0)
    target[:R, T - PAIRS :] = values
    items[:R].scatter_(1, place, keys).scatter_(1, place + 1, values)
    items[:R, T - PAIRS :] = keys
    return batch._replace(items=items, target=target), place


@torch.no_grad()
def accuracies(
    model: Any, corpus: Corpus, lengths: Sequence[int], *, tokens: int, device: torch.device
) -> list[dict[str, float]]:
    """Share of right answers in the test text by length and depth, ``tokens`` of them read at a time."""
    needles, found = needles_of(corpus), []
    for length in lengths:
        generator, rows = torch.Generator().manual_seed(0), max(1, tokens // length)
        asked, right = torch.zeros(DEPTHS), torch.zeros(DEPTHS)
        for batch in islice(Windows(corpus.test, length).batches(rows), -(-WINDOWS // rows)):
            planted, place = plant(batch, needles, generator)
            assert planted.target is not None
            with evaluation_mode(model):
                states = model.encode(planted.to(device)).mean[:, -PAIRS:]
                scores = states @ model.item_table().weight[needles.values.to(device)].T  # (B, P, N)
            hit = needles.values[scores.argmax(dim=-1).cpu()] == planted.target[:, -PAIRS:]
            tenth = (DEPTHS * place // (length - PAIRS)).flatten()
            asked += torch.bincount(tenth, minlength=DEPTHS)
            right += torch.bincount(tenth, weights=hit.flatten().float(), minlength=DEPTHS)
        for tenth in range(DEPTHS):
            if asked[tenth]:
                share = float(right[tenth] / asked[tenth])
                found.append({"length": length, "depth": tenth / DEPTHS, "accuracy": share, "asked": int(asked[tenth])})
    return found
