"""The state of a run after an epoch, kept so that a kill at any moment leaves the old state or the new one.

    checkpoint/epoch-00012-1f0c9a3e.safetensors   parameters, buffers, optimiser tensors, random state
    checkpoint/best-00009-77d0ab12.safetensors    parameters and buffers of the best epoch, by their own names
    checkpoint/state.json                         everything else, and the size and SHA-256 of the files that belong

``state.json`` is the one point where a state becomes the current one. A tensor file is named for its content, so
writing never touches the file in use; only after ``state.json`` names the new files are the superseded ones removed.
Whatever is read is checked against its size and hash: a ``UserError`` names the file that is missing or changed.

An optimiser's ``state_dict()`` mixes numbers with tensors, tuples and whole-number keys, which JSON does not keep. A
mapping becomes ``{"map": [[key, value], ...]}``, a tuple ``{"tuple": [...]}``, a tensor ``{"tensor": name}``; lists,
text, numbers, booleans and None stand for themselves.

A tensor file is written straight from where the tensors lie, so writing a model does not take its memory twice:

    8 bytes     the length of the header, least byte first
    header      JSON by name: dtype, shape, first and last byte after the header; blanks up to a multiple of 8
    the rest    the numbers, tensors of wider numbers first so that each stands at a multiple of its width

Source: https://huggingface.co/docs/safetensors, which also reads it; its own writer first makes copies of all tensors.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recbft.autograd.on_host import on_host
from recbft.errors import UserError
from recbft.system import recbft_version
from recbft.system.files import plain, read_json, remove, write_atomic

STATE_FILE = "state.json"
FORMAT = 3
READABLE = (2, FORMAT)  # 2 does not say of which run it is, nor on what it was trained
_FILE_NAME = re.compile(r"(epoch|best)-\d{5,}-[0-9a-f]{8}\.safetensors")  # as ``_write_tensors`` makes it
_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.float64: "F64",
}
_START_AFRESH = "the checkpoint is damaged: restore the file from a copy, or train again into a new folder"


@dataclass(kw_only=True)
class TrainState:
    """Where a run stands; plain values only."""

    epoch: int  # epochs completed
    step: int  # optimiser steps taken
    seed: int
    dataset: str  # its name, for messages
    content_hash: str
    vocabulary_hash: str
    config_hash: str
    best_metric: float | None = None  # of the validation metric that stops the run early
    best_epoch: int | None = None
    bad_epochs: int = 0  # validations since the best one
    fresh_precision: bool = False  # the run began from one without precision, which is ramped in
    run: str | None = None  # as ``RunFolder.identity`` gives it
    digits_from: dict[str, Any] = field(default_factory=dict)  # as ``environment.digits_from`` gives it
    recbft_version: str = field(default_factory=recbft_version)


@dataclass(frozen=True)
class Loaded:
    """What ``load`` gives back: the arguments of ``snapshot``."""

    state: TrainState
    model_state: dict[str, Tensor]
    optimizer_state: dict[str, Any]
    rng_state: Any
    controllers_state: dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """A state that is to be saved, its tensors on the CPU."""

    state: dict[str, Any]
    tensors: dict[str, Tensor]
    trees: dict[str, Any]
    best: dict[str, Tensor] | None


def snapshot(
    *,
    model_state: Mapping[str, Tensor],
    optimizer_state: Mapping[str, Any],
    rng_state: Any,
    state: TrainState,
    best_model_state: Mapping[str, Tensor] | None = None,
    controllers_state: Mapping[str, Any] | None = None,
    apart: bool = True,
) -> Snapshot:
    """A state as it is now, for ``write``.

    Args:
        model_state, optimizer_state: the ``state_dict()`` of the model and of the optimiser.
        rng_state: random state as a tensor, or tensors in mappings and sequences.
        state: the rest.
        best_model_state: the model's ``state_dict()`` if this epoch is the best so far; None keeps the one saved last.
        controllers_state: that of the controllers, if there are any.
        apart: with tensors of its own, so that training may go on before it is written.
    """
    tensors: dict[str, Tensor] = {}
    trees = {
        "optimizer": flatten(optimizer_state, "optimizer", tensors),
        "rng": flatten(rng_state, "rng", tensors),
        "controllers": flatten(controllers_state or {}, "controllers", tensors),
    }
    tensors |= {f"model.{name}": tensor for name, tensor in model_state.items()}
    best = None if best_model_state is None else on_host(best_model_state, apart=apart)
    return Snapshot(asdict(state), on_host(tensors, apart=apart), trees, best)


def write(folder: str | Path, snapshot: Snapshot) -> None:
    """Make this the state that ``load`` finds; where the disk is full, the state saved last is untouched."""
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    epoch, best = snapshot.state["epoch"], _read_state(folder)["best"] if exists(folder) else None
    if snapshot.best is not None:
        best = _write_tensors(folder, f"best-{epoch:05d}", snapshot.best)
    content = {
        "format": FORMAT,
        "state": snapshot.state,
        "tensors": _write_tensors(folder, f"epoch-{epoch:05d}", snapshot.tensors),
        "best": best,
        "trees": snapshot.trees,
    }
    text = json.dumps({"sha256": _digest(content), **content}, indent=1, default=plain, allow_nan=False)
    write_atomic(folder / STATE_FILE, text.encode())
    _remove_unnamed(folder, content)


def exists(folder: str | Path) -> bool:
    """Whether there is a state to load."""
    return (Path(folder) / STATE_FILE).is_file()


def load(folder: str | Path) -> Loaded:
    """The state saved last, checked against its sizes and hashes."""
    content = _read_state(Path(folder))
    tensors = _read_tensors(Path(folder), content["tensors"])
    try:
        trees = {name: restore(content["trees"][name], tensors) for name in ("optimizer", "rng", "controllers")}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _not_a_state(Path(folder) / STATE_FILE) from None
    return Loaded(
        state=TrainState(**content["state"]),
        model_state={name[6:]: tensor for name, tensor in tensors.items() if name.startswith("model.")},
        optimizer_state=trees["optimizer"],
        rng_state=trees["rng"],
        controllers_state=trees["controllers"],
    )


def load_state(folder: str | Path) -> TrainState:
    """The plain part of the state saved last."""
    return TrainState(**_read_state(Path(folder))["state"])


def load_best(folder: str | Path) -> dict[str, Tensor]:
    """Parameters and buffers of the best epoch."""
    folder = Path(folder)
    best = _read_state(folder)["best"]
    while best is not None:
        try:
            return _read_tensors(folder, best)
        except UserError:
            before, best = best, _read_state(folder)["best"]
            if best == before:
                raise
            # A training that goes on has just put better ones in their place.
    raise _no_best(folder)


def best_digest(folder: str | Path) -> str:
    """SHA-256 of the file with the best weights."""
    best = _read_state(Path(folder))["best"]
    if best is None:
        raise _no_best(folder)
    return str(best["sha256"])


def _no_best(folder: str | Path) -> UserError:
    return UserError(f"{folder} holds no best weights: training stopped before its first validation; resume it")


def check_dataset(
    state: TrainState, *, dataset: str, content_hash: str, vocabulary_hash: str, folder: str | Path
) -> None:
    """Refuse to go on training with data other than the checkpoint's."""
    if state.vocabulary_hash != vocabulary_hash:
        other = "a changed vocabulary of" if state.dataset == dataset else "another data set,"
        raise UserError(
            f"{folder} is a checkpoint of data set {state.dataset!r} (item vocabulary {state.vocabulary_hash[:12]}), "
            f"and this is {other} {dataset!r} ({vocabulary_hash[:12]}); load the data it was trained on"
        )
    if state.content_hash != content_hash:
        raise UserError(
            f"{folder} is a checkpoint of data set {state.dataset!r} with content {state.content_hash[:12]}, but "
            f"{dataset!r} as loaded has {content_hash[:12]}; load the data it was trained on, prepared the same way"
        )


def take_up(model: nn.Module, state: Mapping[str, Tensor], *, folder: str | Path) -> None:
    """Give a model the parameters and buffers that were saved, to train it on.

    Those of another dtype are refused: PyTorch would convert them silently.
    """
    for name, own in model.state_dict().items():
        if name in state and state[name].dtype != own.dtype:
            raise UserError(
                f"{folder} was trained in {state[name].dtype}, and this process works in {own.dtype}; go on after "
                f"torch.set_default_dtype({state[name].dtype})"
            )
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        first = " ".join(str(error).partition(":")[2].split())[:200]
        raise UserError(
            f"{folder} holds another model than its run's configuration makes today ({first}), as of another commit; "
            "go on with the recbft that began it"
        ) from None


def vocabulary_hash(item_ids: NDArray[Any]) -> str:
    """SHA-256 of the raw item ids in order, (V,), by their text."""
    digest = hashlib.sha256(b"recbft vocabulary 1")
    for raw in np.asarray(item_ids).tolist():
        text = str(raw).encode()
        digest.update(len(text).to_bytes(4, "little") + text)
    return digest.hexdigest()


def flatten(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON of ``value``; its tensors are added to ``tensors`` under names that start with ``name``."""
    if isinstance(value, Tensor):
        assert name not in tensors, f"two tensors are called {name}"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"map": [[key, flatten(part, f"{name}.{key}", tensors)] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        parts = [flatten(part, f"{name}.{place}", tensors) for place, part in enumerate(value)]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{name} is a {type(value).__name__}, which a checkpoint cannot hold")


def restore(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of ``flatten``."""
    if isinstance(tree, list):
        return [restore(part, tensors) for part in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(restore(part, tensors) for part in content)
    return {key: restore(part, tensors) for key, part in content}


def file_parts(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """The file of contiguous tensors on the CPU, part by part; the parts of tensors are views of their memory."""
    header, start, views = {}, 0, []
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        shape, stop = list(tensor.shape), start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [start, stop]}
        views.append(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(len(text).to_bytes(8, "little") + text), *views]


def _write_tensors(folder: Path, prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write a file, named for its content, of contiguous tensors on the CPU; return what ``state.json`` keeps of it."""
    parts = file_parts(tensors)
    content = hashlib.sha256()
    for part in parts:
        content.update(part)
    digest = content.hexdigest()
    name = f"{prefix}-{digest[:8]}.safetensors"
    write_atomic(folder / name, lambda file: file.writelines(parts))
    return {"file": name, "bytes": sum(len(part) for part in parts), "sha256": digest}


def _not_a_state(path: Path) -> UserError:
    return UserError(f"{path} is truncated or is not a checkpoint's state; {_START_AFRESH}")


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE_FILE
    try:
        content = read_json(path)
        digest = content.pop("sha256")
    except FileNotFoundError:
        raise UserError(f"{folder} holds no checkpoint: {STATE_FILE} is missing; train into a new folder") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _not_a_state(path) from None
    if content.get("format") not in READABLE:
        raise UserError(
            f"{path} has format {content.get('format')!r}, and this recbft reads formats "
            f"{' and '.join(map(str, READABLE))}; use the recbft that wrote it"
        )
    known = {one.name for one in fields(TrainState)}
    try:
        is_own = digest == _digest(content) and set(content["state"]) <= known
        TrainState(**content["state"])
        files = [content["tensors"], *([content["best"]] if content["best"] is not None else [])]
        is_own = is_own and all(
            _FILE_NAME.fullmatch(each["file"]) and each["bytes"] and each["sha256"] for each in files
        )
    except (ValueError, KeyError, TypeError, RecursionError):  # it holds what was never written, such as NaN
        is_own = False
    if not is_own:
        raise UserError(f"{path} was changed after it was written; {_START_AFRESH}")
    return dict(content)


def _read_tensors(folder: Path, record: Mapping[str, Any]) -> dict[str, Tensor]:
    path = folder / record["file"]
    if not path.is_file():
        raise UserError(f"{path} is missing; {_START_AFRESH}")
    size = path.stat().st_size
    if size != record["bytes"]:
        raise UserError(f"{path} has {size} bytes where {record['bytes']} were written; {_START_AFRESH}")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        raise UserError(f"{path} was changed after it was written (its SHA-256 differs); {_START_AFRESH}")
    tensors: dict[str, Tensor] = safetensors.torch.load(data)
    return tensors


def tidy(folder: str | Path) -> None:
    """Remove what a process killed right after a save left of the one before; for whoever trains the run."""
    _remove_unnamed(Path(folder), _read_state(Path(folder)))


def _remove_unnamed(folder: Path, content: Mapping[str, Any]) -> None:
    """Remove superseded tensor files, and what a killed process left half-written."""
    named = {content["tensors"]["file"], content["best"] and content["best"]["file"]}
    for path in [*folder.glob("*.safetensors"), *folder.glob(".*.tmp")]:
        if path.name not in named:
            remove(path)


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=plain, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
