"""Frozen dataclass configs, made from a mapping and turned back into one.

A config is a frozen keyword-only dataclass beside the class it configures. ``from_dict`` builds one from a mapping: it
refuses unknown keys, checks every value against its annotation, and lets the class check ranges in ``__post_init__``
with ``check_range`` and ``check_choice``. ``to_dict`` is its inverse, ready for YAML. Every message names the key, the
value and what to give.

Annotations understood: int, float, str, bool, Literal[...], X | None, tuple[X, ...], and nested configs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import re
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeVar

from recbft.errors import UserError, did_you_mean

C = TypeVar("C")

NULL_WORDS = ("none", "null", "~")  # in small letters; bare, they say that an optional value is not set
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_WHOLE_BOUND = 2**63  # no tensor counts further
_REAL_BOUND = 3.4e38  # float32, in which a model computes, goes no further
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


class Verbatim(str):
    """Text that means itself also where the bare word would mean null: what is quoted in a file, or can be no null."""


def from_dict(cls: type[C], mapping: Mapping[str, Any], where: str = "") -> C:
    """Build config ``cls`` from ``mapping``; ``where`` is the section name that messages put before a key.

    Raises:
        UserError: a key is unknown or missing, or a value has the wrong type or lies out of range.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Layer:
    ...     width: int = 64
    >>> from_dict(Layer, {"widht": 32}, where="backbone")
    Traceback (most recent call last):
    recbft.errors.UserError: unknown key 'backbone.widht'; did you mean 'width'?
    """
    if not isinstance(mapping, Mapping):
        raise UserError(f"{where or 'the configuration'} is {mapping!r}; give keys and values")
    hints = field_types(typing.cast(Any, cls))
    values = {}
    for key, value in mapping.items():
        if key not in hints:
            raise UserError(f"unknown key {_dotted(where, str(key))!r}; {did_you_mean(str(key), hints)}")
        values[key] = convert(value, hints[key], _dotted(where, key))
    for field in dataclasses.fields(typing.cast(Any, cls)):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            raise UserError(f"{_dotted(where, field.name)} is missing; give {describe(hints[field.name])}")
    try:
        return cls(**values)
    except UserError as error:
        raise UserError(_placed(str(error), where, hints)) from None


def to_dict(config: Any) -> dict[str, Any]:
    """The mapping that ``from_dict`` turns back into ``config``; fields with metadata ``saved: False`` stay out."""
    return {
        field.name: _plain(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.metadata.get("saved", True)
    }


def verbatim(tree: Any) -> Any:
    """What ``to_dict`` made, for ``from_dict``: null is null there, and each text means itself."""
    if isinstance(tree, Mapping):
        return {key: verbatim(value) for key, value in tree.items()}
    return Verbatim(tree) if isinstance(tree, str) else tree


def by_setting(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config by the keys that ``--set`` takes; what is nested deeper (a controller) stays whole."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
    return found


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Field name -> resolved annotation, in the order of the class."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def convert(value: Any, annotation: Any, name: str) -> Any:
    """``value`` as ``annotation`` wants it, or a UserError naming ``name``.

    Only lossless changes are made: an int for a float, "1e-3" for a float (YAML 1.1 reads it as text), a list, one
    value or "5,10" for a tuple, "none" for None unless it is ``Verbatim``, False for the choice "off" (YAML 1.1 again),
    a number of numpy's for the plain one.
    """
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return _convert_optional(value, annotation, name)
    if isinstance(value, Verbatim):
        value = str(value)
    if origin is Literal:
        return _convert_choice(value, typing.get_args(annotation), name)
    if origin is tuple:
        return _convert_tuple(value, annotation, name)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return value if isinstance(value, annotation) else from_dict(annotation, value, name)
    if annotation in _WORDS:
        return _convert_plain(value, annotation, name)
    return value


def describe(annotation: Any) -> str:
    """What to give for ``annotation``, in words that end a message: "a whole number or null"."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else describe(arg) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join(str(arg) for arg in args)
    if origin is tuple:
        return f"a list, each {describe(args[0])}"
    return _WORDS.get(annotation, "keys and values")


def is_whole(value: object) -> bool:
    """Whether a value is a whole number, of Python or numpy; True and False are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_range(
    name: str,
    value: float | None,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Refuse a number outside its bounds (and NaN); None passes, for optional fields.

    >>> check_range("dropout", 1.5, at_least=0, below=1)
    Traceback (most recent call last):
    recbft.errors.UserError: dropout is 1.5; give a number >= 0 and < 1
    """
    if value is None:
        return
    bounds = [(">=", at_least), (">", above), ("<=", at_most), ("<", below)]
    wanted = " and ".join(f"{sign} {_short(bound)}" for sign, bound in bounds if bound is not None)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{name} is {value!r}; give a number {wanted}".rstrip())
    inside = (
        (at_least is None or value >= at_least)
        and (above is None or value > above)
        and (at_most is None or value <= at_most)
        and (below is None or value < below)
    )
    if not inside or math.isnan(value):
        kind = "a whole number" if isinstance(value, int) else "a number"
        raise UserError(f"{name} is {value}; give {kind} {wanted}".rstrip())


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Refuse a name that is not among ``choices``.

    >>> check_choice("initial", "hybird", ("hybrid", "count", "table"))
    Traceback (most recent call last):
    recbft.errors.UserError: initial is 'hybird'; did you mean 'hybrid'?
    """
    if value not in choices:
        raise UserError(f"{name} is {value!r}; {did_you_mean(str(value), choices)}")


def _convert_optional(value: Any, annotation: Any, name: str) -> Any:
    inner = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
    optional = len(inner) < len(typing.get_args(annotation))
    bare = isinstance(value, str) and not isinstance(value, Verbatim)
    if optional and (value is None or (bare and value.lower() in NULL_WORDS)):
        return None
    for candidate in inner[:-1]:
        try:
            return convert(value, candidate, name)
        except UserError:
            continue
    try:
        return convert(value, inner[-1], name)
    except UserError as error:
        if dataclasses.is_dataclass(inner[-1]):
            raise
        raise UserError(f"{name} is {value!r}; give {describe(annotation)}") from error


def _convert_choice(value: Any, choices: tuple[Any, ...], name: str) -> Any:
    # YAML 1.1 readers turn the bare words off and on into booleans; give the word back where it is a choice.
    if value is False and "off" in choices:
        return "off"
    if value is True and "on" in choices:
        return "on"
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    raise UserError(f"{name} is {value!r}; {did_you_mean(str(value), [str(choice) for choice in choices])}")


def _convert_tuple(value: Any, annotation: Any, name: str) -> tuple[Any, ...]:
    inner = typing.get_args(annotation)[0]
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        value = [int(part) if part.isdecimal() and inner is not str else part for part in parts]
    elif not isinstance(value, (list, tuple)):
        value = [value]
    return tuple(convert(part, inner, name) for part in value)


def _convert_plain(value: Any, annotation: Any, name: str) -> Any:
    kind = bool if isinstance(value, bool) else type(value)
    if kind is annotation is int and not -_WHOLE_BOUND < value < _WHOLE_BOUND:
        raise UserError(f"{name} is {_power(value)}; give a whole number within +-2^63")
    if annotation is float and kind is str and _NUMBER.fullmatch(value) and math.isfinite(float(value)):
        value, kind = float(value), float
    if annotation is float and kind in (int, float) and _REAL_BOUND < abs(value) < math.inf:
        much = _power(value) if kind is int else f"{value:g}"
        raise UserError(f"{name} is {much}; give a number within +-{_REAL_BOUND:g}, the largest in single precision")
    if kind is annotation and not (kind is float and not math.isfinite(value)):
        return value
    if annotation is float and kind is int:
        return float(value)
    raise UserError(f"{name} is {value!r}; give {_WORDS[annotation]}")


def _power(value: int) -> str:
    """A whole number too long to be written out."""
    return f"about {'-' if value < 0 else ''}2^{value.bit_length() - 1}"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return value


def _short(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _dotted(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _placed(message: str, where: str, names: Collection[str]) -> str:
    """Put the section before a message from ``__post_init__``: "dropout is 1.5" becomes "backbone.dropout is 1.5"."""
    if not where:
        return message
    return f"{where}.{message}" if message.split(" ", 1)[0] in names else f"{where}: {message}"
