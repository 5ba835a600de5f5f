"""What RecBole 1.2.1 needs on a newer Python, numpy, pandas or torch: every patch there is, and when it is applied.

Each patch waits for the import of the module it changes, asks there whether it is needed (``needed``: a trial, not a
version number), and is logged once. A RecBole that works as it is stays as it is. Nothing is switched on for the
process: ``torch.load`` is replaced in RecBole's own two places (``checkpoints``). Anomaly mode, which RecBole switches
on by importing its models, is off inside our trainer only.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from recbft.errors import UserError
from recbft.recbole import checkpoints, hooks
from recbft.recbole.hooks import Changed

RUNTIME = ("texttable", "colorlog", "colorama", "tensorboard", "tqdm", "scikit-learn", "psutil")

log = logging.getLogger(__name__)


PATCHES: list[tuple[str, hooks.Act]] = []  # all there are: a module of RecBole, and what considers its patch


def patch(module: str, reason: str, needed: Callable[[Any], bool]) -> Callable[[Callable[[Any], None]], None]:
    """Enter the function below into the table: what it changes, why, and how to tell whether it is needed."""

    def enter(apply: Callable[[Any], None]) -> None:
        def consider(imported: ModuleType) -> None:
            if needed(imported):
                apply(imported)
                log.info("%s patched: %s", module, reason)

        PATCHES.append((module, consider))

    return enter


@cache
def install() -> None:
    """Have every patch considered when its module is imported, once however often the package is loaded."""
    hooks.around_import("recbole.quick_start.quick_start", _without_ray)
    for name in ("recbole.quick_start.quick_start", "recbole.config.configurator", "recbole.trainer.trainer"):
        hooks.around_import(name, _missing_requirement_explained)
    hooks.around_import("recbole.model.exlib_recommender", _without_tree_libraries)
    for module, consider in PATCHES:
        hooks.after_import(module, consider)


def require_recbole() -> None:
    """Refuse to go on without RecBole, and say how to install it on this Python."""
    if not _installed("recbole"):
        raise UserError(f"RecBole is not installed; install it with: {install_command()}")


def install_command() -> str:
    """How to install RecBole on this Python: from 3.12 on, its pinned ray has no build, so pip must leave it out."""
    if sys.version_info < (3, 12):
        return "pip install recbole==1.2.1"
    return f"pip install --no-deps recbole==1.2.1 && pip install {' '.join(RUNTIME)}"


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@contextlib.contextmanager
def _missing_requirement_explained() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("recbole", "recbft") or "pip install" in str(error):
            raise
        command = f"pip install {' '.join(RUNTIME)}"
        message = f"RecBole needs {error.name!r}, which is not installed; install what it needs with: {command}"
        raise ModuleNotFoundError(message, name=error.name) from error


@contextlib.contextmanager
def _without_ray() -> Iterator[None]:
    """ray is imported to report to a ray session; where it cannot be, there is no session to report to.

    The ray that RecBole pins has no build for Python 3.12 and later, and elsewhere does not start beside numpy 2 or a
    setuptools that no longer has pkg_resources.
    """
    try:
        importlib.import_module("ray.tune")
    except Exception as error:  # whatever ray meets where it is too old
        hindrance = f"{type(error).__name__}: {error}"
    else:
        yield
        return
    for half_imported in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        del sys.modules[half_imported]
    stand_in = ModuleType("ray")
    stand_in.tune = SimpleNamespace(report=lambda **metrics: None)  # type: ignore[attr-defined]
    sys.modules["ray"] = stand_in
    try:
        yield
    finally:
        del sys.modules["ray"]
    log.info("recbole.quick_start imported without ray (%s): results go to no ray session", hindrance)


@contextlib.contextmanager
def _without_tree_libraries() -> Iterator[None]:
    """RecBole looks for a name last among its LightGBM and XGBoost, which it has to import for that.

    Where they are not installed, it comes to its own message that there is no model of the name.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("lightgbm", "xgboost"):
            raise


# numpy 2 ----------------------------------------------------------------------------------------------


def _asks_for_aliases_that_numpy_lacks(configurator: Any) -> bool:
    settings = getattr(configurator.Config, "compatibility_settings", None)
    return settings is not None and any(
        name.endswith("_") and not hasattr(np, name) for name in settings.__code__.co_names
    )


@patch(
    "recbole.config.configurator",
    "numpy 2 has no np.float_, np.complex_ and np.unicode_",
    _asks_for_aliases_that_numpy_lacks,
)
def _set_aliases_that_numpy_has_types_for(configurator: Any) -> None:
    def compatibility_settings(self: Any) -> None:
        types = {
            "bool": np.bool_, "int": np.int_, "float": np.float64, "complex": np.complex128, "object": np.object_,
            "str": np.str_, "long": np.int_, "unicode": np.str_,
        }  # fmt: skip
        for name, kind in types.items():
            if name not in vars(np):
                setattr(np, name, kind)

    configurator.Config.compatibility_settings = compatibility_settings


# thop -------------------------------------------------------------------------------------------------


@patch("recbole.quick_start.quick_start", "thop is not installed", lambda _: not _installed("thop"))
def _leave_flops_uncounted(quick_start: Any) -> None:
    quick_start.get_flops = lambda *inputs, **options: "not counted (thop is not installed)"


# torch 2.6 --------------------------------------------------------------------------------------------

REFUSED = "torch.load refuses the checkpoints that RecBole's trainer writes"
patch("recbole.trainer.trainer", REFUSED, checkpoints.are_refused)(checkpoints.read_in_trainer)
patch("recbole.quick_start.quick_start", REFUSED, checkpoints.are_refused)(checkpoints.read_in_quick_start)

# pandas 3 ---------------------------------------------------------------------------------------------


OF_THE_COLUMN = "pandas 3 takes len of a column of sequences, not of each sequence"


def _filling_a_column_leaves_the_frame(dataset: Any) -> bool:
    import pandas as pd

    frame = pd.DataFrame({"a": [float("nan")]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frame["a"].fillna(0, inplace=True)
    return bool(frame["a"].isna().any())


@patch(
    "recbole.data.dataset.dataset",
    "pandas 3 no longer fills a column of a frame in place: NaN would reach the model",
    _filling_a_column_leaves_the_frame,
)
def _fill_nan_by_assignment(dataset: Any) -> None:
    kinds = dataset.FeatureType

    def fill_nan(self: Any) -> None:
        """Missing tokens become 0, floats the mean, sequences empty."""
        for name in self.feat_name_list:
            feat = getattr(self, name)
            for field in feat:
                kind = self.field2type[field]
                if kind in (kinds.TOKEN, kinds.FLOAT):
                    feat[field] = feat[field].fillna(0 if kind == kinds.TOKEN else feat[field].mean())
                else:
                    empty = np.array([], dtype=np.int64 if kind == kinds.TOKEN_SEQ else np.float64)
                    feat[field] = feat[field].apply(lambda x, empty=empty: empty if isinstance(x, float) else x)

    def read_csv(*given: Any, **options: Any) -> Any:
        """A table whose missing sequences are empty ones."""
        table = pandas.read_csv(*given, **options)
        sequences = [column for column in table if str(column).endswith("_seq")]
        table[sequences] = table[sequences].fillna("")
        return table

    pandas = dataset.pd
    dataset.pd = Changed(pandas, read_csv=read_csv)
    dataset.Dataset._fill_nan = fill_nan


def _len_is_of_the_column(module: Any) -> bool:
    import pandas as pd

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return not isinstance(pd.Series([[1, 2]]).agg(len), pd.Series)


@patch("recbole.data.dataset.dataset", OF_THE_COLUMN, _len_is_of_the_column)
def _take_len_of_each_sequence_in_remap(dataset: Any) -> None:
    import pandas as pd

    def remap(self: Any, remap_list: list[Any]) -> None:
        """Number tokens by first appearance, from 1, and keep both directions of the numbering."""
        if not remap_list:
            return
        tokens, bounds = self._concat_remaped_tokens(remap_list)
        codes, known = pd.factorize(tokens)
        names = np.array(["[PAD]", *known])
        numbers = {token: number for number, token in enumerate(names)}
        for (feat, field, kind), ids in zip(remap_list, np.split(codes + 1, bounds), strict=True):
            self.field2id_token.setdefault(field, names)
            self.field2token_id.setdefault(field, numbers)
            each_has = np.cumsum(feat[field].map(len))[:-1] if kind == dataset.FeatureType.TOKEN_SEQ else None
            feat[field] = ids if each_has is None else np.split(ids, each_has)

    dataset.Dataset._remap = remap


@patch("recbole.data.dataset.sequential_dataset", OF_THE_COLUMN, _len_is_of_the_column)
def _take_len_of_each_sequence_in_benchmark_files(sequential_dataset: Any) -> None:
    presets = sequential_dataset.SequentialDataset._benchmark_presets

    def benchmark_presets(self: Any) -> None:
        presets(self)
        self.inter_feat[self.item_list_length_field] = self.inter_feat[self.item_id_list_field].map(len)

    sequential_dataset.SequentialDataset._benchmark_presets = benchmark_presets


# hyperopt 0.2.7 ---------------------------------------------------------------------------------------


def _search_draws_as_numpy_did(hyper_tuning: Any) -> bool:
    search = getattr(hyper_tuning, "exhaustive_search", None)
    return search is not None and "RandomState" in search.__code__.co_names and _installed("hyperopt")


@patch(
    "recbole.trainer.hyper_tuning",
    "hyperopt draws from a numpy Generator, and RecBole's exhaustive search gives it a RandomState",
    _search_draws_as_numpy_did,
)
def _draw_as_hyperopt_does(hyper_tuning: Any) -> None:
    np = hyper_tuning.np

    def random_state(seed: int) -> Any:
        """What this hyperopt draws from: it had a RandomState once, and has a Generator now."""
        try:
            importlib.import_module("hyperopt.pyll.stochastic").randint(2, rng=np.random.RandomState(seed))
        except AttributeError:
            return np.random.default_rng(seed)
        return np.random.RandomState(seed)

    hyper_tuning.np = Changed(np, random=Changed(np.random, RandomState=random_state))
