"""A trained model in files that need no recbft: its user encoder, the vectors of its items, and an index of these.

encoder.onnx or .pt2    ``models.inference.UserEncoder``: item indices -> user vectors; 0 is padding
items.npy               (V, D) float32; a score is the product of a user vector and a row
item_ids.json           the raw id of each row; index i of the encoder is row i - 1
index.faiss             of the rows, by inner product, where it is asked for
export.json             inputs and outputs, versions, which run it is, and how it was checked

What is written is read back and held against ``recommend`` before the folder gets its name.

Shapes: N histories, T events of a history, V items, D width of a vector.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from recbft.config.fields import check_choice
from recbft.datasets.samples import ranges
from recbft.datasets.vocabulary import Vocabulary
from recbft.errors import RunError, UserError
from recbft.models.inference import UserEncoder, user_encoder
from recbft.serving.histories import Encoded, Users
from recbft.serving.lists import Asked, lists_of
from recbft.serving.vectors import item_vectors
from recbft.system import recbft_version
from recbft.system.files import new_folder, write_json

Format = Literal["onnx", "torch"]
Index = Literal["faiss"]
FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]
Encode = Callable[..., list[NDArray[Any]]]  # (items, times) -> outputs

FILES = {"onnx": "encoder.onnx", "torch": "encoder.pt2"}
PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": (), "faiss": ("faiss",)}  # by what they import as
ON_PYPI = {"faiss": "faiss-cpu"}
CHECKED = 1000  # histories, at most
AT_ONCE = 50  # of them
K = 10  # of the lists that are compared
NEAR = 1e-4  # of scores and precision, relative where they are above 1
EXACT_UP_TO = 10_000  # items among which a search for all is as fast as an index
SHARE = 0.99  # of the requests whose K best an index must find
EFFORTS = (64, 128, 256, 512, 1024)  # of a search in the graph, the least first


class Checked(NamedTuple):
    """Histories to check by."""

    histories: Encoded
    source: str  # where they are from, for who reads it


def export(
    model: Any,
    vocabulary: Vocabulary,
    out: Path,
    histories: Callable[[], Checked],
    *,
    format: Format = "onnx",
    index: Index | None = None,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """``Recommender.export``; see there.

    Args:
        histories: what makes those to check by, once nothing else is wrong.
        about: what ``export.json`` says of the run.
    """
    check_choice("format", format, get_args(Format))
    if index is not None:
        check_choice("index", index, get_args(Index))
    needed = [*PACKAGES[format], *(PACKAGES[index] if index else ())]
    if missing := [ON_PYPI.get(name, name) for name in needed if find_spec(name) is None]:
        raise UserError(f"this export needs packages that are not installed: pip install {' '.join(missing)}")
    encoder = user_encoder(model).eval()
    vectors, by = item_vectors(model, vocabulary).vectors.astype(np.float32), histories()
    with new_folder(out) as made:
        _write(encoder, made / FILES[format], format)
        np.save(made / "items.npy", vectors)
        (made / "item_ids.json").write_text(json.dumps(vocabulary.ids.tolist(), ensure_ascii=False), encoding="utf-8")
        encode = _read_back(made / FILES[format], format, encoder)
        states, checked = _held_against(model, encode, vectors, by, len(vocabulary))
        said = {
            "format": format,
            **about,
            "versions": {"recbft": recbft_version(), "torch": torch.__version__}
            | {name: metadata.version(ON_PYPI.get(name, name)) for name in needed},
            "encoder": _described(encoder, FILES[format], vectors.shape[1]),
            "reads": "the last events that the model reads are taken, however long a history is",
            "items": {"file": "items.npy", "shape": list(vectors.shape), "type": "float32"},
            "item_ids": {"file": "item_ids.json", "row": "index of the encoder - 1"},
            "score": "product of a user's vector and an item's row",
            "checked": checked,
        }
        if index:
            said["index"] = {"file": "index.faiss", **_write_index(vectors, states, made / "index.faiss")}
        write_json(made / "export.json", said)
    return said


def drawn_histories(model: Any, num_items: int) -> Checked:
    """Where the data of a run are gone: items drawn evenly, histories of up to twice the length that is read.

    Times go on by up to a million units per event.
    """
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 2 * model.max_length + 1, CHECKED)
    items = rng.integers(1, num_items + 1, lengths.sum())
    times = rng.integers(0, 10**6, lengths.sum()).cumsum() if model.reads_times else None
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Checked(Encoded(list(range(CHECKED)), items, offsets, times, 0, Users()), "drawn")


def histories_of(items: IntArray, offsets: IntArray, times: IntArray | None) -> Checked:
    """Those of some users of a data set, all of their events."""
    users = np.sort(np.random.default_rng(0).permutation(len(offsets) - 1)[:CHECKED])
    start, stop = offsets[users], offsets[users + 1]
    where = ranges(start, stop)
    ends = np.concatenate([[0], np.cumsum(stop - start)])
    own = Encoded(list(range(len(users))), items[where], ends, None if times is None else times[where], 0, Users())
    return Checked(own, "the run's data")


def _write(encoder: UserEncoder, path: Path, format: Format) -> None:
    items = torch.tensor([[1, 1, 1], [0, 1, 1]])
    names = ["items", "times"] if encoder.reads_times else ["items"]
    given = tuple(items.clone() for _ in names)  # the same tensor twice would be one input
    encoder = copy.deepcopy(encoder).requires_grad_(False)  # what reads the file asks for no gradients
    with _quiet(), torch.no_grad():
        if format == "torch":
            any_size = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
            torch.export.save(torch.export.export(encoder, given, dynamic_shapes=(any_size,) * len(names)), path)
            return
        sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
        program = torch.onnx.export(
            encoder, given, dynamo=True, dynamic_shapes=(sizes,) * len(names), verbose=False, input_names=names,
            output_names=_outputs(encoder),
        )  # fmt: skip
        assert program is not None
        program.save(path)


def _outputs(encoder: UserEncoder) -> list[str]:
    return ["vector", "precision"] if encoder.keeps_precision else ["vector"]


def _described(encoder: UserEncoder, file: str, width: int) -> dict[str, Any]:
    grid = {"type": "int64", "shape": ["batch", "length"]}
    inputs = {"items": {**grid, "holds": "item indices, oldest first; 0 is padding and may stand anywhere"}}
    if encoder.reads_times:
        inputs["times"] = {**grid, "holds": "when each event was, in the unit of the training data"}
    outputs: dict[str, Any] = {"vector": {"type": "float32", "shape": ["batch", width]}}
    if encoder.keeps_precision:
        outputs["precision"] = {
            "type": "float32",
            "shape": ["batch"],
            "holds": "mean posterior precision (1 / variance)",
        }
    return {"file": file, "inputs": inputs, "outputs": outputs}


def _read_back(path: Path, format: Format, encoder: UserEncoder) -> Encode:
    """What the written file gives for padded histories."""
    if format == "torch":
        module = torch.export.load(path).module()

        def by_torch(*given: IntArray) -> list[NDArray[Any]]:
            with torch.inference_mode():
                return [x.numpy() for x in module(*(torch.from_numpy(x) for x in given))]

        return by_torch
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def by_onnx(*given: IntArray) -> list[NDArray[Any]]:
        return list(session.run(_outputs(encoder), dict(zip(("items", "times"), given, strict=False))))

    return by_onnx


def _held_against(
    model: Any, encode: Encode, vectors: FloatArray, by: Checked, num_items: int
) -> tuple[FloatArray, dict[str, Any]]:
    """User vectors by the written file, (N, D), and how they compare.

    Raises:
        RunError: lists are others than those of ``recommend``, but for ties, or scores or precision are not near.
    """
    histories, k = by.histories, min(K, num_items)
    asked = Asked(k, filter_seen=False)
    states, wrong, farthest = [], 0, 0.0
    for first in range(0, len(histories.users), AT_ONCE):
        rows = np.arange(first, min(first + AT_ONCE, len(histories.users)))
        expected = lists_of(model, histories, rows, asked)
        vector, *precision = encode(*_padded(histories, rows))
        scores = vector @ vectors.T
        listed = np.take_along_axis(scores, expected.items - 1, axis=1)
        off = np.abs(listed - expected.scores) / np.maximum(1, np.abs(expected.scores))
        if precision:
            off = np.column_stack([off, np.abs(precision[0] / expected.precision - 1)])
        best = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        missed = ~(best[:, :, None] == expected.items[:, None, :] - 1).any(axis=2)
        above = np.where(missed, np.take_along_axis(scores, best, axis=1), -np.inf).max(axis=1)
        is_wrong = ~(off <= NEAR).all(axis=1) | (above > listed.min(axis=1) + NEAR * np.maximum(1, np.abs(above)))
        wrong += int(is_wrong.sum())
        farthest = max(farthest, float(off.max()))
        states.append(vector)
    if wrong or not np.isfinite(farthest):
        raise RunError(
            f"of {len(histories.users):,} lists {wrong:,} are not those of recommend, with numbers up to "
            f"{farthest:.1g} off, so that nothing was written; report it with the run's config.yaml and the versions "
            "installed"
        )
    found = {"histories": len(histories.users), "from": by.source, "k": k, "largest_relative_difference": farthest}
    return np.concatenate(states), found


def _padded(histories: Encoded, rows: IntArray) -> Iterator[IntArray]:
    """Items, and times where there are some, (N, T): padded on the left, every other history on the right."""
    start, stop = histories.offsets[rows], histories.offsets[rows + 1]
    lengths = stop - start
    width = int(lengths.max())
    column = ranges(np.zeros_like(lengths), lengths) + np.repeat(np.where(rows % 2, width - lengths, 0), lengths)
    row = np.repeat(np.arange(len(rows)), lengths)
    for values in (histories.items, histories.times):
        if values is not None:
            grid = np.zeros((len(rows), width), np.int64)
            grid[row, column] = values[ranges(start, stop)]
            yield grid


def _write_index(vectors: FloatArray, states: FloatArray, path: Path) -> dict[str, Any]:
    """Write the index of least effort that finds the K best of enough requests; what it is."""
    import faiss

    k = min(K, len(vectors))
    exact = faiss.IndexFlatIP(vectors.shape[1])
    exact.add(vectors)
    least = exact.search(states, k)[0][:, -1]  # score of the K-th best
    why = f"of {len(vectors):,} items a search of all is fast"
    if len(vectors) > EXACT_UP_TO:
        graph = faiss.IndexHNSWFlat(vectors.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
        graph.hnsw.efConstruction = 200
        graph.add(vectors)
        for effort in EFFORTS:
            graph.hnsw.efSearch = effort
            found = graph.search(states, k)[0][:, -1]
            share = float((found >= least - 1e-6 * np.maximum(1, np.abs(least))).mean())
            if share >= SHARE:
                faiss.write_index(graph, str(path))
                return {"kind": "IndexHNSWFlat", "efSearch": effort, "share_exact": share}
        why = f"no graph found the {k} best of {SHARE:.0%} of the requests"
    faiss.write_index(exact, str(path))
    return {"kind": "IndexFlatIP", "share_exact": 1.0, "why": why}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what PyTorch's exporter says of itself and of packages that are not here."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
