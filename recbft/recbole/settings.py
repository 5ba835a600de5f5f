"""What a RecBole config says about one of our models, as the run it describes.

RecBole's config is one flat space of names. Those of the backbone, the mixer, the experts and the core are read by
their bare names or in sections, and by RecBole's own names where it has others (``hidden_dropout_prob``). Training is
RecBole's: only what its trainer does not know is read here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, get_args

from recbft.config.fields import check_choice, field_types, to_dict
from recbft.config.recbole_yaml import ADAPTED, MODEL_KEYS, is_done, nearest, refuse_other_losses
from recbft.config.yaml_text import refuse_repetition
from recbft.errors import UserError
from recbft.models import MODELS
from recbft.training.config import TrainingConfig
from recbft.training.run_config import RunConfig, load_run_config, sections_of

MODEL_SECTIONS = ("backbone", "mixing", "moe", "core")
OWN_TRAINING = ("precision_lr_multiplier", "warmup_steps")  # what RecBole has no key for
TRAINING = ("epochs", "learning_rate", "weight_decay", *OWN_TRAINING)

# The rest of training by RecBole's keys, which its trainer reads.
RECBOLE_TRAINING = {
    "epochs": "epochs",
    "batch_size": "train_batch_size",
    "batch_targets": "train_batch_size",
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "clip_norm": "clip_grad_norm",
    "patience": "stopping_step",
    "valid_metric": "valid_metric",
    "eval_every": "eval_step",
    "deterministic": "reproducibility",
    "autocast": "enable_amp",
    "device": "gpu_id",
}

# What else of a run RecBole has a key for.
RECBOLE_DATA = {
    "data_root": "data_path",
    "separator": "field_separator",
    "user": "USER_ID_FIELD",
    "item": "ITEM_ID_FIELD",
    "time": "TIME_FIELD",
    "min_user_events": "user_inter_num_interval",
    "min_item_events": "item_inter_num_interval",
    "where": "val_interval",
    "deduplicate": "rm_dup_inter",
    "ks": "topk",
}

READ_BY_RECBOLE = (*RECBOLE_TRAINING, "max_length")  # as well, or in our place

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
    """The run that a RecBole config describes.

    Args:
        name: of the model, in ``ADAPTED``.
        values: all keys of the config, RecBole's own included.

    Raises:
        UserError: a value is wrong, or has no effect in this arm.
    """
    refuse_repetition(dict(values.items()), "the config")
    refuse_other_losses(values.get("loss_type"))
    refuse_clipping_by_number(values.get("clip_grad_norm"))
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
        return load_run_config(**ours, model=adapted.model, arm=arm, seed=values.get("seed", 0), mixer=mixer)
    except UserError as error:
        raise UserError(_in_recboles_words(str(error), values)) from None


def refuse_overruled(name: str, *places: Mapping[str, Any]) -> None:
    """Refuse a setting whose value loses to one from a place that RecBole puts lower, since it is written otherwise.

    RecBole's precedence goes by key, while a section stands above a bare key, and ours above RecBole's name for it. The
    window is left out: it may be longer than the history that the model reads.

    Args:
        name: of the model, in ``ADAPTED``.
        places: what the user wrote, from low to high: each file, dictionary, command line; ``run_config`` has checked
            it.

    Raises:
        UserError: there is such a value.
    """
    given = {key: (rank, value) for rank, place in enumerate(places) for key, value in place.items()}
    sections = sections_of(ADAPTED[name].model, given.get("mixer", (0, None))[1])
    for section in (*MODEL_SECTIONS, "training"):
        keys = OWN_TRAINING if section == "training" else field_types(sections[section])
        for written in (_written(section, key, given) for key in keys if key != "max_length"):
            for way, above, value in written[1:]:
                kept, below, stands = written[0]
                if above > below and value != stands:
                    raise UserError(f"{way} is {value!r}, but {kept} is {stands!r} and stands above it; write {kept}")


def refuse_replaced(run: RunConfig, *places: Mapping[str, Any]) -> None:
    """Refuse a setting of a section that a higher place gives too, and without it: RecBole takes that one whole.

    Args:
        run: what comes of it all.
        places: as for ``refuse_overruled``.

    Raises:
        UserError: there is such a setting, and it has another value in the run.
    """
    values = to_dict(run)
    for rank, place in enumerate(places):
        above = {key: (0, value) for higher in places[rank + 1 :] for key, value in higher.items()}
        for section in (*MODEL_SECTIONS, "training"):
            replaced, taken = place.get(section), above.get(section, (0, None))[1]
            if not (isinstance(replaced, Mapping) and taken):
                continue
            for key, value in replaced.items():
                kept = (values[section] or {}).get(key, value)
                if kept != value and not _written(section, key, above):
                    raise UserError(
                        f"{section}.{key} is {value!r}, but RecBole takes {section} from a higher place, which leaves "
                        f"it out, and {key} would be {kept!r}; write {key} there too"
                    )


def _written(section: str, key: str, given: Mapping[str, tuple[int, Any]]) -> list[tuple[str, int, Any]]:
    """The ways in which a setting is written, each with its place and value, that which is taken first."""
    rank, inside = given.get(section, (0, None))
    names = [key, *(theirs for theirs, ours in MODEL_KEYS.items() if (section, ours) == ("backbone", key))]
    written = [(f"{section}.{key}", rank, inside[key])] if key in (inside or {}) else []
    return written + [(other, *given[other]) for other in names if given.get(other, (0, None))[1] is not None]


def refuse_unmeasured(values: Mapping[str, Any], of_lists: Collection[str]) -> None:
    """Refuse a validation metric that no evaluation gives: RecBole looks for it only after the first epoch.

    Args:
        values: all keys of the config, once RecBole has completed them.
        of_lists: the metrics, in lower case, that are measured at the lengths in ``topk`` alone.

    Raises:
        UserError: the metric is not among ``metrics``, or its length not in ``topk``.
    """
    metrics, topk, chosen = values["metrics"], values["topk"], values["valid_metric"]
    names = [str(metric).lower() for metric in metrics]
    measured = {f"{name}@{length}" for name in names for length in topk} | (set(names) - set(of_lists))
    if values["eval_step"] and chosen.lower() not in measured:
        raise UserError(
            f"valid_metric is {chosen!r}, which is not among what is measured: {', '.join(metrics)} at "
            f"{', '.join(map(str, topk))}; change it, or metrics and topk"
        )


def refuse_clipping_by_number(clip: Any) -> None:
    """Refuse what RecBole's trainer would hand on as named arguments, and is none."""
    if clip is not None and not isinstance(clip, Mapping):
        raise UserError(f"clip_grad_norm is {clip!r}; RecBole takes keys: write clip_grad_norm: {{max_norm: {clip}}}")


def warn_about_unknown(run: RunConfig, given: Mapping[str, Any], known_to_recbole: Collection[str]) -> None:
    """RecBole takes any key in silence: name those that neither it nor this run's model knows."""
    sections = sections_of(run.model, run.mixer)
    ours = {"model", "dataset", "arm", "mixer", "training", *TRAINING, *MODEL_SECTIONS}
    for section in MODEL_SECTIONS:
        ours |= set(field_types(sections[section]))
    ours |= {key for key, name in MODEL_KEYS.items() if name in field_types(sections["backbone"])}
    known = ours | UNLISTED | set(known_to_recbole)
    for key, value in given.items():
        if value is None or key in known or (key in MODEL_KEYS and is_done(key, value)):
            continue
        if key in MODEL_KEYS:
            log.warning("key %r has no effect: model %r has no %r", key, run.model, MODEL_KEYS[key])
        elif theirs := {**RECBOLE_TRAINING, **RECBOLE_DATA}.get(key):
            log.warning("unknown key %r has no effect; RecBole calls it %r", key, theirs)
        else:
            meant = nearest(str(key), known)
            log.warning("unknown key %r has no effect%s", key, f"; did you mean {meant!r}?" if meant else "")


def refuse_short_window(window: int, needed: int) -> None:
    """Refuse a RecBole window that would cut histories which the model reads in full."""
    if window < needed:
        raise UserError(
            f"MAX_ITEM_LIST_LENGTH is {window}, but the run reads {needed} events; set it to {needed} or more"
        )


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
            theirs = RECBOLE_TRAINING.get(key)
            use = f"write {theirs} at the top of the config" if theirs else "leave it out"
            raise UserError(f"training.{key} has no effect, since RecBole's own trainer runs; {use}")
