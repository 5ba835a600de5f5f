from __future__ import annotations

import subprocess
import sys

import pytest

from recbft.errors import UserError
from recbft.models import MODELS
from recbft.recbole import compat, registry
from tests.recbole.conftest import NAMES


def in_a_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_registering_imports_neither_torch_nor_recbole():
    code = "import recbft.recbole, sys; print([n for n in ('torch', 'recbole', 'pandas') if n in sys.modules])"
    assert in_a_new_process(code) == "[]"


def test_it_does_not_matter_whether_recbole_is_imported_first():
    code = (
        "import recbole.config.configurator as c, recbole.utils as u; import recbft.recbole; "
        "print(u.get_model('HSTUBFT').__name__, c.Config._load_internal_config_dict.__module__)"
    )
    assert in_a_new_process(code) == "HSTUBFT recbft.recbole.registry"


def test_the_package_may_be_loaded_again_before_recbole():
    code = (
        "import importlib; import recbft.recbole; importlib.reload(recbft.recbole); import recbole.quick_start; "
        "from recbft.recbole.compat import applied; print(len(applied) == len(set(map(id, applied))))"
    )
    assert in_a_new_process(code) == "True"


def test_a_model_that_is_not_there_is_named():
    from recbole.utils import get_model

    with pytest.raises(ValueError, match=r"\[SASRecBTF\] is not the name of an existing model"):
        get_model("SASRecBTF")


@pytest.mark.parametrize("name", NAMES)
def test_recbole_finds_each_model_its_trainer_and_its_defaults_by_name(name):
    from recbole.config import Config
    from recbole.utils import get_model, get_trainer

    from recbft.recbole import models
    from recbft.recbole.trainer import PrecisionTrainer

    config = Config(model=name, dataset="ml-100k")
    assert get_model(name) is getattr(models, name) is config.model_class
    assert get_trainer(config["MODEL_TYPE"], name) is PrecisionTrainer
    assert config["arm"] == registry.ADAPTED[name].arm
    assert config["train_neg_sample_args"]["distribution"] == "none"


def test_every_name_stands_for_a_model_and_an_arm_that_exist():
    for adapted in registry.ADAPTED.values():
        assert adapted.arm in MODELS[adapted.model].arms


def test_a_config_says_more_than_our_defaults():
    from recbole.config import Config

    config = Config(model="SASRecBFT", dataset="ml-100k", config_dict={"n_layers": 3})
    assert config["n_layers"] == 3 and config["hidden_size"] == 64


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("MAX_ITEM_LIST_LENGTH", "ten", "MAX_ITEM_LIST_LENGTH is 'ten'; give a whole number"),
        ("epochs", 0, "epochs is 0; give a whole number >= 1"),
        ("core", {"lam_mx": 3}, "unknown key 'core.lam_mx'; did you mean 'lam_max'?"),
    ],
)
def test_a_wrong_key_of_the_model_is_refused_before_data_are_read(key, value, message):
    from recbole.config import Config

    with pytest.raises(UserError) as error:
        Config(model="SASRecBFT", dataset="nowhere", config_dict={key: value})
    assert str(error.value) == message


def test_without_recbole_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(compat.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        recbft_recbole().from_run("run", None, None)
    assert str(error.value) == f"RecBole is not installed; install it with: {compat.install_command()}"
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("version", "command"), [((3, 11), "pip install recbole"), ((3, 12), "pip install --no-deps")])
def test_the_command_to_install_suits_the_python(monkeypatch, version, command):
    monkeypatch.setattr(compat.sys, "version_info", version)
    assert compat.install_command().startswith(command)


def test_a_name_that_the_package_has_not_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'recbft\.recbole' has no attribute 'from_rum'"):
        recbft_recbole().from_rum  # noqa: B018


def recbft_recbole():
    import recbft.recbole

    return recbft.recbole


def test_the_operations_of_our_models_are_not_counted_by_modules(built):
    from types import SimpleNamespace

    quick_start = SimpleNamespace(get_flops=lambda model, *given: ("counted", *given))
    registry._leave_our_flops_uncounted(quick_start)
    assert quick_start.get_flops(built()[2], "data").startswith("not counted (thop sees called modules alone")
    assert quick_start.get_flops(object(), "data") == ("counted", "data")


@pytest.mark.parametrize(
    ("lower", "higher", "message"),
    [
        ({"core": {"lam_max": 5}}, {"lam_max": 7}, "lam_max is 7, but core.lam_max is 5 and stands above it"),
        ({"backbone": {"dropout": 0.3}}, {"hidden_dropout_prob": 0.1}, "_prob is 0.1, but backbone.dropout is 0.3 and"),
        ({"dropout": 0.3}, {"hidden_dropout_prob": 0.1}, "hidden_dropout_prob is 0.1, but dropout is 0.3 and stands"),
        ({"backbone": {"inner_size": None}}, {"inner_size": 8}, "inner_size is 8, but backbone.inner_size is None"),
        ({"training": {"warmup_steps": 5}}, {"warmup_steps": 6}, "warmup_steps is 6, but training.warmup_steps is 5"),
        ({"mixer": "rfa", "mixing": {"horizon": 3}}, {"horizon": 4}, "horizon is 4, but mixing.horizon is 3 and"),
        ({"core": {"lam_max": 5}, "dropout": 0.1}, {"lam_max": 5.0, "hidden_dropout_prob": 0.1}, None),
        ({"max_length": 5, "backbone": {"max_length": 5}}, {"MAX_ITEM_LIST_LENGTH": 12}, None),
        ({"backbone": {"dropout": 0.3}, "training": {"warmup_steps": 5}}, {}, None),  # over our defaults
    ],
)
def test_a_value_that_would_lose_to_one_from_a_lower_place_is_refused(
    lower, higher, message, settings, monkeypatch, at_home
):
    import yaml
    from recbole.config import Config

    def read(in_file, in_dict, in_argv, in_next_file=None):
        (at_home / "mine.yaml").write_text(yaml.safe_dump({**settings, **in_file}))
        (at_home / "next.yaml").write_text(yaml.safe_dump(in_next_file or {}))
        monkeypatch.setattr(sys, "argv", ["pytest", *(f"--{key}={value}" for key, value in in_argv.items())])
        files = ["mine.yaml", "next.yaml"]
        return Config(model="SASRecBFT", dataset="tiny", config_file_list=files, config_dict=in_dict)

    for places in ((lower, higher, {}), (lower, {}, higher), ({}, lower, higher), (lower, {}, {}, higher)):
        if message is None:
            assert read(*places)["arm"] == "bft"
        else:
            with pytest.raises(UserError, match=message):
                read(*places)
    assert read(higher, lower, {})["arm"] == "bft"  # the section of the higher place, as it is meant
    assert read({**higher, **lower}, {}, {})["arm"] == "bft"


@pytest.mark.parametrize(
    ("lower", "higher", "message"),
    [
        ({"core": {"lam_max": 5}}, {"core": {"q_max": 2}}, "core.lam_max is 5, but RecBole takes core from a higher"),
        (
            {"backbone": {"dropout": 0.3}},
            {"backbone": {"n_layers": 1}},
            "and dropout would be 0.5; write dropout there",
        ),
        ({"training": {"warmup_steps": 5}}, {"training": {"precision_lr_multiplier": 3}}, "training.warmup_steps is 5"),
        ({"core": {"lam_max": 5}}, {"core": {"q_max": 2, "lam_max": 7}}, None),
        ({"core": {"lam_max": 5}}, {"core": {"q_max": 2}, "lam_max": 7}, None),
        ({"backbone": {"dropout": 0.3}}, {"backbone": {"n_layers": 1}, "hidden_dropout_prob": 0.1}, None),
        ({"core": {"lam_max": 100}}, {"core": {"q_max": 2}}, None),  # as it is anyway
        ({"core": {"lam_max": 5}}, {"core": None}, None),  # written to be without
        ({"mixer": "rfa", "mixing": {"horizon": 3}}, {"mixer": "boosted", "mixing": {"rounds": 1}}, None),
        ({"core": 5}, {"core": {"q_max": 2}}, None),
    ],
)
def test_a_section_that_takes_the_place_of_a_lower_one_and_would_lose_a_key_of_it_is_refused(
    lower, higher, message, settings, at_home
):
    import yaml
    from recbole.config import Config

    def read(in_file, in_next_file, in_dict):
        (at_home / "mine.yaml").write_text(yaml.safe_dump({**settings, **in_file}))
        (at_home / "next.yaml").write_text(yaml.safe_dump(in_next_file))
        return Config(
            model="SASRecBFT", dataset="tiny", config_file_list=["mine.yaml", "next.yaml"], config_dict=in_dict
        )

    for places in ((lower, higher, {}), (lower, {}, higher), ({}, lower, higher)):
        if message is None:
            assert read(*places)["arm"] == "bft"
        else:
            with pytest.raises(UserError, match=message):
                read(*places)
