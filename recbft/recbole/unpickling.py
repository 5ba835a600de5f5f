"""The reader of RecBole's checkpoints: it makes the objects that RecBole's own models write, and runs nothing else.

An object is made without a call and then gets its state. What may be named, called and held is in ``checkpoint_parts``.
"""

from __future__ import annotations

import collections
import functools
import pickle
import pickletools
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from recbole.config import Config

from recbft.recbole.checkpoint_parts import (
    LISTS,
    MAPPINGS,
    MOVED,
    Named,
    check_attributes,
    check_parts,
    checked_keys,
    exactly,
    is_leaf,
    make_array,
    name_of,
    named,
    refuse,
)

READ = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.DUP,
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1,
    pickle.LONG4, pickle.BINFLOAT, pickle.BINSTRING, pickle.SHORT_BINSTRING, pickle.BINUNICODE,
    pickle.SHORT_BINUNICODE, pickle.BINUNICODE8, pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8,
    pickle.TUPLE, pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST,
    pickle.EMPTY_DICT, pickle.EMPTY_SET, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.MEMOIZE, pickle.BINPUT,
    pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET,
)  # fmt: skip
MALFORMED = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip

_InPython: Any = pickle._Unpickler  # undocumented, but what Python has for this


class _Opcodes(dict[int, Any]):
    def __missing__(self, code: int) -> NoReturn:
        names = {op.code: op.name for op in pickletools.opcodes}
        refuse(f"uses pickle's {names.get(chr(code), code)}")


class CheckpointUnpickler(_InPython):  # type: ignore[misc]
    """Reads the objects that a checkpoint of RecBole is made of, and no other.

    What the file names is found, but kept where nothing can call it. The functions of ``CALLED`` and enumerations alone
    are called; an object of the packages' classes is made without a call and gets its state, which is looked at once
    the file is read. So this is the unpickler in Python, which shows what is called.
    """

    dispatch: ClassVar[dict[int, Any]] = _Opcodes({code: _InPython.dispatch[code] for (code,) in READ})

    def load(self) -> Any:
        self.made: dict[int, Any] = {}
        try:
            read = super().load()
        except MALFORMED as error:
            raise pickle.UnpicklingError(
                f"the checkpoint is damaged or made by hand ({type(error).__name__}: {error}); load only files that "
                "you have made"
            ) from error
        check_parts(read, self.made)
        return read

    def find_class(self, module: str, name: str) -> Any:
        return named(MOVED.get(module, module), name) or refuse(f"asks for {module}.{name}")

    def load_reduce(self) -> None:
        """Call what makes an object: a function known here or an enumeration, with data."""
        given, called = self.stack.pop(), self.stack.pop()
        if type(called) is not Named or called.call is None or type(given) is not tuple:
            refuse(f"calls {name_of(called)}")
        kinds = (Named, *LISTS, *MAPPINGS, torch.storage.TypedStorage, torch.storage.UntypedStorage)
        for value in given:
            if type(value) not in kinds and not is_leaf(value):
                refuse(f"calls {called.name} with an object of {type(value).__name__}")
        made = called.call(*given)
        if called.call is make_array:
            self.made[id(made)] = made
        self.append(made)

    def load_newobj(self) -> None:
        """Make an object without a call."""
        given, called = self.stack.pop(), self.stack.pop()
        if type(called) is not Named or called.kind is None or type(given) is not tuple or given:
            refuse(f"makes something of {name_of(called)}")
        made = object.__new__(called.kind)
        self.made[id(made)] = made
        self.append(made)

    def load_build(self) -> None:
        """Give an object that was made here its state."""
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, np.dtype):  # it has its state: another would make it lie about its memory
            if not all(map(is_leaf, exactly(tuple, state))) or repr(state) != repr(target.__reduce__()[2]):
                refuse(f"changes numpy's {target!r}")
        elif id(target) in self.made and isinstance(target, np.ndarray):
            np.ndarray.__setstate__(target, exactly(tuple, state))
        elif type(target) is collections.OrderedDict and type(state) is dict and state.keys() == {"_metadata"}:
            vars(target).update(state)
        elif id(target) in self.made and type(state) is dict:
            if type(target) is Config:
                _keep_classes(state)
            # PyTorch's or scipy's, which add what older files lack, or none; looked up where no file can set one.
            set_state = getattr(type(target), "__setstate__", None)
            (vars(target).update if set_state is None else functools.partial(set_state, target))(state)
            check_attributes(type(target), dict.fromkeys(vars(target)))
        else:
            refuse(f"changes {name_of(target)}")

    def load_binpersid(self) -> None:
        """Have PyTorch find a tensor's numbers, which lie beside the pickle."""
        saved = self.stack.pop()
        if type(saved) is not tuple or [type(part) for part in (*saved[:1], *saved[2:])] != [str, str, str, int]:
            refuse("asks for something that is no tensor's")
        kind = torch.UntypedStorage if type(saved[1]) is Named else saved[1]
        if kind is not torch.UntypedStorage and type(kind) is not torch.serialization.StorageType:
            refuse(f"asks for a tensor of {name_of(kind)}")
        self.append(self.persistent_load((saved[0], kind, *saved[2:])))

    def load_append(self) -> None:
        item = self.stack.pop()
        exactly(list, self.stack[-1]).append(item)

    def load_appends(self) -> None:
        items = self.pop_mark()
        exactly(list, self.stack[-1]).extend(items)

    def load_additems(self) -> None:
        items = self.pop_mark()
        exactly(set, self.stack[-1]).update(checked_keys(items))

    def load_frozenset(self) -> None:
        self.append(frozenset(checked_keys(self.pop_mark())))

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        if type(self.stack[-1]) not in MAPPINGS:
            refuse(f"sets items of {name_of(self.stack[-1])}")
        for key, value in zip(checked_keys(items[::2]), items[1::2], strict=True):
            self.stack[-1][key] = value

    dispatch.update(
        {
            pickle.REDUCE[0]: load_reduce,
            pickle.NEWOBJ[0]: load_newobj,
            pickle.BUILD[0]: load_build,
            pickle.BINPERSID[0]: load_binpersid,
            pickle.APPEND[0]: load_append,
            pickle.APPENDS[0]: load_appends,
            pickle.ADDITEMS[0]: load_additems,
            pickle.FROZENSET[0]: load_frozenset,
            pickle.SETITEM[0]: load_setitem,
            pickle.SETITEMS[0]: load_setitems,
        }
    )


def _keep_classes(state: dict[str, Any]) -> None:
    """Put the classes in the places that a Config keeps them in: how it reads YAML, and its model."""
    part: Any
    for part in (state, state.get("variable_config_dict"), state.get("external_config_dict")):
        for key in ("yaml_loader", "model_class", "model"):
            named: Any = part.get(key) if type(part) is dict else None
            if type(named) is Named and (named.name == "yaml.loader.FullLoader") == (key == "yaml_loader"):
                part[key] = named.value or named
