"""Read a RecBole config as one of ours: keys with RecBole's meaning, those without one here named, the rest refused.

    train_batch_size   training rows, a prefix of a history each, per step     ->  training.batch_targets
    stopping_step      validations that may fail before one more ends it       ->  training.patience = stopping_step + 1
    *_inter_num_interval, val_interval, rm_dup_inter                           ->  data.min_*_events, where, deduplicate
    eval_args          only what is evaluated here: leave-one-out, ordered by time, full ranking

A key left out has the default it has in recbft, but for the samples, which are prefixes. Nothing here imports RecBole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from recbft.config.fields import is_whole
from recbft.errors import UserError, closest, did_you_mean
from recbft.system.files import user_path


class Adapted(NamedTuple):
    """A model of ours under a name in RecBole."""

    model: str  # in recbft.models.MODELS
    arm: str | None  # unless the config's ``arm`` says otherwise


# RecBole's own models that one of ours stands for, and the models that ``recbft.recbole`` adds to RecBole.
ADAPTED = {
    "SASRecBFT": Adapted("sasrec", "bft"),
    "BERT4RecBFT": Adapted("bert4rec", "bft"),
    "HSTUBFT": Adapted("hstu", "bft"),
    "HSTU": Adapted("hstu", "published"),
}
MODELS = {
    "SASRec": Adapted("sasrec", "published"),
    "BERT4Rec": Adapted("bert4rec", "published"),
    **ADAPTED,
    "Pop": Adapted("pop", None),
}

# RecBole's name -> ours, the value being the same.
MODEL_KEYS = {
    "MAX_ITEM_LIST_LENGTH": "max_length",
    "hidden_dropout_prob": "dropout",
    "attn_dropout_prob": "attention_dropout",
    "hidden_act": "activation",
    "layer_norm_eps": "norm_eps",
    "mask_ratio": "mask_probability",
    "ft_ratio": "last_item_probability",
}
RENAMED = {
    **MODEL_KEYS,
    "USER_ID_FIELD": "user",
    "ITEM_ID_FIELD": "item",
    "TIME_FIELD": "data.time",  # some mixers have a time of their own
    "rm_dup_inter": "deduplicate",
    "topk": "ks",
    "eval_step": "eval_every",
}

# RecBole's name -> ours, whose value is written otherwise.
TRANSLATED = {
    "train_batch_size": "batch_targets",
    "stopping_step": "patience",
    "clip_grad_norm": "clip_norm",
    "user_inter_num_interval": "min_user_events",
    "item_inter_num_interval": "min_item_events",
    "val_interval": "where",
    "wandb_project": "project",  # where log_wandb is true
}
OUR_NAMES = {**RENAMED, **TRANSLATED}
# With those that a config gives no value, or one of another kind: what RecBole calls our keys.
NAMED = {
    **OUR_NAMES,
    "field_separator": "separator",
    "data_path": "data_root",
    "reproducibility": "deterministic",
    "loss_type": "loss",
}

# Keys of other models and of RecBole before 1.0, and the key of today that says the same of ours.
OTHER_WORDS = {
    **dict.fromkeys(("num_layers", "num_hidden_layers"), "n_layers"),
    **dict.fromkeys(("num_heads", "num_attention_heads"), "n_heads"),
    **dict.fromkeys(("max_seq_length", "max_seq_len"), "MAX_ITEM_LIST_LENGTH"),
    "dropout_prob": "hidden_dropout_prob",
    "attention_dropout_prob": "attn_dropout_prob",
    "embedding_size": "hidden_size",
    "item_features": "items",
    **dict.fromkeys(("eval_setting", "split_ratio", "leave_one_num", "group_by_user"), "eval_args"),
    **dict.fromkeys(("min_user_inter_num", "max_user_inter_num"), "user_inter_num_interval"),
    **dict.fromkeys(("min_item_inter_num", "max_item_inter_num"), "item_inter_num_interval"),
    **dict.fromkeys(("lowest_val", "highest_val", "equal_val"), "val_interval"),
}

CPU = ("", "-1")  # as gpu_id
# RecBole reads YAML 1.1, in which these words are true and false; read_yaml takes them for text.
WORDS = {"yes": True, "on": True, "no": False, "off": False}
SWITCHES = ("use_gpu", "repeatable", "log_wandb")
# Of what has no meaning, that which recbft does anyway; else it is False.
AS_HERE = {"shuffle": True, "transform": "mask_itemseq", "hidden_act": "gelu"}
LAYERS = ("n_layers", "n_heads", "hidden_size", "inner_size", "initializer_range")  # the same word in both
UNIFORM = {"distribution": "uniform", "alpha": 1.0, "dynamic": False, "candidate_num": 0}  # of drawn negatives
METRICS = {"hit": "hr", "recall": "hr", "ndcg": "ndcg", "mrr": "mrr", "map": "mrr"}  # with one target per user
OF_LISTS = {"itemcoverage", "giniindex", "averagepopularity"}  # recorded for the test whether asked for or not

IGNORED = frozenset(
    """
    gpu_id worker state reproducibility checkpoint_dir show_progress config_file save_dataset dataset_save_path
    save_dataloaders dataloaders_save_path shuffle encoding nproc world_size local_rank
    loss_decimal_place require_pow enable_amp enable_scaler transform valid_metric_bigger eval_batch_size
    seq_separator RATING_FIELD LABEL_FIELD threshold NEG_PREFIX ITEM_LIST_LENGTH_FIELD LIST_SUFFIX
    POSITION_FIELD seq_len HEAD_ENTITY_ID_FIELD TAIL_ENTITY_ID_FIELD RELATION_ID_FIELD ENTITY_ID_FIELD kg_reverse_r
    entity_kg_num_interval relation_kg_num_interval unload_col unused_col additional_feat_suffix numerical_features
    filter_inter_by_user_or_item alias_of_user_id alias_of_entity_id alias_of_relation_id preload_weight normalize_field
    normalize_all discretization embedding_size kg_embedding_size reg_weight
    """.split()  # noqa: SIM905  a table
)
HANDLED = frozenset(
    """
    model dataset data_path use_gpu train_batch_size stopping_step clip_grad_norm learner loss_type metrics valid_metric
    train_neg_sample_args neg_sampling training_neg_sample_num eval_args repeatable load_col user_inter_num_interval
    item_inter_num_interval val_interval benchmark_filename alias_of_item_id field_separator
    metric_decimal_place log_wandb wandb_project
    """.split()  # noqa: SIM905  a table
)


def is_recbole(tree: Mapping[str, Any], ours: Collection[str]) -> bool:
    """Whether a flat config speaks RecBole: a key that only RecBole has, or a model by RecBole's name."""
    known = (set(RENAMED) | IGNORED | HANDLED) - set(ours)
    return any(key in known for key in tree) or tree.get("model") in MODELS


def from_recbole(
    tree: Mapping[str, Any], ours: Collection[str], above: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The keys of recbft that a RecBole config stands for, and the keys that have no meaning here.

    Args:
        tree: the config as read; keys of recbft may stand among RecBole's.
        ours: every key and section name of recbft.
        above: what is asked for in place of the config's ``model`` and ``dataset``; of the data set the keys say where
            it lies.

    Raises:
        UserError: a key is unknown, or asks for what recbft does not do.
    """
    if above.get("model") is not None and tree.get("model") not in MODELS:
        tree = {key: value for key, value in tree.items() if key != "model"}
    model = _ours_for(tree.get("model"))
    _refuse_unknown(tree, set(RENAMED) | IGNORED | HANDLED | set(ours))
    tree = {key: _switch(key, value) for key, value in tree.items()}
    _refuse_other_data(tree)
    loss = _loss(tree)
    _refuse_other_evaluation(tree)
    _refuse_two_names(tree)
    made = {key: value for key, value in tree.items() if key.partition(".")[0] in ours and key not in HANDLED}
    made |= {RENAMED[key]: value for key, value in tree.items() if key in RENAMED and value is not None}
    asked = [key for key, value in tree.items() if value is not None and not is_done(key, value)]
    ignored = [key for key in asked if key in IGNORED and key not in ours]
    ignored += [f"load_col.{part}" for part in (tree.get("load_col") or {}) if part != "inter"]
    known = {*METRICS, *OF_LISTS}
    ignored += [f"metrics: {name}" for name in _listed(tree.get("metrics")) if str(name).lower() not in known]
    return {
        **model,
        **loss,
        **_own_layer(tree),
        **_data(tree, above.get("dataset")),
        **_training(tree),
        **_tracking(tree),
        **made,
    }, ignored


def lacking(tree: Mapping[str, Any], fields: Collection[str]) -> tuple[set[str], list[str]]:
    """What a config says by RecBole's words and the model has no setting for, as RecBole's own models ignore it.

    Args:
        tree: the config as read.
        fields: the model's settings.

    Returns:
        Our names of these, and the keys of the config to be named in a warning.
    """
    names = MODEL_KEYS | {key: key for key in LAYERS}
    absent = {key: name for key, name in names.items() if tree.get(key) is not None and name not in fields}
    absent = {key: name for key, name in absent.items() if key == name or name not in tree}
    if tree.get("loss_type") == "BPR" and "loss" not in fields:
        absent |= {"loss_type": "loss", "train_neg_sample_args": "num_negatives"}
    return set(absent.values()), [key for key in absent if not is_done(key, tree.get(key, False))]


def written(tree: Mapping[str, Any]) -> dict[str, str]:
    """Our bare names of what a config sets, and what it calls each: messages about a value name what was written."""
    names = {key: OUR_NAMES.get(key, str(key)).rpartition(".")[2] for key in tree if tree[key] is not None}
    return {name: "clip_grad_norm.max_norm" if name == "clip_norm" else key for key, name in names.items()}


def is_done(key: str, value: Any) -> bool:
    """Whether a key without meaning asks for what recbft does anyway."""
    return (key == "gpu_id" and str(value) in CPU) or (value == AS_HERE[key] if key in AS_HERE else value is False)


def nearest(key: str, known: Collection[str]) -> str | None:
    """The key that was meant, as far as can be told."""
    return OTHER_WORDS[key] if OTHER_WORDS.get(key) in known else closest(key, known)


def _ours_for(name: Any) -> dict[str, Any]:
    """The keys of recbft that a config's ``model`` stands for; it may be one of ours by our name."""
    if name is None or name in [model for model, _ in MODELS.values()]:
        return {} if name is None else {"model": name}
    if not isinstance(name, str) or name not in MODELS:
        raise UserError(f"model {name!r} is not in recbft; choose one of {', '.join(MODELS)}")
    model, arm = MODELS[name]
    return {"model": model, **({} if arm is None else {"arm": arm})}


def _own_layer(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What makes RecBole's own SASRec, of which the authors' layer is another, of its post-norm layer."""
    if tree.get("model") != "SASRec" or tree.get("layer") != "post_norm":
        return {}
    return {"arm": "matched", "output_projection": True}


def _refuse_unknown(tree: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse the keys that neither RecBole nor recbft has, all in one message: RecBole takes any in silence."""
    unknown = {key: nearest(str(key), known) for key in tree if str(key).partition(".")[0] not in known}
    if len(unknown) > 1:
        named = ", ".join(f"{key!r} ({meant}?)" if meant else repr(key) for key, meant in unknown.items())
        raise UserError(f"unknown keys {named}; correct each or leave it out")
    for key, meant in unknown.items():
        raise UserError(f"unknown key {key!r}; " + (f"did you mean {meant!r}?" if meant else "leave it out"))


def _switch(key: str, value: Any) -> Any:
    """The value as RecBole reads it where the key is a switch, or has no meaning here."""
    if key not in SWITCHES and key not in IGNORED:
        return value
    value = WORDS.get(value.lower(), value) if isinstance(value, str) else value
    if key in SWITCHES and not isinstance(value, bool):
        raise UserError(f"{key} is {value!r}; write True or False")
    return value


def _refuse_two_names(tree: Mapping[str, Any]) -> None:
    """Refuse a setting that is given by RecBole's name and by ours."""
    for key, own in OUR_NAMES.items():
        if key != own and tree.get(key) is not None and tree.get(own) is not None and tree[key] != tree[own]:
            raise UserError(
                f"{key} is {tree[key]!r} and {own} is {tree[own]!r}, but they are one setting; leave one of them out"
            )


def refuse_other_losses(loss_type: Any) -> None:
    """In RecBole's trainer only CE has a meaning: the targets of a batch, without negatives drawn by RecBole.

    Raises:
        UserError: the config asks for another.
    """
    if loss_type != "CE":
        pairs = ", which pairs targets with RecBole's sampled negatives" if str(loss_type).upper() == "BPR" else ""
        raise UserError(
            f"loss_type is {loss_type!r}{pairs}; write loss_type: CE "
            "(key loss chooses among ce, sampled_softmax, bce, gbce and bpr)"
        )


def _loss(tree: Mapping[str, Any]) -> dict[str, Any]:
    """CE, the usual loss, takes no negatives; BPR takes uniform ones, drawn as RecBole draws them."""
    loss_type = tree.get("loss_type", "CE")
    pairwise = loss_type == "BPR"
    if not pairwise:
        refuse_other_losses(loss_type)
    number = 1
    for key in ("train_neg_sample_args", "neg_sampling", "training_neg_sample_num"):
        value = tree.get(key)
        if value and not pairwise:
            raise UserError(f"{key} is {value!r}, but loss_type CE takes no sampled negatives; write {key}: ~")
        if value:
            number = _number_of_negatives(key, value)
    return {} if not pairwise else {"loss": "bpr", **({} if number == 1 else {"num_negatives": number})}


def _number_of_negatives(key: str, value: Any) -> int:
    """How many are drawn per target, uniformly and once for all."""
    number = value
    if isinstance(value, Mapping):
        rest = dict(value)
        number = rest.pop("uniform", None) if key == "neg_sampling" else rest.pop("sample_num", 1)
        if any(part != UNIFORM.get(name) for name, part in rest.items()):
            number = None
    if not (is_whole(number) and number >= 1):
        raise UserError(
            f"{key} is {value!r}, but negatives are drawn uniformly; write train_neg_sample_args: "
            "{distribution: uniform, sample_num: 1}"
        )
    return int(number)


def _refuse_other_evaluation(tree: Mapping[str, Any]) -> None:
    if not tree.get("repeatable", True):
        raise UserError(
            "repeatable is False; RecBole's sequential models need True, and filter_seen: true masks what was seen"
        )
    given = tree.get("eval_args")
    if given is None:
        return
    _check_mapping("eval_args", given, "order: TO")
    split, mode = given.get("split", {"RS": None}), given.get("mode", "full")
    if split != {"LS": "valid_and_test"} and tree.get("benchmark_filename") is None:  # which RecBole does not split
        raise UserError(
            f"eval_args.split is {split!r}; recbft splits by leave-one-out: write split: {{LS: valid_and_test}}"
        )
    if given.get("order", "RO") != "TO":
        said = repr(given["order"]) if "order" in given else "left out, which RecBole reads as RO: a random order"
        raise UserError(f"eval_args.order is {said}; histories are ordered by time: write order: TO")
    modes = list(mode.values()) if isinstance(mode, Mapping) else [mode]
    if not modes or any(each != "full" for each in modes):
        raise UserError(f"eval_args.mode is {mode!r}; recbft ranks among all items: write mode: full")


def _refuse_other_data(tree: Mapping[str, Any]) -> None:
    if tree.get("rm_dup_inter") is not None and tree.get("val_interval"):
        raise UserError(
            "rm_dup_inter and val_interval do not go together: RecBole removes repeated pairs before it filters by "
            "value, recbft after; write recbft's deduplicate and where if that order will do"
        )
    if tree.get("alias_of_item_id") is not None:
        raise UserError(
            "alias_of_item_id names columns that hold whole histories; recbft reads one event per row: leave it out, "
            "and give .inter files of single events"
        )
    parts = tree.get("benchmark_filename")
    if parts is not None and not (isinstance(parts, (list, tuple)) and len(parts) == 3):
        raise UserError(
            f"benchmark_filename is {parts!r}; name the files that train, validate and test, such as [train, valid, "
            "test]"
        )
    time = tree.get("TIME_FIELD", tree.get("time", "timestamp"))
    if time is None and parts is not None:
        return
    if time is None:
        raise UserError("TIME_FIELD is empty; histories are ordered by time: name the time column")
    load_col = _check_mapping("load_col", tree.get("load_col") or {}, "inter: [user_id, item_id, timestamp]")
    load = load_col.get("inter", "*")
    if load == "*":
        return
    if isinstance(load, str) or not isinstance(load, Collection):
        raise UserError(f"load_col.inter is {load!r}; give a list, such as [user_id, item_id, {time}], or '*' for all")
    if time not in load:
        raise UserError(
            f"load_col.inter is {list(load)} without the time column {time!r}, by which histories are ordered; add it"
        )


def _data(tree: Mapping[str, Any], asked: str | None) -> dict[str, Any]:
    made: dict[str, Any] = {}
    name = tree.get("dataset") if asked is None else asked
    if name is not None:
        folder = user_path(str(tree.get("data_path", "dataset/"))) / str(name)
        file = folder / f"{name}.inter"
        if tree.get("benchmark_filename") is not None:
            parts = zip(("name", "validation", "test"), tree["benchmark_filename"], strict=True)
            files = {key: str(folder / f"{name}.{part}.inter") for key, part in parts}
            name = files.pop("name")
            made |= files
        # RecBole reads ml-100k from its own copy, wherever data_path points.
        elif name != "ml-100k" and (file.is_file() or ("data_path" in tree and asked is None)):
            name = str(file)
        made |= {"dataset": name}
        if str(name).endswith(".inter"):
            made |= {"user": "user_id", "item": "item_id"}
            made |= {} if "time" in tree or "TIME_FIELD" in tree else {"data.time": "timestamp"}
    if tree.get("field_separator", "\t") != "\t":
        raise UserError(
            f"field_separator is {tree['field_separator']!r}; atomic files are read with tabs: leave it out, and "
            "write the file with tabs if it has none"
        )
    for side in ("user", "item"):
        interval = tree.get(f"{side}_inter_num_interval")
        if interval is not None:
            made[f"min_{side}_events"] = _minimum(f"{side}_inter_num_interval", str(interval))
    intervals = _check_mapping("val_interval", tree.get("val_interval") or {}, "rating: '[4,inf)'")
    conditions = [_condition(field, str(interval)) for field, interval in intervals.items()]
    if any(conditions):
        made["where"] = " and ".join(filter(None, conditions))
    return made


def _training(tree: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if str(tree.get("learner", "adam")).lower() != "adam":
        raise UserError(f"learner is {tree['learner']!r}; recbft trains with adam: write learner: adam")
    if tree.get("train_batch_size") is not None:
        made["batch_targets"] = tree["train_batch_size"]
    steps = tree.get("stopping_step")
    if steps is not None:
        if not (is_whole(steps) and steps >= 0):
            raise UserError(f"stopping_step is {steps!r}; give a whole number >= 0")
        made["patience"] = steps + 1
    clip = tree.get("clip_grad_norm")
    if clip is not None:
        if not isinstance(clip, Mapping) or not {"max_norm"} <= set(clip) <= {"max_norm", "norm_type"}:
            raise UserError(f"clip_grad_norm is {clip!r}; write clip_grad_norm: {{max_norm: 5}}")
        if clip.get("norm_type", 2) != 2:
            raise UserError(f"clip_grad_norm.norm_type is {clip['norm_type']!r}; gradients are clipped by their 2-norm")
        made["clip_norm"] = clip["max_norm"]
    if tree.get("use_gpu") is False or str(tree.get("gpu_id")) in CPU:
        made["device"] = "cpu"
    if tree.get("valid_metric") is not None:
        metric, _, k = str(tree["valid_metric"]).partition("@")
        if metric.lower() not in METRICS and metric.lower() not in METRICS.values():
            raise UserError(f"valid_metric is {tree['valid_metric']!r}; {did_you_mean(metric, ['Hit', 'NDCG', 'MRR'])}")
        made["valid_metric"] = METRICS.get(metric.lower(), metric.lower()) + (f"@{k}" if k else "")
        if k.isdecimal() and tree.get("topk") is None and tree.get("ks") is None and int(k) not in (5, 10, 20):
            made["ks"] = sorted({5, 10, 20, int(k)})
    return made


def _tracking(tree: Mapping[str, Any]) -> dict[str, Any]:
    if not tree.get("log_wandb"):
        return {}
    if tree.get("trackers") is not None:
        raise UserError(f"log_wandb is True and trackers is {tree['trackers']!r}; name wandb in trackers alone")
    project = tree.get("wandb_project")
    return {"trackers": ["wandb"], **({} if project is None else {"project": project})}


_NUMBER = r"-?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
_INTERVAL = re.compile(rf"\s*([\[(])\s*({_NUMBER}|-inf)\s*,\s*\+?({_NUMBER}|inf)\s*([\])])\s*")


def _bounds(key: str, text: str) -> tuple[str, str, str, str]:
    match = _INTERVAL.fullmatch(text.lower())
    if match is None:
        raise UserError(f"{key} is {text!r}; write one interval, such as '[5,inf)'")
    left, low, high, right = match.groups()
    return left, low, high, right


def _minimum(key: str, text: str) -> int:
    left, low, high, _ = _bounds(key, text)
    if high != "inf":
        raise UserError(f"{key} is {text!r}; recbft knows no upper bound: write '{left}{low},inf)'")
    if low == "-inf":
        return 0
    if math.isinf(float(low)):
        raise UserError(f"{key} is {text!r}, which no number of events reaches; write one such as '[5,inf)'")
    whole = math.ceil(float(low))
    return max(0, whole + 1 if left == "(" and whole == float(low) else whole)


def _condition(field: str, text: str) -> str:
    left, low, high, right = _bounds(f"val_interval.{field}", text)
    lower = f"{field}>{'=' if left == '[' else ''}{low}" if low != "-inf" else ""
    upper = f"{field}<{'=' if right == ']' else ''}{high}" if high != "inf" else ""
    return " and ".join(filter(None, (lower, upper)))


def _check_mapping(key: str, value: Any, example: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{key} is {value!r}; give keys and values, such as {example}")
    return value


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
