"""Act on a module when it is imported, or at once where it has been.

A module's own loader is kept: only its ``exec_module`` is wrapped, for the modules that somebody asked about.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import ModuleType
from typing import Any

Act = Callable[[ModuleType], None]
Around = Callable[[], AbstractContextManager[object]]

_after: dict[str, list[Act]] = {}
_around: dict[str, list[Around]] = {}


def after_import(name: str, act: Act) -> None:
    """Call ``act(module)`` once the module's own code has run."""
    _after.setdefault(name, []).append(act)
    if name in sys.modules:
        act(sys.modules[name])
    _listen()


def around_import(name: str, around: Around) -> None:
    """Run the module's own code inside ``around()``; without effect on a module that is imported already."""
    _around.setdefault(name, []).append(around)
    _listen()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: wraps what the others find."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _after and name not in _around:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_between(module: ModuleType) -> None:
            with ExitStack() as stack:
                for around in _around.get(name, ()):
                    stack.enter_context(around())
                execute(module)
            for act in _after.get(name, ()):
                act(module)

        spec.loader.exec_module = execute_between  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()


def _listen() -> None:
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class Changed:
    """A module as one module of RecBole sees it: some of its names stand for others."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module = module
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
