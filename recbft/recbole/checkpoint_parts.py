"""What a checkpoint of RecBole's may name, and what it may hold.

A name becomes an inert entry that nothing can call. The functions of ``CALLED`` and RecBole's enumerations alone are
called, with data. What was read is checked once more as a whole, so that nothing callable is left where it would be
called later.
"""

from __future__ import annotations

import collections
import enum
import importlib
import inspect
import logging
import pathlib
import pickle
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np
import scipy.sparse
import torch
import yaml
from recbole.config import Config
from recbole.data.dataset import Dataset
from recbole.data.interaction import Interaction
from recbole.model.abstract_recommender import AbstractRecommender
from recbole.sampler.sampler import AbstractSampler


def refuse(done: str) -> NoReturn:
    raise pickle.UnpicklingError(
        f"the checkpoint {done}, which RecBole's own models do not write; if the file is yours, set "
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in the environment and PyTorch reads it whatever it holds"
    )


# What a checkpoint may name ---------------------------------------------------------------------------


class Named:
    """What a checkpoint has named: nothing that could be called, but of use to the reader, each in its own place."""

    __slots__ = ("call", "kind", "name", "value")

    def __init__(self, name: str, call: Any = None, kind: Any = None, value: Any = None) -> None:
        self.name = name
        self.call = call  # for REDUCE: makes an object from arguments that are data
        self.kind = kind  # for NEWOBJ: the class of an object that gets its attributes from BUILD
        self.value = value  # the class itself, for the few places that keep one


def name_of(value: Any) -> str:
    return str(value.name) if type(value) is Named else f"an object of {type(value).__name__}"


def _ordered() -> Any:
    return collections.OrderedDict()


def _defaultdict(of: Named) -> Any:
    kinds: dict[str, Any] = {"builtins.list": list, "builtins.set": set, "builtins.dict": dict}
    if name_of(of) not in kinds:
        refuse(f"has {name_of(of)} for a default")
    return collections.defaultdict(kinds[of.name])


def _counter(counts: Any = None) -> Any:
    return collections.Counter(exactly(dict, counts or {}))


def _set(items: Any = ()) -> Any:
    return set(checked_keys(items))


def _frozenset(items: Any = ()) -> Any:
    return frozenset(checked_keys(items))


def _slice(*ends: Any) -> Any:
    return slice(*(end if end is None else exactly(int, end) for end in ends))


def _encode(text: str, encoding: str) -> bytes:
    """Bytes as protocol 2 writes them; another encoding would be looked up among modules."""
    if encoding != "latin1":
        refuse(f"encodes text as {encoding!r}")
    return str(exactly(str, text)).encode("latin1")


def _enum_member(of: Named, name: str) -> Any:
    """An enumeration's member, which Python 3.11 pickles as an attribute of its class."""
    if not isinstance(of.value, enum.EnumMeta):
        refuse(f"asks for attribute {name!r} of {of.name}")
    return of.value[name]


def _tensor(storage: Any, offset: int, size: Any, stride: Any, grad: bool, hooks: Any = None, *more: Any) -> Any:
    if hooks or any(more):
        refuse("holds a tensor with hooks or with more than numbers")
    return torch._utils._rebuild_tensor_v2(storage, offset, size, stride, grad, collections.OrderedDict())


def _parameter(data: Any, grad: bool, hooks: Any = None) -> Any:
    if hooks:
        refuse("holds a parameter with hooks")
    return torch._utils._rebuild_parameter(data, grad, collections.OrderedDict())


def _dtype(code: str, *copied: bool) -> Any:
    if not re.fullmatch(r"[?biufcSUOV]\d*", code):
        refuse(f"holds an array of {code!r}")
    return np.dtype(code)


def make_array(kind: Named, shape: Any, code: bytes) -> Any:
    if kind.name not in ("numpy.ndarray", "numpy.matrix"):
        refuse(f"makes an array of {kind.name}")
    make: Any = np.empty(0).__reduce__()[0]  # whichever module this numpy has it in
    return make(kind.value, (0,), b"b")


def _scalar(dtype: Any, data: bytes) -> Any:
    if dtype.hasobject or dtype.kind == "V":
        refuse(f"holds a number of type {dtype}")
    make: Any = np.float64(0).__reduce__()[0]
    return make(dtype, exactly(bytes, data))


CALLED: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": _defaultdict,
    "collections.Counter": _counter,
    "builtins.set": _set,
    "builtins.frozenset": _frozenset,
    "builtins.slice": _slice,
    "builtins.complex": complex,
    "builtins.range": range,
    "builtins.list": list,
    "builtins.bytes": bytes,
    "builtins.bytearray": bytearray,
    "builtins.getattr": _enum_member,
    "_codecs.encode": _encode,
    "logging.getLogger": logging.getLogger,
    "torch.device": torch.device,
    "torch.Size": torch.Size,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "numpy.dtype": _dtype,
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": make_array for core in ("core", "_core")},
    **{
        f"pathlib.{kind}": getattr(pathlib, kind)
        for kind in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
MOVED = {  # from where a checkpoint may have it to where every Python does
    "__builtin__": "builtins",  # of older protocols
    "pathlib._local": "pathlib",  # of Python 3.13
}
PACKAGES = (
    "recbole.config.",
    "recbole.data.",
    "recbole.model.",
    "recbole.sampler.",
    "recbole.utils.enum_type",
    "recbft.recbole.",
    "scipy.sparse.",
    "torch.nn.modules.",
)


def named(module: str, name: str) -> Named | None:
    """What a checkpoint may name so, or None."""
    whole = f"{module}.{name}"
    if whole in CALLED:
        return Named(whole, call=CALLED[whole])
    if whole in ("builtins.dict", "torch.storage.UntypedStorage", "torch.UntypedStorage"):
        return Named(whole)
    if whole in ("numpy.ndarray", "numpy.matrix"):
        return Named(whole, value=getattr(np, name))
    if whole == "yaml.loader.FullLoader":
        return Named(whole, value=yaml.FullLoader)
    if module.startswith("recbole.") and module.startswith(PACKAGES) and module.replace(".", "_").isidentifier():
        with suppress(ImportError):
            importlib.import_module(module)
    # Not by getattr, as a module's own __getattr__ may do anything.
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if not isinstance(found, type) or found.__module__ != module:
        return None
    if is_model(found):
        return Named(whole, value=found)
    if isinstance(found, enum.EnumMeta) and module.startswith(PACKAGES):
        return Named(whole, call=lambda member: _member(found, member), value=found)
    return Named(whole, kind=found) if module.startswith(PACKAGES) and _is_kept(found) else None


def _member(of: Any, value: Any) -> Any:
    return of(value if type(value) is str else exactly(int, value))


def is_model(found: Any) -> bool:
    """Whether this is the class of a RecBole model, such as one that a user's script has defined."""
    return isinstance(found, type) and issubclass(found, AbstractRecommender)


def _is_kept(kind: Any) -> bool:
    """Whether checkpoints hold objects of this class: it is made without a call, and setting its state does no more."""
    if issubclass(kind, torch.nn.Module):
        return bool(kind.__setstate__ is torch.nn.Module.__setstate__)
    sparse = issubclass(kind, (scipy.sparse.spmatrix, scipy.sparse.sparray)) and not issubclass(kind, dict)
    return sparse or issubclass(kind, (Config, Dataset, Interaction, AbstractSampler))


# What a checkpoint may hold ---------------------------------------------------------------------------


def exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        refuse(f"gives an object of {type(value).__name__} where {kind.__name__} is meant")
    return value


PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, slice, range)
MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
LISTS = (list, tuple, set, frozenset)


def is_leaf(value: Any) -> bool:
    """Whether this is data without parts: to hash, compare or print it runs Python's, PyTorch's or numpy's own code."""
    exact = (*PLAIN, torch.Tensor, torch.nn.Parameter, torch.device, torch.Size)
    return type(value) in exact or isinstance(value, (enum.Enum, np.generic, np.dtype, pathlib.PurePath))


def checked_keys(keys: Any) -> Any:
    """The keys of a dictionary or the items of a set, which are hashed and compared: refused if they are not data."""
    if type(keys) not in LISTS:
        refuse(f"makes a set of an object of {type(keys).__name__}")
    for key in keys:
        if type(key) in (tuple, frozenset):
            checked_keys(key)
        elif not is_leaf(key):
            refuse(f"has a key of {type(key).__name__}")
    return keys


def _is_code(kind: Any, name: str) -> bool:
    """Whether an attribute of this name would be called, or stand before what the class does."""
    found = inspect.getattr_static(kind, name, None)
    return (
        (name.startswith("__") and name.endswith("__"))
        or name == "_compiled_call_impl"
        or callable(found)
        or hasattr(type(found), "__get__")
    )


def check_attributes(kind: Any, attributes: Any) -> None:
    for name, value in attributes.items():
        if type(name) is not str or _is_code(kind, name):
            refuse(f"sets attribute {name!r} of {kind.__name__}")
        if "hook" in name and not (value is None or value is False or (type(value) in MAPPINGS and not value)):
            refuse(f"sets hooks in {name!r} of {kind.__name__}")


# How much may be held somewhere: data only; RecBole's objects, too; layers, too, which can be called.
DATA, OBJECTS, LAYERS = range(3)


def check_parts(read: Any, made: dict[int, Any]) -> None:
    """Refuse whatever is not data, or an object that this reader has made, in a place where RecBole keeps one."""
    todo = [(read, LAYERS)]
    if type(read) is dict:
        todo = [(part, DATA if key in ("state_dict", "optimizer") else LAYERS) for key, part in read.items()]
        others = read.get("other_parameter")
        if type(others) is dict:  # RecBole sets them as attributes of the model
            check_attributes(AbstractRecommender, others)
            if vars(torch.nn.Module()).keys() & others.keys():
                refuse("sets attributes that PyTorch keeps for itself")
    seen = set()
    while todo:
        value, allowed = todo.pop()
        kind = type(value)
        if kind in PLAIN or (id(value), allowed) in seen or is_leaf(value) or isinstance(value, logging.Logger):
            continue
        seen.add((id(value), allowed))
        if kind in LISTS:
            todo += [(item, allowed) for item in value]
        elif kind in MAPPINGS:
            todo += [(item, allowed) for item in value.values()]
            todo += [(item, DATA) for item in getattr(value, "__dict__", {}).values()]
        elif kind in (np.ndarray, np.matrix):
            todo += [(item, allowed) for item in (value.flat if value.dtype.hasobject else ())]
        elif allowed and id(value) in made and (allowed == LAYERS or not isinstance(value, torch.nn.Module)):
            check_attributes(kind, vars(value))
            inner = DATA if kind is Config else OBJECTS
            todo += [(item, allowed if name == "_modules" else inner) for name, item in vars(value).items()]
        elif value is not yaml.FullLoader and not is_model(value):  # these two have their places in a Config
            refuse(f"holds {name_of(value)} out of place")
