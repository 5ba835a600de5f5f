from __future__ import annotations

from dataclasses import dataclass

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from recbft.config.yaml_text import MOST_BYTES, parse_setting, place, read_yaml, refuse_repetition, to_yaml
from recbft.errors import UserError
from recbft.training.run_config import load_run_config


@dataclass(frozen=True, kw_only=True)
class Training:
    epochs: int = 200
    batch_size: int = 256


@dataclass(frozen=True, kw_only=True)
class Core:
    lam_max: float = 100.0
    rank: int = 16


@dataclass(frozen=True, kw_only=True)
class Backbone:
    hidden_size: int = 64
    rank: int = 4


SECTIONS = {"training": Training, "core": Core, "backbone": Backbone}


def placed(key, value):
    tree: dict = {}
    place(tree, key, value, ("model", "seed"), SECTIONS)
    return tree


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1e-3", 0.001),
        ("a=5", 5),
        ("a=off", "off"),
        ("a=true", True),
        ("a=null", None),
        ("a=", None),
        ("a=[5, 10]", [5, 10]),
        ("a=5,10", "5,10"),
        ("a=rating>=4", "rating>=4"),
        ("a='7'", "7"),
    ],
)
def test_a_setting_is_read_by_the_rules_of_yaml_1_2(text, value):
    key, got = parse_setting(text)
    assert key == "a" and got == value and type(got) is type(value)


@pytest.mark.parametrize("separator", ["::", "|", "#", "-", "\t", "→"])
def test_a_setting_of_signs_alone_is_a_separator_not_yaml(separator):
    config = load_run_config(settings=[f"data.separator={separator}"])
    assert config.data.separator == separator


def test_a_setting_that_cannot_be_read_is_refused_in_one_line():
    for text in ("epochs", "=3"):
        with pytest.raises(UserError, match="is not key=value; write for example epochs=50"):
            parse_setting(text)
    with pytest.raises(UserError, match=r"^setting 'ks=\[5', line 1: .*; correct the YAML$"):
        parse_setting("ks=[5")


@pytest.mark.parametrize(
    ("key", "value", "tree"),
    [
        ("seed", 3, {"seed": 3}),
        ("epochs", 3, {"training": {"epochs": 3}}),
        ("training.epochs", 3, {"training": {"epochs": 3}}),
        ("training", {"epochs": 3, "batch_size": 2}, {"training": {"epochs": 3, "batch_size": 2}}),
        ("core", None, {}),
        ("core.rank", 2, {"core": {"rank": 2}}),
    ],
)
def test_a_key_finds_its_section(key, value, tree):
    assert placed(key, value) == tree


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("epocs", 1, "unknown key 'epocs'; did you mean 'epochs'?"),
        ("trainig.epochs", 1, "unknown section 'trainig' in key 'trainig.epochs'; did you mean 'training'?"),
        ("embedding_size", 1, "unknown key 'embedding_size'; recbft calls it 'hidden_size'"),
        ("eval_args", "full", "unknown key 'eval_args'; RecBole's keys are read in a config file alone"),
        ("core.epochs", 1, "unknown key 'core.epochs'; write training.epochs"),
        ("core.rank2", 1, "unknown key 'core.rank2'; did you mean 'rank'?"),
        ("training", 3, "training is 3; it is a section: give keys and values"),
        ("rank", 3, "key 'rank' is in core and backbone; write core.rank or backbone.rank"),
    ],
)
def test_a_key_without_a_place_is_refused(key, value, message):
    with pytest.raises(UserError) as error:
        placed(key, value)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"epochs: 1\nepochs: 2\n", "line 2: key 'epochs' appears twice; correct the YAML"),
        (b"- 1\n", "holds list, not keys and values"),
        (b"name: \xff\n", "byte 6 is not UTF-8; save the file as UTF-8"),
        (b"a: !!python/object:os.system {}\n", "correct the YAML"),
        (b"a: \x00\n", "correct the YAML"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_yaml(path)
    assert str(error.value).startswith(str(path)) and message in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file_or_a_folder_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.yaml: no such file; give the path of a YAML file"):
        read_yaml(tmp_path / "nothing.yaml")
    with pytest.raises(UserError, match="Is a directory; give the path of a YAML file"):
        read_yaml(tmp_path)


def test_byte_order_mark_and_crlf_are_read_and_an_empty_file_is_an_empty_mapping(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbfepochs: 5\r\nname: \xc3\xbc\r\n")
    assert read_yaml(tmp_path / "run.yaml") == {"epochs": 5, "name": "ü"}
    (tmp_path / "run.yaml").write_text("# nothing\n")
    assert read_yaml(tmp_path / "run.yaml") == {}


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"])) | st.sampled_from(
    ["1e-3", "off", "010", "null", "none", "~", "1_0", "."]
)


@given(st.dictionaries(st.text("abc", min_size=1), scalars | texts | st.lists(scalars | texts, max_size=3), max_size=4))
def test_written_yaml_reads_back_equal_here_and_in_yaml_1_1(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("yaml") / "tree.yaml"
    path.write_text(to_yaml(tree), encoding="utf-8")
    assert read_yaml(path) == tree
    assert yaml.safe_load(to_yaml(tree)) == tree


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs=!!int abc", "has a value that cannot be read; correct the YAML"),
        ("epochs=!!bool maybe", "has a value that cannot be read; correct the YAML"),
        ("epochs=" + "9" * 5000, "has a value that cannot be read; correct the YAML"),
        ("learning_rate=" + "9" * 400, "give a number"),
    ],
    ids=range(4),
)
def test_a_value_that_cannot_be_read_is_refused_in_one_line(text, message):
    with pytest.raises(UserError, match=message):
        load_run_config(settings=[text])


# A few lines that stand for 9 ** 9 values.
BOMB = "\n".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}' if n else '1'] * 9)}]" for n in range(9))
REPEATED = r"has more than 20,000 values, its aliases \(\*name\) written out; give fewer"


def test_aliases_that_stand_for_millions_of_values_are_refused_at_once(tmp_path):
    (tmp_path / "config.yaml").write_text(BOMB)
    with pytest.raises(UserError, match=rf"config.yaml: {REPEATED}"):
        read_yaml(tmp_path / "config.yaml")
    with pytest.raises(UserError, match=rf"setting '.*: {REPEATED}"):
        parse_setting(f"ks={{{BOMB}}}".replace("\n", ", "))
    with pytest.raises(UserError, match=rf"the config: {REPEATED}"):
        refuse_repetition(yaml.safe_load(BOMB), "the config")


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}", "!!merge <<: &a [{b: 1}, *a]"])
def test_a_value_that_holds_itself_is_refused(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=REPEATED):
        read_yaml(tmp_path / "config.yaml")


def test_aliases_and_long_lists_are_read(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("a: &a [1, 2]\nb: *a\nc: [*a, *a]\nd: [" + "7, " * 5000 + "8]")
    tree = read_yaml(file)
    assert (tree["a"], tree["b"], tree["c"], len(tree["d"])) == ([1, 2], [1, 2], [[1, 2], [1, 2]], 5001)


def test_a_file_without_end_is_not_read_to_its_end():
    with pytest.raises(UserError, match=rf"/dev/zero: has more than {MOST_BYTES:,} bytes"):
        read_yaml("/dev/zero")


def test_the_middle_of_a_message_about_a_huge_value_is_left_out():
    message = str(UserError("ks is " + "7, " * 5000 + "give whole numbers"))
    assert len(message) < 4000 and message.startswith("ks is 7") and message.endswith("give whole numbers")
