"""What a RecBole config says about one of our models, as the run it describes.

RecBole's config is one flat space of names. Those of the backbone, the mixer, the experts and the core are read by
their bare names or in sections, and by RecBole's own names where it has others (``hidden_dropout_prob``). Training is
RecBole's: only what its trainer does not know is read here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, get_args

from recbft.config.fields import check_choice, convert, field_types
from recbft.config.recbole_yaml import ADAPTED, MODEL_KEYS, NAMED, is_done, nearest, refuse_other_losses
from recbft.config.yaml_text import refuse_repetition
from recbft.errors import UserError
from recbft.models import MODELS
from recbft.recbole.item_features import KEY, named_in
from recbft.training.run_config import RunConfig, TrainingConfig, load_run_config, sections_of

MODEL_SECTIONS = ("backbone", "mixing", "moe", "core")
OWN_TRAINING = ("precision_lr_multiplier", "warmup_steps")  # what RecBole has no key for
TRAINING = ("epochs", "learning_rate", "weight_decay", *OWN_TRAINING)

# Ours -> RecBole's key for the same, which its trainer or its data set reads.
RECBOLE_KEYS = {
    **{key: key for key in ("epochs", "learning_rate", "weight_decay", "valid_metric")},
    **{ours.rpartition(".")[2]: key for key, ours in NAMED.items() if key not in MODEL_KEYS},
    "batch_size": "train_batch_size",
    "autocast": "enable_amp",
    "device": "gpu_id",
}
READ_BY_RECBOLE = (*RECBOLE_KEYS, "max_length")  # as well, or in our place

# What RecBole reads without naming it among its arguments, what its own ``run`` adds for several processes, and the
# options of its scripts run_recbole.py and run_hyper.py: a Config reads their command line too.
UNLISTED = frozenset(
    """
    encoding tail_ratio world_size ip port nproc offset local_rank group_offset config_files params_file output_file
    display_file tool
    """.split()  # noqa: SIM905  a table
)

log = logging.getLogger(__name__)


def run_config(name: str, values: Mapping[str, Any]) -> RunConfig:
    """The run that a RecBole config describes: the model called ``name`` in ``ADAPTED``, all keys, RecBole's too."""
    refuse_repetition(dict(values.items()), "the config")
    refuse_other_losses(values.get("loss_type"))
    clip = values.get("clip_grad_norm")
    if clip is not None and not isinstance(clip, Mapping):  # RecBole's trainer would hand it on as named arguments
        raise UserError(f"clip_grad_norm is {clip!r}; RecBole takes keys: write clip_grad_norm: {{max_norm: {clip}}}")
    adapted = ADAPTED[name]
    arm = adapted.arm if values.get("arm") is None else values["arm"]
    mixer = values.get("mixer")
    if mixer is not None:
        check_choice("mixer", mixer, MODELS[adapted.model].mixers)
    sections = sections_of(adapted.model, mixer)
    _refuse_recboles_training(_section(values, "training"))
    ours: dict[str, Any] = {section: _bare(values, section, sections) for section in MODEL_SECTIONS}
    ours["training"] = {key: values[key] for key in TRAINING if values.get(key) is not None}
    for section, named in ours.items():
        named.update(_section(values, section))
        kinds = {key: kind for key, kind in field_types(sections[section]).items() if key not in READ_BY_RECBOLE}
        named.update({key: _whole(value, kinds.get(key)) for key, value in named.items()})
    try:
        run = load_run_config(**ours, model=adapted.model, arm=arm, seed=values.get("seed", 0), mixer=mixer)
    except UserError as error:
        raise UserError(_in_recboles_words(str(error), values)) from None
    vector = run.backbone.item_vector
    if not named_in(values.get(KEY)) and vector not in (None, "id"):
        raise UserError(
            f"item_vector is {vector!r}, but the config names no {KEY}; name columns of the .item file there, such as "
            f"{KEY}: [class, release_year], or leave item_vector out"
        )
    return run


def refuse_lost(run: RunConfig, *places: Mapping[str, Any]) -> None:
    """Refuse a setting that a user wrote last and that the run does not have.

    RecBole's precedence goes by key: a section in a higher place replaces the whole section of a lower one, and a
    section of a lower place stands above a bare key of a higher one. ``max_length`` is left out: RecBole's window may
    be longer than the history that the model reads.

    Args:
        run: what RecBole's precedence makes of all places.
        places: what the user wrote, from low to high: each file, dictionary, command line.
    """
    for section in (*MODEL_SECTIONS, "training"):
        kinds = field_types(sections_of(run.model, run.mixer)[section])
        for key in OWN_TRAINING if section == "training" else kinds:
            written = [way for place in places for way in _ways(section, key, place)]
            if not written or getattr(run, section) is None or key == "max_length":
                continue
            way, value = written[-1]
            kept = getattr(getattr(run, section), key)
            alone = len(written) == 1 and sum(bool(place.get(section)) for place in places) < 2
            if not alone and convert(_whole(value, kinds[key]), kinds[key], way) != kept:
                raise UserError(
                    f"{way} is {value!r}, but another place of the config makes {key} {kept!r}; "
                    f"write the keys of {section} in one place only"
                )


def _ways(section: str, key: str, place: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The ways in which a place sets a key, with their values, that which counts last."""
    names = [theirs for theirs, ours in MODEL_KEYS.items() if (section, ours) == ("backbone", key)]
    written = [(name, place[name]) for name in (*names, key) if place.get(name) is not None]
    inside = place.get(section)
    return written + ([(f"{section}.{key}", inside[key])] if isinstance(inside, Mapping) and key in inside else [])


def refuse_unmeasured(values: Mapping[str, Any], of_lists: Collection[str]) -> None:
    """Refuse a validation metric that no evaluation gives: RecBole looks for it only after the first epoch.

    Args:
        values: all keys of the config, once RecBole has completed them.
        of_lists: the metrics, in lower case, that are measured at the lengths in ``topk`` alone.
    """
    metrics, topk, chosen = values["metrics"], values["topk"], values["valid_metric"]
    names = [str(metric).lower() for metric in metrics]
    measured = {f"{name}@{length}" for name in names for length in topk} | (set(names) - set(of_lists))
    if values["eval_step"] and chosen.lower() not in measured:
        raise UserError(
            f"valid_metric is {chosen!r}, which is not among what is measured: {', '.join(metrics)} at "
            f"{', '.join(map(str, topk))}; change it, or metrics and topk"
        )


def warn_about_unknown(run: RunConfig, given: Mapping[str, Any], known_to_recbole: Collection[str]) -> None:
    """RecBole takes any key in silence: name those that neither it nor this run's model knows."""
    sections = sections_of(run.model, run.mixer)
    ours = {"model", "dataset", "arm", "mixer", "training", KEY, *TRAINING, *MODEL_SECTIONS}
    for section in MODEL_SECTIONS:
        ours |= set(field_types(sections[section]))
    ours |= {key for key, name in MODEL_KEYS.items() if name in field_types(sections["backbone"])}
    known = ours | UNLISTED | set(known_to_recbole)
    for key, value in given.items():
        if value is None or key in known or (key in MODEL_KEYS and is_done(key, value)):
            continue
        if key in MODEL_KEYS:
            log.warning("key %r has no effect: model %r has no %r", key, run.model, MODEL_KEYS[key])
        elif theirs := RECBOLE_KEYS.get(key):
            log.warning("unknown key %r has no effect; RecBole calls it %r", key, theirs)
        else:
            meant = nearest(str(key), known)
            log.warning("unknown key %r has no effect%s", key, f"; did you mean {meant!r}?" if meant else "")


def _bare(values: Mapping[str, Any], section: str, sections: Mapping[str, type]) -> dict[str, Any]:
    """What the config says of a section by bare names, RecBole's and ours."""
    names = field_types(sections[section])
    recboles = MODEL_KEYS.items() if section == "backbone" else ()
    named = {name: values[key] for key, name in recboles if name in names and values.get(key) is not None}
    for key in names:
        if values.get(key) is not None:
            owners = [owner for owner in MODEL_SECTIONS if key in field_types(sections[owner])]
            if len(owners) > 1:
                raise UserError(f"key {key!r} is in {' and '.join(owners)}; write it inside the section that is meant")
            named[key] = values[key]
    return named


def _whole(value: Any, kind: Any) -> Any:
    """A whole number that RecBole's tuner (``quniform``) gives as a float, for a key that takes whole ones alone."""
    kinds = (kind, *get_args(kind))
    counts = int in kinds and float not in kinds and isinstance(value, float) and value.is_integer()
    return int(value) if counts else value


def _in_recboles_words(message: str, values: Mapping[str, Any]) -> str:
    """The message about a value, by the key that the config has it from."""
    written = {f"training.{key}": key for key in TRAINING if key not in _section(values, "training")}
    for key, name in MODEL_KEYS.items():
        if values.get(key) is not None and values.get(name) is None and name not in _section(values, "backbone"):
            written[f"backbone.{name}"] = key
    subject, space, rest = message.partition(" ")
    return written.get(subject, subject) + space + rest


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of the config, empty where there is none."""
    section = values.get(name)
    if section is not None and not isinstance(section, Mapping):
        raise UserError(f"{name} is {section!r}; it is a section: give keys and values")
    return section or {}


def _refuse_recboles_training(section: Mapping[str, Any]) -> None:
    """Refuse keys of ``training`` that RecBole's trainer would not read."""
    for key in section:
        if key in field_types(TrainingConfig) and key not in OWN_TRAINING:
            theirs = RECBOLE_KEYS.get(key)
            use = f"write {theirs} at the top of the config" if theirs else "leave it out"
            raise UserError(f"training.{key} has no effect, since RecBole's own trainer runs; {use}")
