"""Everything that decides a run, as one value: saved beside its results and enough to repeat it.

    defaults  <  arm preset (backbone)  <  YAML file  <  key=value settings  <  what the command or call names itself

Sections: data, backbone (the model's own), mixing (the mixer's own), moe (experts in the feed-forward network's place),
core (precision, in arms that track it), training, controllers (what steers training), evaluation.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from recbft.config.fields import (
    Verbatim,
    check_choice,
    check_range,
    convert,
    field_types,
    from_dict,
    to_dict,
    verbatim,
)
from recbft.config.recbole_yaml import MODELS as RECBOLE_MODELS
from recbft.config.recbole_yaml import from_recbole, is_recbole, lacking, written
from recbft.config.yaml_text import parse_setting, place, read_yaml, to_yaml
from recbft.datasets.config import DataConfig
from recbft.datasets.content import ContentConfig
from recbft.datasets.samples import SampleKind
from recbft.errors import UserError, closest
from recbft.evaluation.metrics import METRIC, EvaluationConfig, cutoff
from recbft.mixers import MIXERS, MixerOptions
from recbft.models import MODELS
from recbft.models.feed_forward import FuzzyMoEConfig
from recbft.models.join import PARTS, JoinConfig
from recbft.models.precision_channel import CoreConfig
from recbft.training.controllers import ControllersConfig

DEFAULT_MODEL = "sasrec"
DEFAULT_ARM = "bft"  # where the model has it, else the model's first arm
RECENCY = "+recency"  # after an arm without the recency decay: the same with it

_TOP = ("model", "arm", "seed", "mixer")
_PLACES = ("dataset", "data_root")  # names of files and folders, which may be called anything
_SECTIONS = ("data", "backbone", "mixing", "moe", "core", "training", "controllers", "evaluation")
# Of ``training``: what has an effect on a model that is not trained, too.
_UNTRAINED = ("threads", "device", "deterministic", "tensorboard", "trackers", "project")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Adam on the loss of the backbone, stopped early when a validation metric no longer improves."""

    epochs: int = 200  # at most; 0 evaluates the weights that training would begin with
    samples: SampleKind = "windows"  # an epoch reads windows of all events, the last max_length, or each prefix
    batch_size: int = 256  # samples per step: histories, windows or prefixes
    batch_targets: int | None = None  # in place of batch_size: as many samples as hold about so many targets
    learning_rate: float = 1e-3
    weight_decay: float = 0.0  # not applied to the precision parameters
    optimizer: Literal["adam", "adamw"] = "adam"  # adamw: weight decay apart from the gradient
    precision_lr_multiplier: float = 100.0  # learning rate of the precision and recency parameters, relative
    warmup_steps: int = 50  # optimiser steps over which precision and recency are ramped in; 0 means at once
    # a run whose best weights this one begins from, ramped in already; precision that it does not have is fresh
    warm_start: str | None = None
    # what share of them is kept, the rest being initial weights; None means 0.4, and 1 where precision is fresh
    warm_start_keep: float | None = None
    clip_norm: float | None = None  # largest gradient norm; None leaves gradients alone
    patience: int = 20  # validations without improvement before training stops
    valid_metric: str = "ndcg@10"  # what chooses the epoch: hr@K, ndcg@K, mrr@K with K in evaluation.ks, or mrr
    eval_every: int = 1  # epochs between validations
    deterministic: bool = False  # refuse operations without a deterministic algorithm
    autocast: Literal["bf16"] | None = None  # bf16: products with learned weights in bfloat16; for GPUs
    cuda_graphs: bool | None = None  # true: steps from CUDA graphs, for GPUs faster than their kernels are launched
    threads: int | None = None  # CPU threads; None leaves PyTorch's choice
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    tensorboard: bool = False  # the same as trackers: tensorboard
    trackers: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] | None = None  # what keeps the run's figures too
    project: str | None = None  # MLflow's experiment, W&B's project; None means what their variables say, or recbft

    def __post_init__(self) -> None:
        for key in ("batch_size", "batch_targets", "patience", "eval_every"):
            check_range(key, getattr(self, key), at_least=1)
        for key in ("precision_lr_multiplier", "clip_norm"):
            check_range(key, getattr(self, key), above=0)
        for key in ("epochs", "learning_rate", "weight_decay", "warmup_steps"):
            check_range(key, getattr(self, key), at_least=0)
        if self.optimizer == "adamw" and not self.weight_decay:
            raise UserError("optimizer adamw has no effect with weight_decay 0; leave it out, or set weight_decay")
        check_range("threads", self.threads, at_least=1, at_most=1024)
        if not re.fullmatch(METRIC, self.valid_metric):
            raise UserError(
                f"valid_metric is {self.valid_metric!r}; give hr@K, ndcg@K, mrr@K or mrr, such as 'ndcg@10'"
            )
        # PyTorch counts to 127 and begins anew, and takes no number with a 0 before it.
        if not re.fullmatch(r"auto|cpu|cuda(:(0|[1-9][0-9]?))?", self.device):
            raise UserError(f"device is {self.device!r}; give auto, cpu, cuda or cuda:N")
        if self.warm_start is not None and not self.warm_start.strip():
            raise UserError("warm_start is empty; give the folder of a run, or leave it out")
        check_range("warm_start_keep", self.warm_start_keep, above=0, at_most=1)
        if self.warm_start_keep is not None and self.warm_start is None:
            raise UserError("warm_start_keep has no effect without warm_start; leave it out, or name a run there")
        if self.project is not None and not {"mlflow", "wandb"} & set(self.tracked_by):
            raise UserError("project has no effect without trackers mlflow or wandb; leave it out, or name one there")
        if self.project is not None and not self.project.strip():
            raise UserError("project is empty; give a name, or leave it out")

    @property
    def tracked_by(self) -> tuple[str, ...]:
        """What keeps the run's figures beside its folder, each once."""
        also = ("tensorboard",) if self.tensorboard else ()
        return tuple(dict.fromkeys((*(self.trackers or ()), *also)))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run; ``core`` is None in arms without a precision channel."""

    model: str
    arm: str
    seed: int
    mixer: str | None  # None for a model without layers
    data: DataConfig
    backbone: Any  # the model's own config class
    mixing: Any  # the mixer's own config class
    moe: FuzzyMoEConfig
    core: CoreConfig | None
    training: TrainingConfig
    controllers: ControllersConfig
    evaluation: EvaluationConfig

    def __post_init__(self) -> None:
        if not MODELS[self.model].trainable:
            return
        watched = {"training.valid_metric": self.training.valid_metric}
        if self.controllers.swa is not None:
            watched["controllers.swa.value"] = self.controllers.swa.value
        for key, metric in watched.items():
            k = cutoff(metric)
            if k is not None and k not in self.evaluation.ks:
                raise UserError(
                    f"{key} is {metric!r}, but evaluation.ks is {list(self.evaluation.ks)}; "
                    f"add {k} to ks, or choose another metric"
                )
        if self.training.cuda_graphs and (hindrance := self.graph_hindrance):
            raise UserError(
                f"training.cuda_graphs repeats steps as they were, and cannot with {hindrance}; leave it out"
            )

    @property
    def graph_hindrance(self) -> str | None:
        """What keeps the steps of such a run from being CUDA graphs, or None."""
        hindrances = [f"controllers.{name}, which steers single steps" for name in self.controllers.named]
        if self.mixer is not None and MIXERS[self.mixer].reads_back:
            hindrances.append(f"mixer {self.mixer!r}, which looks at numbers within a step")
        if self.backbone.loss != "ce":
            hindrances.append(f"loss {self.backbone.loss!r}, which is not the plain cross-entropy")
        if self.moe.experts:
            hindrances.append("experts, which get as many tokens as ask for them")
        return hindrances[0] if hindrances else None

    @property
    def reads_times(self) -> str | None:
        """The key by which the model looks at real event times, or None where it does not."""
        if getattr(self.backbone, "time_bias", False):
            return "backbone.time_bias"
        return "mixing.time" if getattr(self.mixing, "time", False) else None

    @property
    def reads_reliability(self) -> bool:
        """Whether the model looks at the reliability of events."""
        return getattr(self.backbone, "reads_reliability", None) is not None

    @property
    def content_config(self) -> ContentConfig | None:
        """How the item features that the model reads become vectors; None where it reads none."""
        if MODELS[self.model].content is None or getattr(self.backbone, "item_vector", None) == "id":
            return None
        return ContentConfig(width=self.backbone.content_width)

    @property
    def parts(self) -> dict[str, RunConfig]:
        """The configurations of the models that a join is made of, by their names in it; none of any other model."""
        if not isinstance(self.backbone, JoinConfig):
            return {}
        return {name: run_config_of({}, None, (), verbatim(getattr(self.backbone, name))) for name in PARTS}

    def build(self, training_counts: Tensor, content: Tensor | None = None) -> nn.Module:
        """The untrained model.

        Args:
            training_counts: (V + 1,) events per item in training, or the sums of their weights, index 0 padding.
            content: (V + 1, F) what is known of each item beside its number, None where nothing is.
        """
        return MODELS[self.model].make(
            self.backbone,
            self.core,
            training_counts,
            seed=self.seed,
            mixer=self.mixer,
            mixing=self.mixing,
            moe=self.moe,
            content=content,
        )

    def to_yaml(self) -> str:
        """The text of ``config.yaml``, which ``load_run_config`` reads back to an equal value."""
        return to_yaml(to_dict(self))


def load_run_config(
    file: Path | str | Sequence[Path | str] | None = None, settings: Iterable[str] = (), **named: Any
) -> RunConfig:
    """The run that a YAML file, ``key=value`` settings and named values describe, later ones first.

    Args:
        file: nested (sections) or flat, or a RecBole config, or several of which later ones win; None starts from the
            defaults.
        settings: texts such as ``"epochs=50"`` or ``"core.lam_max=10"``.
        named: any key by its bare name, or a section as a mapping; None means not given.

    Raises:
        UserError: a key is unknown, a value wrong, or a setting would have no effect in this model and arm.
    """
    files = [file] if isinstance(file, (str, Path)) else list(file or ())
    content: dict[str, Any] = {}
    for each in files:
        for key, value in read_yaml(each).items():
            earlier = content.get(key) if key in _SECTIONS else None
            both = isinstance(earlier, Mapping) and isinstance(value, Mapping)
            content[key] = {**earlier, **value} if both else value  # type: ignore[dict-item]
    return run_config_of(content, " and ".join(map(str, files)) or None, settings, named)


def run_config_of(
    content: Mapping[str, Any], file: Path | str | None, settings: Iterable[str] = (), named: Mapping[str, Any] = {}
) -> RunConfig:
    """``load_run_config`` where the content of the file has been read already."""
    content, named = _recency_apart(content), _recency_apart(named)
    layers: list[tuple[str, Mapping[str, Any]]] = [
        ("", _recency_apart(dict([parse_setting(text)]))) for text in settings
    ]
    for key in _PLACES:
        if isinstance(named.get(key), (str, Path)):
            named[key] = Verbatim(str(named[key]))
    layers.append(("", {key: value for key, value in named.items() if value is not None}))
    words: Mapping[str, str] = {}
    if file is not None:
        asked = ("model", "dataset", "arm", "feed_forward", "backbone.feed_forward")
        above = {key.rpartition(".")[2]: layer[key] for _, layer in layers for key in asked if key in layer}
        if above.get("model") in RECBOLE_MODELS and not any(isinstance(content.get(key), Mapping) for key in _SECTIONS):
            content = {**content, "model": above.pop("model")}  # as RecBole's, whichever the file names
            layers = [(source, {key: v for key, v in layer.items() if key != "model"}) for source, layer in layers]
        read, found, words = _translated(file, content, above)
        layers = [(source, {**layer, "dataset": found} if "dataset" in layer else layer) for source, layer in layers]
        layers.insert(0, (f"{file}: ", read))

    model, mixer = _model_and_mixer(layers)
    if file is not None and (arms := [layer["arm"] for _, layer in layers[1:] if "arm" in layer]):
        layers[0] = (layers[0][0], _without_its_arm(layers[0][1], model, arms[-1]))

    tree: dict[str, Any] = {}
    if words and MODELS[model].trainable:  # a RecBole config: RecBole's training rows, unless a layer says otherwise
        tree = {"training": {"samples": "prefixes"}}
    sections = sections_of(model, mixer)
    for source, layer in layers:
        own: dict[str, Any] = {}
        for key, value in layer.items():
            with _naming(source):
                _refuse_of_others(str(key), value, model, mixer, sections)
                place(own, str(key), value, _TOP, sections)
        _put_over(tree, own)
    try:
        return _assemble(model, mixer, tree)
    except UserError as error:
        since = {key for _, layer in layers[1:] for key in _bare_names(layer)}
        words = {name: written for name, written in words.items() if name not in since}
        raise UserError(_as_written(str(error), f"{file}: ", words, sections)) from None


def _model_and_mixer(layers: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[str, str | None]:
    """What the last layer to name each says, else the usual model and its first mixer."""
    model, mixer = DEFAULT_MODEL, None
    for source, layer in layers:
        with _naming(source):
            model = convert(layer.get("model", model), str, "model")
            mixer = convert(layer.get("mixer", mixer), str | None, "mixer")
    if model not in MODELS and closest(model, MODELS, alike=0.7) is None:  # such as gru4rec, which is no bert4rec
        raise UserError(f"model is {model!r}; choose one of {', '.join(sorted(MODELS))}")
    check_choice("model", model, MODELS)
    mixers = MODELS[model].mixers
    if mixer is not None and not mixers:
        raise UserError(f"mixer {mixer!r} has no effect in model {model!r}, which has no layers; leave it out")
    if not mixer:
        return model, next(iter(mixers), None)
    check_choice("mixer", mixer, mixers if mixer not in MIXERS else MIXERS)
    if mixer not in mixers:
        raise UserError(f"mixer {mixer!r} does not go with model {model!r}; choose one of {', '.join(mixers)}")
    return model, mixer


def _recency_apart(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer whose arm ``NAME+recency``, as comparisons call it, is written as the arm and its setting."""
    arm = layer.get("arm")
    if not isinstance(arm, str) or not arm.endswith(RECENCY):
        return dict(layer)
    return {**layer, "arm": arm.removesuffix(RECENCY), "recency_decay": True}


def _bare_names(layer: Mapping[str, Any]) -> Iterator[str]:
    """The keys of a layer, and of the sections in it, without their sections."""
    for key, value in layer.items():
        yield str(key).rpartition(".")[2]
        yield from map(str, value if isinstance(value, Mapping) else ())


def _as_written(message: str, source: str, words: Mapping[str, str], sections: Mapping[str, type]) -> str:
    """A message about a value that a RecBole config gives, by the words of the config."""
    if message.partition(" ")[0].rpartition(".")[2] not in words:
        return message
    ours = re.compile(rf"\b(?:{'|'.join(sections)})\.(\w+)|\b(ks)\b")
    return source + ours.sub(lambda name: words.get(name[1] or name[2], name[0]), message)


def _refuse_of_others(key: str, value: Any, model: str, mixer: str | None, sections: Mapping[str, type]) -> None:
    """Refuse a key that other models or mixers have, and this one does not, by saying which."""
    if key in sections:
        for inner in value if isinstance(value, Mapping) else ():
            _refuse_of_others(f"{key}.{inner}", None, model, mixer, sections)
        return
    section, _, name = key.rpartition(".")
    if key in _TOP or any(name in field_types(cls) for owner, cls in sections.items() if section in ("", owner)):
        return
    models = [other for other, spec in MODELS.items() if name in field_types(spec.config)]
    mixers = [other for other, spec in MIXERS.items() if name in field_types(spec.options)]
    for kind, owners, mine in (("backbone", models, f"model {model!r}"), ("mixing", mixers, f"mixer {mixer!r}")):
        if owners and section in ("", kind):
            others = f"{mine.split()[0]} {', '.join(owners)}"
            raise UserError(f"key {key!r} has no effect with {mine}; leave it out, or take {others}, which has it")


def _without_its_arm(layer: Mapping[str, Any], model: str, arm: Any) -> Mapping[str, Any]:
    """The settings of a file but for those that made its arm, where another arm is asked for.

    The file of a run writes everything down: taken as settings, one arm's presets would turn another into it.
    """
    spec, was = MODELS[model], layer.get("arm")
    named = list(spec.arms)  # a file's arm may be a list, which no set or mapping can be asked for
    if was == arm or was not in named or arm not in named:
        return layer
    usual = to_dict(from_dict(spec.config, spec.arms[was]))
    presets = {key: usual[key] for key in (*spec.arms[was], *spec.arms[arm])}
    core = {} if arm in spec.precision_arms else to_dict(from_dict(CoreConfig, spec.core))

    def own(section: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in section.items() if key not in made or value != made[key]}

    kept = own(layer, {**presets, **core})
    for name, made in (("backbone", presets), ("core", core)):
        if isinstance(kept.get(name), Mapping):
            kept[name] = own(kept[name], made)
    return kept


def _put_over(tree: dict[str, Any], later: Mapping[str, Any]) -> None:
    """Put later settings over earlier ones; a batch size takes the place of a number of targets too."""
    for key, value in later.items():
        if isinstance(value, Mapping):
            instead = {"batch_targets": None} if key == "training" and "batch_size" in value else {}
            tree[key] = {**tree.get(key, {}), **instead, **value}
        else:
            tree[key] = value


def sections_of(model: str, mixer: str | None = None) -> dict[str, type]:
    """Section name -> config class, for one model with a mixer."""
    return {
        "data": DataConfig,
        "backbone": MODELS[model].config,
        "mixing": MixerOptions if mixer is None else MIXERS[mixer].options,
        "moe": FuzzyMoEConfig,
        "core": CoreConfig,
        "training": TrainingConfig,
        "controllers": ControllersConfig,
        "evaluation": EvaluationConfig,
    }


def _translated(
    file: Path | str, tree: Mapping[str, Any], above: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Any, Mapping[str, str]]:
    """The keys of a file in our words; of a RecBole config a warning names what has no meaning here.

    Args:
        above: the model to be run, its arm and the data set, where they are not the file's: RecBole has a batch size
            and the like for any model, and says where data sets lie.

    Returns:
        The keys; the data set in ``above``, as given or where a RecBole config has it; what such a config calls our
        settings.
    """
    ours = {*_TOP, *(name for model in MODELS for name in sections_of(model))}
    ours |= {key for model in MODELS for section in sections_of(model).values() for key in field_types(section)}
    if not is_recbole(tree, ours):
        return tree, above.get("dataset"), {}
    with _naming(f"{file}: "):
        translated, ignored = from_recbole(tree, ours, above)
    model = above.get("model", translated.get("model", DEFAULT_MODEL))
    if isinstance(model, str) and model in MODELS:
        absent, words = lacking(tree, _heard(model, {**translated, **above}))
        if "hidden_act" in words and "activation" not in field_types(MODELS[model].config) and MODELS[model].trainable:
            raise UserError(
                f"{file}: hidden_act is {tree['hidden_act']!r}, but the activation of model {model!r} is gelu; write "
                "hidden_act: gelu"
            )
        ignored += [f"{key} ({model!r} has none)" for key in words]
        translated = {key: value for key, value in translated.items() if key not in absent}
    if isinstance(model, str) and model in MODELS and not MODELS[model].trainable:
        unused = [key for key in translated if key in field_types(TrainingConfig) and key not in _UNTRAINED]
        ignored += [f"{written(tree).get(key, key)} ({model!r} is not trained)" for key in unused]
        translated = {key: value for key, value in translated.items() if key not in unused}
    if ignored:
        warnings.warn(f"{file}: without meaning in recbft and ignored: {', '.join(ignored)}", stacklevel=4)
    found = Verbatim(translated["dataset"]) if above.get("dataset") is not None else None
    return translated, found, written(tree)


def _heard(model: str, given: Mapping[str, Any]) -> set[str]:
    """The settings of a backbone that have an effect; ``given`` may say its arm, and whether it has a network."""
    spec = MODELS[model]
    arm = given.get("arm", DEFAULT_ARM)
    preset = spec.arms.get(arm, {}) if isinstance(arm, str) else {}
    heard = set(field_types(spec.config))
    return (
        heard if given.get("feed_forward", preset.get("feed_forward", True)) else heard - {"inner_size", "activation"}
    )


def _assemble(model: str, mixer: str | None, tree: Mapping[str, Any]) -> RunConfig:
    spec = MODELS[model]
    arm = convert(tree.get("arm", DEFAULT_ARM if DEFAULT_ARM in spec.arms else next(iter(spec.arms))), str, "arm")
    check_choice(f"arm of {model}", arm, spec.arms)
    seed = convert(tree.get("seed", 0), int, "seed")
    check_range("seed", seed, at_least=0, below=2**32)
    core = tree.get("core", {})
    if core and arm not in spec.precision_arms:
        use = f" or take arm {' or '.join(spec.precision_arms)}" if spec.precision_arms else ""
        raise UserError(f"core.{next(iter(core))} has no effect in arm {arm!r} of {model}; leave it out{use}")
    presets = {"backbone": spec.arms[arm], "core": spec.core}
    made: dict[str, Any] = {
        name: from_dict(section, {**presets.get(name, {}), **tree.get(name, {})}, name)
        for name, section in sections_of(model, mixer).items()
    }
    if arm not in spec.precision_arms:
        made["core"] = None
    if not spec.trainable:
        _refuse_training(model, made["moe"], made["training"], made["controllers"])
    return RunConfig(model=model, arm=arm, seed=seed, mixer=mixer, **made)


def _refuse_training(model: str, moe: FuzzyMoEConfig, training: TrainingConfig, controllers: ControllersConfig) -> None:
    """Refuse what has no effect in a model that is not trained."""
    if moe.experts:
        raise UserError(f"moe.experts has no effect in model {model!r}, which has no layers; leave it out")
    usual = TrainingConfig()
    keys = [key for key in field_types(TrainingConfig) if key not in _UNTRAINED]
    changed = [f"training.{key}" for key in keys if getattr(training, key) != getattr(usual, key)]
    for key in [*changed, *(f"controllers.{name}" for name in controllers.named)]:
        raise UserError(f"{key} has no effect in model {model!r}, which is not trained; leave it out")


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """Put ``source`` before the message of a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{source}{error}") from None
