"""What a RecBole config says about one of our models, as the run it describes.

RecBole's config is one flat space of names. Those of the backbone and the core are read by their bare names, and by
RecBole's own names where it has others (``hidden_dropout_prob``); of training, only what the adapter's trainer uses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from recbft.config import check_choice, field_types
from recbft.errors import UserError, did_you_mean
from recbft.models import MODELS
from recbft.recbole.registry import ADAPTED
from recbft.recbole_yaml import MODEL_KEYS, refuse_other_losses
from recbft.run_config import RunConfig, load_run_config, sections_of

TRAINING = ("epochs", "learning_rate", "weight_decay", "precision_lr_multiplier", "warmup_steps")

log = logging.getLogger(__name__)


def run_config(name: str, values: Mapping[str, Any]) -> RunConfig:
    """The run that a RecBole config describes.

    Args:
        name: of the model, in ``ADAPTED``.
        values: all keys of the config, RecBole's own included.

    Raises:
        UserError: a value is wrong, or has no effect in this arm.
    """
    refuse_other_losses(values.get("loss_type"))
    adapted = ADAPTED[name]
    arm = values.get("arm") or adapted.arm
    mixer = values.get("mixer")
    if mixer is not None:
        check_choice("mixer", mixer, MODELS[adapted.model].mixers)
    sections = sections_of(adapted.model, mixer)
    ours: dict[str, dict[str, Any]] = {section: {} for section in ("backbone", "mixing", "moe", "core", "training")}
    for recbole_name, our_name in MODEL_KEYS.items():
        if values.get(recbole_name) is not None and our_name in field_types(sections["backbone"]):
            ours["backbone"][our_name] = values[recbole_name]
    for section, named in ours.items():
        known = TRAINING if section == "training" else field_types(sections[section])
        named.update({key: values[key] for key in known if values.get(key) is not None})
        named.update(values.get(section) or {})
    named_values: dict[str, Any] = {**ours, "model": adapted.model, "arm": arm, "seed": values.get("seed", 0)}
    named_values["mixer"] = mixer
    return load_run_config(**named_values)


def warn_about_unknown(name: str, given: Iterable[str], known_to_recbole: Iterable[str]) -> None:
    """RecBole takes any key in silence: name those that neither it nor we know."""
    ours = {"arm", "backbone", "mixer", "mixing", "moe", "core", "training", "model", "dataset", *TRAINING, *MODEL_KEYS}
    for cls in (MODELS[ADAPTED[name].model].config, sections_of(ADAPTED[name].model)["core"]):
        ours |= set(field_types(cls))
    known = ours | set(known_to_recbole)
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known)
            log.warning("unknown key %r has no effect%s", key, f"; {hint}" if hint.startswith("did") else "")


def refuse_short_window(window: int, needed: int) -> None:
    """Refuse a RecBole window that would cut histories which the model reads in full."""
    if window < needed:
        raise UserError(
            f"MAX_ITEM_LIST_LENGTH is {window}, but the run reads {needed} events; set it to {needed} or more"
        )
