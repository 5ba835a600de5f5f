"""Tensors as a safetensors file, straight from where they lie: writing a model must not take its memory twice.

    8 bytes     the length of the header, least byte first
    header      JSON by name: dtype, shape, first and last byte after the header; blanks up to a multiple of 8
    the rest    the numbers, tensors of wider numbers first so that each stands at a multiple of its width

Source: https://huggingface.co/docs/safetensors, which also reads it; its own writer first makes copies of all tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

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


def file_parts(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """What the file holds, part by part; the parts of tensors are views of their memory.

    Args:
        tensors: by name, contiguous and on the CPU.
    """
    header, start, views = {}, 0, []
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        shape, stop = list(tensor.shape), start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [start, stop]}
        views.append(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(len(text).to_bytes(8, "little") + text), *views]
