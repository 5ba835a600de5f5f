"""Nested state as JSON plus named tensors, and back, exactly.

An optimiser's ``state_dict()`` mixes numbers with tensors, tuples and whole-number keys, which JSON does not keep. A
mapping becomes ``{"map": [[key, value], ...]}``, a tuple ``{"tuple": [...]}``, a tensor ``{"tensor": name}``; lists,
text, numbers, booleans and None stand for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def flatten(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON of ``value``; its tensors are added to ``tensors`` under names that start with ``name``.

    Raises:
        TypeError: there is something that is neither plain nor a tensor.
    """
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
