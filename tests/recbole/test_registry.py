from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import yaml

import recbft.recbole
from recbft.errors import UserError
from recbft.recbole import compat, hooks, registry
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


def test_the_package_may_be_loaded_again():
    hooked = [*sys.meta_path, *(len(found) for found in (*hooks._after.values(), *hooks._around.values()))]
    importlib.reload(recbft.recbole)
    assert hooked == [*sys.meta_path, *(len(found) for found in (*hooks._after.values(), *hooks._around.values()))]


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


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("MAX_ITEM_LIST_LENGTH", "ten", "MAX_ITEM_LIST_LENGTH is 'ten'; give a whole number"),
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
        recbft.recbole.from_run("run", None, None)
    assert str(error.value) == f"RecBole is not installed; install it with: {compat.install_command()}"
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("version", "command"), [((3, 11), "pip install recbole"), ((3, 12), "pip install --no-deps")])
def test_the_command_to_install_suits_the_python(monkeypatch, version, command):
    monkeypatch.setattr(compat.sys, "version_info", version)
    assert compat.install_command().startswith(command)


def test_a_name_that_the_package_has_not_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'recbft\.recbole' has no attribute 'from_rum'"):
        recbft.recbole.from_rum  # noqa: B018


def test_the_operations_of_our_models_are_not_counted_by_modules(built):
    from types import SimpleNamespace

    quick_start = SimpleNamespace(get_flops=lambda model, *given: ("counted", *given))
    registry._leave_our_flops_uncounted(quick_start)
    assert quick_start.get_flops(built()[2], "data").startswith("not counted (thop sees called modules alone")
    assert quick_start.get_flops(object(), "data") == ("counted", "data")


LOST = [
    (
        {"core": {"lam_max": 5}},
        {"lam_max": 7},
        "lam_max is 7, but another place of the config makes lam_max 5.0; write",
    ),
    ({"backbone": {"dropout": 0.3}}, {"hidden_dropout_prob": 0.1}, "hidden_dropout_prob is 0.1, .* makes dropout 0.3"),
    ({"dropout": 0.3}, {"hidden_dropout_prob": 0.1}, "makes dropout 0.3; write the keys of backbone in one place only"),
    ({"backbone": {"inner_size": None}}, {"inner_size": 8}, "inner_size is 8, but .* makes inner_size None"),
    ({"training": {"warmup_steps": 5}}, {"warmup_steps": 6}, "warmup_steps is 6, but .* makes warmup_steps 5"),
    ({"mixer": "rfa", "mixing": {"horizon": 3}}, {"horizon": 4}, "horizon is 4, but .* makes horizon 3.0"),
    # A section of a higher place replaces one of a lower place.
    ({"core": {"lam_max": 5}}, {"core": {"q_max": 2}}, "core.lam_max is 5, but .* makes lam_max 100.0"),
    ({"training": {"warmup_steps": 5}}, {"training": {"precision_lr_multiplier": 3}}, "training.warmup_steps is 5"),
]
KEPT = [
    ({"lam_max": 7}, {"core": {"lam_max": 5}}),  # a section, in the higher place
    ({"core": {"lam_max": 5}, "dropout": 0.1}, {"lam_max": 5.0, "hidden_dropout_prob": 0.1}),
    ({"max_length": 5, "backbone": {"max_length": 5}}, {"MAX_ITEM_LIST_LENGTH": 12}),
    ({"backbone": {"dropout": 0.3}, "training": {"warmup_steps": 5}}, {}),  # over our defaults
    ({"core": {"lam_max": 5}}, {"core": {"q_max": 2}, "lam_max": 7}),
    ({"backbone": {"dropout": 0.3}}, {"backbone": {"n_layers": 1}, "hidden_dropout_prob": 0.1}),
    ({"core": {"lam_max": 100}}, {"core": {"q_max": 2}}),  # as it is anyway
    ({"mixer": "rfa", "mixing": {"horizon": 3}}, {"mixer": "boosted", "mixing": {"rounds": 1}}),
    ({"core": 5}, {"core": {"q_max": 2}}),
]


@pytest.fixture
def read_places(settings, monkeypatch, at_home):
    """A Config from two files, a dictionary and the command line."""
    from recbole.config import Config

    def read(in_file, in_next_file, in_dict, in_argv):
        (at_home / "mine.yaml").write_text(yaml.safe_dump({**settings, **in_file}))
        (at_home / "next.yaml").write_text(yaml.safe_dump(in_next_file))
        monkeypatch.setattr(sys, "argv", ["pytest", *(f"--{key}={value}" for key, value in in_argv.items())])
        return Config(
            model="SASRecBFT", dataset="tiny", config_file_list=["mine.yaml", "next.yaml"], config_dict=in_dict
        )

    return read


@pytest.mark.parametrize(("lower", "higher", "message"), LOST)
def test_a_setting_that_would_be_lost_to_another_place_is_refused(lower, higher, message, read_places):
    for place in ((lower, higher, {}, {}), ({}, lower, higher, {})):
        with pytest.raises(UserError, match=message):
            read_places(*place)


def test_a_setting_of_the_command_line_is_not_lost_either(read_places):
    with pytest.raises(UserError, match="lam_max is 7, but another place"):
        read_places({"core": {"lam_max": 5}}, {}, {}, {"lam_max": 7})


@pytest.mark.parametrize(("lower", "higher"), KEPT)
def test_settings_of_several_places_that_agree_are_taken(lower, higher, read_places):
    for place in ((lower, higher, {}, {}), ({}, lower, higher, {})):
        assert read_places(*place)["arm"] == "bft"
