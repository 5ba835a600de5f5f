"""Tensors on disk: nested state as JSON plus named tensors, and the safetensors file that holds them.

An optimiser's ``state_dict()`` mixes numbers with tensors, tuples and whole-number keys, which JSON does not keep. A
mapping becomes ``{"map": [[key, value], ...]}``, a tuple ``{"tuple": [...]}``, a tensor ``{"tensor": name}``; lists,
text, numbers, booleans and None stand for themselves.

The file is written straight from where the tensors lie, so writing a model does not take its memory twice:

    8 bytes     the length of the header, least byte first
    header      JSON by name: dtype, shape, first and last byte after the header; blanks up to a multiple of 8
    the rest    the numbers, tensors of wider numbers first so that each stands at a multiple of its width

Source: https://huggingface.co/docs/safetensors, which also reads it; its own writer first makes copies of all tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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
