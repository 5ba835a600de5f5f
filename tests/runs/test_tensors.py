"""Nested state comes back as it was; safetensors files are read back by the library that defines the format."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch

from recbft.runs.tensors import file_parts, flatten, restore

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


def round_trip(value):
    tensors = {}
    tree = json.loads(json.dumps(flatten(value, "x", tensors)))
    return restore(tree, tensors), tensors


def test_plain_values_tuples_and_whole_number_keys_come_back_as_they_were():
    value = {
        0: {"betas": (0.9, 0.999), "lr": 1e-3, "fused": None, "amsgrad": False},
        "params": [0, 1],
        "n": (1, (2,), []),
    }
    back, tensors = round_trip(value)
    assert back == value and tensors == {}
    assert isinstance(back[0]["betas"], tuple) and back[0]["amsgrad"] is False


def test_tensors_are_named_by_their_place():
    value = {"state": {0: {"step": torch.tensor(3.0)}}, "more": [torch.ones(2)]}
    back, tensors = round_trip(value)
    assert set(tensors) == {"x.state.0.step", "x.more.0"}
    assert back["state"][0]["step"] is value["state"][0]["step"]


def test_a_dictionary_that_looks_like_a_marker_is_not_taken_for_one():
    value = {"tensor": "x", "map": [1], "tuple": []}
    assert round_trip(value)[0] == value


def test_what_cannot_be_held_is_refused_by_name():
    with pytest.raises(TypeError, match=r"x\.hook is a function, which a checkpoint cannot hold"):
        flatten({"hook": round_trip}, "x", {})
