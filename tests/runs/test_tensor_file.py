"""Safetensors files written from the memory of the tensors, read back by the library that defines the format."""

from __future__ import annotations

import safetensors.torch
import torch

from recbft.runs.tensors import file_parts

TENSORS = {
    "empty": torch.zeros(0, 3),
    "matrix": torch.arange(12.0).view(3, 4),
    "number": torch.tensor(5),
    "wide": torch.tensor([1 / 3], dtype=torch.float64),
    "half": torch.tensor([0.5, -2.0], dtype=torch.float16),
    "short": torch.tensor([[1.0], [float("nan")]], dtype=torch.bfloat16),
    "mask": torch.tensor([True, False, True]),
    "random state": torch.arange(7, dtype=torch.uint8),
    'name with é and "quotes"': torch.ones(1, dtype=torch.int32),
}


def test_the_library_reads_back_every_name_type_shape_and_number():
    found = safetensors.torch.load(b"".join(file_parts(TENSORS)))
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)) if tensor.dim() else True
    assert found["number"] == 5
    assert safetensors.torch.load(b"".join(file_parts({}))) == {}


def test_the_parts_are_the_tensors_own_memory_each_at_a_multiple_of_its_width():
    header, *parts = file_parts(TENSORS)
    assert len(header) % 8 == 0
    at = {part.obj.ctypes.data: len(header) + sum(map(len, parts[:i])) for i, part in enumerate(parts) if len(part)}
    for tensor in TENSORS.values():
        if tensor.numel():
            assert at[tensor.data_ptr()] % tensor.element_size() == 0
