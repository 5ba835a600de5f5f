"""The models by the names RecBole knows them by, and how it finds them.

RecBole looks for a model NAME in the module ``recbole.model.sequential_recommender.name``, for its defaults in its own
folder, and for its trainer in ``recbole.trainer``. A finder answers for the first with an alias of
``recbft.recbole.models``, which also sets the trainers; hooks on ``Config`` add our defaults to the second, and check
what a user wrote of the model; one on ``run_recbole`` leaves our models out of its count of operations.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from recbft.config.recbole_yaml import ADAPTED
from recbft.recbole import hooks

DEFAULTS = Path(__file__).parent / "defaults"
_PACKAGE = "recbole.model.sequential_recommender."


def install() -> None:
    """Make the models findable and their defaults readable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        hooks.after_import("recbole.config.configurator", _read_our_defaults)
        hooks.after_import("recbole.config.configurator", _check_our_keys)
        hooks.after_import("recbole.config.configurator", _check_what_validates)
        hooks.after_import("recbole.quick_start.quick_start", _leave_our_flops_uncounted)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.startswith(_PACKAGE) and name.removeprefix(_PACKAGE) in map(str.lower, ADAPTED):
            return importlib.util.spec_from_loader(name, self)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """An ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        """Show the one class that the module is named for."""
        models = importlib.import_module("recbft.recbole.models")
        [name] = [known for known in ADAPTED if module.__name__ == _PACKAGE + known.lower()]
        setattr(module, name, getattr(models, name))


def _read_our_defaults(configurator: ModuleType) -> None:
    """Let a Config read a model's defaults here, above RecBole's own files and below everything a user writes.

    The columns that are read unless ``load_col`` says otherwise are those that the config calls user, item and time,
    and the item features it names: RecBole's own default leaves out the time that orders the events, and has fixed
    names.
    """
    config: Any = configurator.Config
    read_own = config._load_internal_config_dict

    def read(self: Any, model: str, model_class: type, dataset: str) -> None:
        read_own(self, model, model_class, dataset)
        if model in ADAPTED:
            features_of = importlib.import_module("recbft.recbole.item_features")
            self._update_internal_config_dict(str(DEFAULTS / f"{model}.yaml"))
            known = {**self.internal_config_dict, **self.external_config_dict}
            names = [known[key] for key in ("USER_ID_FIELD", "ITEM_ID_FIELD", "TIME_FIELD")]
            columns = {"inter": [name for name in names if name is not None]}
            if features := features_of.named_in(known.get(features_of.KEY)):
                columns["item"] = [known["ITEM_ID_FIELD"], *features]
            self.internal_config_dict["load_col"] = columns

    config._load_internal_config_dict = read


def _check_our_keys(configurator: ModuleType) -> None:
    """Let a Config refuse what its model cannot be built from: the model itself is made after the data are read."""
    config: Any = configurator.Config
    read_files = config._load_config_files
    put_together = config._get_final_config_dict

    def read_one_by_one(self: Any, files: Sequence[str] | None) -> dict[str, Any]:
        self._each_file = [read_files(self, [file]) for file in files or ()]
        return {key: value for each in self._each_file for key, value in each.items()}

    def put_together_and_checked(self: Any) -> dict[str, Any]:
        final: dict[str, Any] = put_together(self)
        files = self.__dict__.pop("_each_file", [self.file_config_dict])  # a Config of others may read files otherwise
        places = (*files, self.variable_config_dict, self.cmd_config_dict)
        if self.model in ADAPTED:
            settings = importlib.import_module("recbft.recbole.settings")
            run = settings.run_config(self.model, final)
            settings.refuse_lost(run, *places)
        return final

    config._load_config_files = read_one_by_one
    config._get_final_config_dict = put_together_and_checked


def _check_what_validates(configurator: ModuleType) -> None:
    """Let a Config refuse a validation metric that its metrics and topk, by then completed, do not give."""
    config: Any = configurator.Config
    complete = config._set_default_parameters

    def complete_and_check(self: Any) -> None:
        complete(self)
        if self.model in ADAPTED:
            known = importlib.import_module("recbole.evaluator.register").metrics_dict
            top = importlib.import_module("recbole.evaluator.base_metric").TopkMetric
            settings = importlib.import_module("recbft.recbole.settings")
            settings.refuse_unmeasured(
                self.final_config_dict, [name for name, metric in known.items() if issubclass(metric, top)]
            )

    config._set_default_parameters = complete_and_check


def _leave_our_flops_uncounted(quick_start: ModuleType) -> None:
    """Let RecBole's log say that a model of ours is not counted: thop sees modules that are called, and misses most."""
    module: Any = quick_start
    count = module.get_flops

    def get_flops(model: Any, *given: Any, **options: Any) -> Any:
        if type(model).__name__ in ADAPTED:
            return "not counted (thop sees called modules alone; recbft multiplies by their weights)"
        return count(model, *given, **options)

    module.get_flops = get_flops
