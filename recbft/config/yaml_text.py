"""Configuration as text: YAML files and ``key=value`` settings, put in their sections.

YAML is read with the scalar rules of version 1.2, so that ``1e-3`` is a number and ``off`` and ``no`` are words; a key
given twice is refused. A setting is written with its section (``core.lam_max=10``) or, since names differ between
sections, bare (``epochs=50``); a file may be nested or flat in the same way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

from recbft.config.fields import NULL_WORDS, Verbatim, field_types
from recbft.config.recbole_yaml import HANDLED, IGNORED, NAMED, OTHER_WORDS
from recbft.errors import UserError, did_you_mean
from recbft.system.files import user_path

# What RecBole calls some of our keys: the message about an unknown key then names ours.
RECBOLE_NAMES = NAMED | {key: NAMED.get(meant, meant) for key, meant in OTHER_WORDS.items()}
# What other libraries call our keys.
ELSEWHERE = {
    "lr": "learning_rate",
    **dict.fromkeys(("embedding_dim", "emb_dim", "emb_size", "hidden_dim", "hidden_units", "d_model"), "hidden_size"),
    **dict.fromkeys(("max_len", "maxlen", "seq_len", "sequence_length"), "max_length"),
    **dict.fromkeys(("num_epochs", "n_epochs", "max_epochs"), "epochs"),
    **dict.fromkeys(("num_blocks", "n_blocks"), "n_layers"),
    "n_negatives": "num_negatives",
}
FEW_NAMES = 20  # that a message lists
MOST_BYTES = 2**18  # of a file of settings
MOST_VALUES = 20_000  # that a file or a setting stands for


class _Loader(yaml.SafeLoader):
    """SafeLoader with the YAML 1.2 core scalars and unique keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key_node, yaml.ScalarNode) and key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} appears twice", key_node.start_mark)
            if isinstance(key_node, yaml.ScalarNode):
                keys.add(key)
        return super().construct_mapping(node, deep)

    def construct_whole_number(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node))

    def construct_text(self, node: yaml.ScalarNode) -> str:
        """A text; a quoted ``none`` or the like is the word and not the value."""
        text = self.construct_scalar(node)
        return Verbatim(text) if node.style is not None and text.lower() in NULL_WORDS else str(text)


_FLOAT = r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_SCALARS = {
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "tag:yaml.org,2002:int": (r"[-+]?\d+", list("-+0123456789")),
    "tag:yaml.org,2002:float": (_FLOAT, list("-+0123456789.")),
}
_Loader.yaml_implicit_resolvers = {}
for _tag, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_whole_number)
_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_text)


class _Dumper(yaml.SafeDumper):
    """SafeDumper with lists on one line, and quotes around text that would be read as a number or as not set."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if re.fullmatch(_FLOAT, text) or text.lower() in NULL_WORDS else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


for _text in (str, Verbatim):
    _Dumper.add_representer(_text, _represent_text)
for _kind in (list, tuple):
    _Dumper.add_representer(
        _kind, lambda dumper, parts: dumper.represent_sequence("tag:yaml.org,2002:seq", parts, flow_style=True)
    )


def read_yaml(path: Path | str) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping."""
    path = user_path(path)
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)  # of a device there is no end
        if len(content) > MOST_BYTES:
            raise UserError(f"{path}: has more than {MOST_BYTES:,} bytes; give the path of a YAML file with settings")
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        problem = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or error
        raise UserError(f"{path}: {problem}; give the path of a YAML file") from None
    tree = parse_yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: holds {type(tree).__name__}, not keys and values; write lines such as 'epochs: 50'")
    return tree


def to_yaml(tree: Mapping[str, Any]) -> str:
    """YAML text of ``tree``, keys in their order; ``read_yaml`` and any YAML 1.1 reader give the same values back."""
    return yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


_SIGNS = re.compile(r"""[^\w\[\]{}"'~]+""")  # without those that are values in YAML


def parse_setting(text: str) -> tuple[str, Any]:
    """Key and value of ``key=value``; the value is a YAML scalar or list, or signs alone, such as a separator.

    >>> parse_setting("learning_rate=1e-3"), parse_setting("ks=[5, 10]"), parse_setting("jacobian=off")
    (('learning_rate', 0.001), ('ks', [5, 10]), ('jacobian', 'off'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"setting {text!r} is not key=value; write for example epochs=50")
    if _SIGNS.fullmatch(value):
        return key.strip(), value
    return key.strip(), parse_yaml(value, f"setting {text!r}")


def place(tree: dict[str, Any], key: str, value: Any, top: Collection[str], sections: Mapping[str, type]) -> None:
    """Put ``value`` into the nested ``tree`` where ``key`` belongs: a top name, a section, section.name or a bare name.

    Args:
        tree: changed in place; section -> {name: value}.
        top: keys that belong to no section.
        sections: section name -> config class, whose fields are its names.
    """
    section, dot, name = key.partition(".")
    if dot:
        if section not in sections:
            raise UserError(f"unknown section {section!r} in key {key!r}; {did_you_mean(section, sections)}")
        fields = field_types(sections[section])
        if name not in fields:
            outer, _, inner = name.partition(".")
            if inner and any(map(is_dataclass, get_args(fields.get(outer)))):
                inside = yaml.dump({inner: value}, Dumper=_Dumper, default_flow_style=True, width=math.inf).strip()
                raise UserError(f"unknown key {key!r}; write {section}.{outer}={inside}")
            owners = [owner for owner, cls in sections.items() if name in field_types(cls)]
            elsewhere = f"write {' or '.join(f'{owner}.{name}' for owner in owners)}" if owners else None
            raise UserError(f"unknown key {key!r}; {elsewhere or _nearest(name, fields, top)}")
        _put(tree, section, name, value)
    elif key in top:
        tree[key] = value
    elif key in sections:
        if value is not None and not isinstance(value, Mapping):
            raise UserError(f"{key} is {value!r}; it is a section: give keys and values")
        for inner, inner_value in (value or {}).items():
            place(tree, f"{key}.{inner}", inner_value, top, sections)
    else:
        owners = [owner for owner, cls in sections.items() if key in field_types(cls)]
        if not owners:
            everywhere = {*top, *(field for cls in sections.values() for field in field_types(cls))}
            raise UserError(f"unknown key {key!r}; {_nearest(key, everywhere)}")
        if len(owners) > 1:
            raise UserError(f"key {key!r} is in {' and '.join(owners)}; write {owners[0]}.{key} or {owners[1]}.{key}")
        _put(tree, owners[0], key, value)


def _put(tree: dict[str, Any], section: str, name: str, value: Any) -> None:
    values = tree.setdefault(section, {})
    if name in values:
        raise UserError(f"{section}.{name} is given twice, as {values[name]!r} and as {value!r}; leave one of them out")
    values[name] = value


def _nearest(name: str, names: Collection[str], beyond: Collection[str] = ()) -> str:
    """Which of ``names`` was meant, or what recbft calls it, there or in ``beyond``."""
    own = RECBOLE_NAMES.get(name, ELSEWHERE.get(name, "")).rpartition(".")[2]
    if own in {*names, *beyond}:
        return f"recbft calls it {own!r}" + (", which is one more" if name == "stopping_step" else "")
    if name in IGNORED | HANDLED | OTHER_WORDS.keys():
        return "RecBole's keys are read in a config file alone"
    many = "`recbft models NAME`" if len(names) > FEW_NAMES else None
    return did_you_mean(name, names, listed_by=many)


def parse_yaml(text: str, source: str) -> Any:
    """What YAML text holds; messages say that it stands in ``source``."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        refuse_repetition(node, source)
        return None if node is None else loader.construct_document(node)
    except UserError:
        raise
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{source}{line}: {problem or ' '.join(str(error).split())}; correct the YAML") from None
    except (RecursionError, ValueError, KeyError, AttributeError, TypeError):
        # Nested too deeply; a tag that its value does not fit, such as `!!int abc`; a number of 5,000 digits.
        raise UserError(f"{source}: has a value that cannot be read; correct the YAML") from None


def refuse_repetition(tree: Any, source: str) -> None:
    """Refuse what becomes huge where it is written out: aliases of lists of aliases, in a few lines of YAML.

    The tree is a YAML node, or lists and mappings read from one.
    """
    number, left = 1, [tree]
    while left:
        part = left.pop()
        inner = part.value if isinstance(part, yaml.Node) else part
        if isinstance(inner, Mapping):
            inner = [*inner.keys(), *inner.values()]
        if isinstance(inner, (list, tuple)):
            number += len(inner)
            left += inner
        if number > MOST_VALUES:
            raise UserError(
                f"{source}: has more than {MOST_VALUES:,} values, its aliases (*name) written out; give fewer"
            )
