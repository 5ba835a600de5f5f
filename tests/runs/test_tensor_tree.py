from __future__ import annotations

import json
import math

import pytest
import torch

from recbft.runs.tensors import flatten, restore


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


def test_numbers_come_back_bit_for_bit():
    value = [math.pi, 1e-300, 0.1 + 0.2, -0.0, 2**62]
    back, _ = round_trip(value)
    assert [math.copysign(1, a) for a in back] == [math.copysign(1, a) for a in value] and back == value


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
