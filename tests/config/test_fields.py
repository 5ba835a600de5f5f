from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recbft.config.fields import Verbatim, check_range, convert, from_dict, to_dict, verbatim
from recbft.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.1
    mode: Literal["exact", "low_rank", "off"] = "exact"

    def __post_init__(self) -> None:
        check_range("rate", self.rate, at_least=0, below=1)
        if self.rate == 0.25:
            raise UserError("the rate may not be a quarter; give another")


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    width: int = 64
    scale: float = 1.0
    on: bool = False
    clip: float | None = None
    label: str | None = None
    width_or_auto: int | Literal["auto"] = "auto"
    switch: Literal["on", "off", "auto"] = "auto"
    ks: tuple[int, ...] = (5, 10)
    inner: Inner = dataclasses.field(default_factory=Inner)
    other: Inner | None = None
    root: str | None = dataclasses.field(default=None, metadata={"saved": False})


def test_a_config_and_its_mapping_turn_into_each_other():
    config = Outer(name="a", clip=0.5, ks=(1, 2), inner=Inner(rate=0.2), other=Inner(mode="off"))
    mapping = to_dict(config)
    assert mapping["ks"] == [1, 2] and mapping["inner"] == {"rate": 0.2, "mode": "exact"}
    assert from_dict(Outer, mapping) == config


@given(
    width=st.integers(1 - 2**63, 2**63 - 1),
    scale=st.floats(-3.4e38, 3.4e38),
    clip=st.none() | st.floats(0, 1e6),
    ks=st.lists(st.integers(1 - 2**63, 2**63 - 1), max_size=4),
    rate=st.floats(0, 0.2),
)
def test_any_valid_config_survives_the_round_trip(width, scale, clip, ks, rate):
    config = Outer(name="x", width=width, scale=scale, clip=clip, ks=tuple(ks), inner=Inner(rate=rate))
    assert from_dict(Outer, to_dict(config)) == config


def test_a_field_marked_unsaved_stays_out_of_the_mapping():
    assert "root" not in to_dict(Outer(name="a", root="/data"))


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("scale", 2, 2.0),
        ("scale", np.float32(0.5), 0.5),
        ("width_or_auto", np.array(3), 3),
        ("switch", False, "off"),
        ("scale", "1e-3", 1e-3),
        ("clip", "none", None),
        ("ks", "5,10,20", (5, 10, 20)),
        ("ks", 10, (10,)),
        ("width_or_auto", 3, 3),
        ("inner", {"mode": False}, Inner(mode="off")),
    ],
)
def test_lossless_conversions_are_made(key, value, wanted):
    got = getattr(from_dict(Outer, {"name": "a", key: value}), key)
    assert got == wanted and type(got) is type(wanted)


@pytest.mark.parametrize("word", ["None", "~"])
def test_a_word_that_means_null_is_text_where_it_is_meant_as_it_stands(word):
    assert from_dict(Outer, {"name": "a", "label": word}).label is None
    label = from_dict(Outer, {"name": "a", "label": Verbatim(word)}).label
    assert label == word and type(label) is str
    outer = Outer(name="a", label=word, switch="off", other=Inner(mode="off"), clip=1.0)
    assert from_dict(Outer, verbatim(to_dict(outer))) == outer
    with pytest.raises(UserError, match=f"clip is '{word}'; give a number or null"):
        from_dict(Outer, {"name": "a", "clip": Verbatim(word)})


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, "name is missing; give text"),
        ({"name": "a", "widht": 3}, "unknown key 'widht'; did you mean 'width'?"),
        ({"name": 3}, "name is 3; give text"),
        ({"name": "a", "width": True}, "width is True; give a whole number"),
        ({"name": "a", "width": "12"}, "width is '12'; give a whole number"),
        ({"name": "a", "width": 2**63}, "width is about 2^63; give a whole number within +-2^63"),
        ({"name": "a", "scale": "much"}, "scale is 'much'; give a number"),
        ({"name": "a", "scale": "\u0663"}, "scale is '\u0663'; give a number"),
        ({"name": "a", "scale": float("nan")}, "scale is nan; give a number"),
        ({"name": "a", "on": 1}, "on is 1; give true or false"),
        ({"name": "a", "clip": "x"}, "clip is 'x'; give a number or null"),
        ({"name": "a", "ks": [5, "x"]}, "ks is 'x'; give a whole number"),
        ({"name": "a", "width_or_auto": "x"}, "width_or_auto is 'x'; give a whole number or one of auto"),
        ({"name": "a", "inner": 3}, "inner is 3; give keys and values"),
        ({"name": "a", "inner": {"mode": "lowrank"}}, "inner.mode is 'lowrank'; did you mean 'low_rank'?"),
        ({"name": "a", "inner": {"rate": 1.5}}, "inner.rate is 1.5; give a number >= 0 and < 1"),
        ({"name": "a", "inner": {"rate": 0.25}}, "inner: the rate may not be a quarter; give another"),
    ],
)
def test_a_wrong_mapping_is_refused_with_key_value_and_remedy(mapping, message):
    with pytest.raises(UserError) as error:
        from_dict(Outer, mapping)
    assert str(error.value) == message


def test_an_array_is_no_choice():
    with pytest.raises(UserError, match=r"^inner\.mode is array\(\[1, 2\]\); choose one of exact, low_rank, off"):
        from_dict(Outer, {"name": "a", "inner": {"mode": np.array([1, 2])}})


def test_a_range_names_the_section_and_refuses_nan():
    with pytest.raises(UserError, match=r"^core\.rate is -1\.0; give a number >= 0 and < 1$"):
        from_dict(Inner, {"rate": -1}, "core")
    with pytest.raises(UserError, match="rate is nan; give a number >= 0 and < 1"):
        check_range("rate", math.nan, at_least=0, below=1)


@pytest.mark.parametrize(
    ("bound", "inside", "outside"),
    [
        ({"at_least": 2}, (2, 2.1), (1.9, 1)),
        ({"above": 2}, (2.1, 3), (2, 2.0)),
        ({"at_most": 2}, (2, 1.9), (2.1, 3)),
        ({"below": 2}, (1.9, 1), (2, 2.0)),
        ({"above": 0, "at_most": 2}, (1, 2), (0, 3)),
    ],
)
def test_a_bound_is_inside_or_outside_as_its_sign_says(bound, inside, outside):
    for value in inside:
        check_range("rate", value, **bound)
    for value in outside:
        with pytest.raises(UserError, match="rate is "):
            check_range("rate", value, **bound)


def test_a_range_says_which_kind_of_number_it_wants_and_lets_none_pass():
    with pytest.raises(UserError, match=r"^width is 0; give a whole number > 0 and <= 8$"):
        check_range("width", 0, above=0, at_most=8)
    with pytest.raises(UserError, match="width is 'wide'; give a number >= 1"):
        check_range("width", "wide", at_least=1)  # type: ignore[arg-type]
    check_range("clip", None, above=0)


@pytest.mark.parametrize("value", [1e308, -3.5e38, "1e39", 10**39, 10**4000])
def test_a_number_that_single_precision_does_not_hold_is_refused_at_once(value):
    said = r"core\.lam_max is (-?[\d.]+e\+\d+|about 2\^\d+); give a number within \+-3\.4e\+38"
    with pytest.raises(UserError, match=said):
        convert(value, float, "core.lam_max")
    assert convert(3.3e38, float | None, "x") == 3.3e38
