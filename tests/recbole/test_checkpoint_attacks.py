"""Files that look like RecBole's checkpoints and would run code while they are read: each is refused, and none runs.

Each is put together from pickle's opcodes and would touch a file, by ``Config``, which evaluates the text it is given.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
import zipfile

import pytest
import torch

from recbft.errors import UserError
from recbft.recbole import checkpoints


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def mapping(**items: bytes) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


def made(kind: bytes, **state: bytes) -> bytes:
    """An object by NEWOBJ and BUILD."""
    return kind + b")\x81" + mapping(**state) + b"b"


CONFIG = named("recbole.config.configurator", "Config")
LINEAR = named("torch.nn.modules.linear", "Linear")
SEQUENTIAL = named("torch.nn.modules.container", "Sequential")
INTERACTION = named("recbole.data.interaction", "Interaction")
DATASET = named("recbole.data.dataset.dataset", "Dataset")
LAYER = named("recbole.model.layers", "FMEmbedding")
SPARSE = named("scipy.sparse._csr", "csr_matrix")
LOGGER = named("logging", "getLogger") + text("a") + b"\x85R"
ORDERED = named("collections", "OrderedDict") + b")R"
TENSOR = named("torch._utils", "_rebuild_tensor_v2")
# What a layer needs to be called.
WHOLE = dict.fromkeys(
    ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_parameters", "_buffers", "_modules"), b"}"
)
CODE = b"<code>"  # stands for what a Config evaluates, together with the other arguments of a call
ARGUMENTS = b"(NNN" + CODE + b"t"
LATER = b"\x94"  # MEMOIZE

# A call of an object, which its class or its own attributes may turn into a call of Config.
CALLS = {
    "its compiled call": made(LINEAR, _compiled_call_impl=CONFIG) + ARGUMENTS + b"R",
    "its forward": made(LINEAR, **WHOLE, _forward_pre_hooks=b"}", forward=CONFIG) + ARGUMENTS + b"R",
    "its call by class": made(LINEAR, _call_impl=CONFIG) + ARGUMENTS + b"R",
    "a hook": made(LINEAR, **{**WHOLE, "_forward_hooks": mapping(a=CONFIG)}) + ARGUMENTS + b"R",
    "a hook before": made(LINEAR, **WHOLE, _forward_pre_hooks=ORDERED + text("a") + CONFIG + b"s") + ARGUMENTS + b"R",
    "a nested layer": made(SEQUENTIAL, **{**WHOLE, "_modules": mapping(a=made(LINEAR, forward=CONFIG))})
    + ARGUMENTS + b"R",
    "a chain": made(LINEAR, **WHOLE, forward=made(LAYER, **WHOLE, _call_impl=made(LINEAR, **WHOLE, forward=CONFIG)))
    + ARGUMENTS + b"R",
    "a slot": LINEAR + b")\x81N" + mapping(_compiled_call_impl=CONFIG) + b"\x86b" + ARGUMENTS + b"R",
    "a slot beside a state": LINEAR + b")\x81}" + mapping(forward=CONFIG) + b"\x86b" + ARGUMENTS + b"R",
    "state set by a state": made(LINEAR, __setstate__=made(LINEAR, _compiled_call_impl=CONFIG)) + ARGUMENTS + b"b",
    "state set by a Config": made(CONFIG, final_config_dict=mapping(__setstate__=CONFIG)) + CODE + b"b",
    "state set by a method": made(DATASET, __setstate__=CONFIG) + CODE + b"b",
    "a list": made(LINEAR, append=CONFIG) + CODE + b"a",
    "a list of many": made(LINEAR, extend=CONFIG) + b"(" + CODE + b"e",
    "a set": made(LINEAR, add=CONFIG) + b"(" + CODE + b"\x90",
    "items": made(CONFIG, final_config_dict=made(SEQUENTIAL, __setitem__=CONFIG)) + text("a") + CODE + b"s",
    "items of many": made(INTERACTION, __setitem__=CONFIG) + b"(" + text("a") + CODE + b"u",
    "a key": b"}" + made(INTERACTION, __hash__=CONFIG) + CODE + b"s",
    "a key in a set": b"(" + made(CONFIG, __hash__=CONFIG) + b"\x91",
    "a class": CONFIG + ARGUMENTS + b"R",
    "a class made by INST": b"(NNN" + CODE + CONFIG[1:].join([b"i", b""]),
    "a class made by OBJ": b"(" + CONFIG + b"NNN" + CODE + b"o",
    "a class by an extension": b"\x82\xf7" + ARGUMENTS + b"R",
    "a class by a wide extension": b"\x83\xf7\x00" + ARGUMENTS + b"R",
    "a class by the widest extension": b"\x84\xf7\x00\x00\x00" + ARGUMENTS + b"R",
    "a class by its attribute": named("builtins", "getattr") + CONFIG + text("__call__") + b"\x86R" + ARGUMENTS + b"R",
    "a class's state": CONFIG + mapping(__call__=CONFIG) + b"b" + ARGUMENTS + b"R",
    "a dotted name": b"\x80\x04" + named("recbole.config.configurator", "Config.__call__") + ARGUMENTS + b"R",
    "a persistent id": made(LINEAR, _compiled_call_impl=CONFIG) + b"Q" + ARGUMENTS + b"R",
    "a persistent text": b"Pstorage\n" + ARGUMENTS + b"R",
    "a persistent tuple": b"(" + text("storage") + made(LINEAR, dtype=CONFIG) + text("0") + text("cpu") + b"K\x01tQ",
    "a default": named("collections", "defaultdict") + CONFIG + b"\x85R",
    "a default object": named("collections", "defaultdict") + made(LINEAR, _compiled_call_impl=CONFIG) + b"\x85R",
    "an argument": named("builtins", "list") + made(DATASET, __iter__=CONFIG) + b"\x85R",
    "a counted object": named("collections", "Counter") + made(INTERACTION, keys=CONFIG) + b"\x85R",
    "a tensor's hooks": TENSOR + b"(NK\x00))\x89" + mapping(a=CONFIG) + b"tR",
    "a logger": LOGGER + mapping(filters=b"](" + made(LINEAR, filter=CONFIG) + b"e") + b"b",
    "a codec": named("_codecs", "encode") + text("a") + text("unicode_escape") + b"\x86R",
    "an array": named("numpy._core.multiarray", "_reconstruct") + CONFIG + b"K\x00\x85C\x01b\x87R",
    "a number type": named("numpy", "dtype") + text("O8") + b"\x89\x88\x87R"
    b"(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
}  # fmt: skip
# A class that is none, but an object whose attribute makes what NEWOBJ asks for.
OF_NONE = b"NN" + CODE + b"\x87"  # Config's other three arguments
KINDS = (CONFIG, LINEAR, SEQUENTIAL, INTERACTION, DATASET, LAYER, SPARSE)
MADE = {f"{kind.split()[1].decode()}": made(kind, __new__=CONFIG) + OF_NONE + b"\x81" for kind in KINDS} | {
    "by keywords": made(LINEAR, __new__=CONFIG) + b")" + mapping(config_dict=CODE) + b"\x92",
    "a class by keywords": CONFIG + b")" + mapping(config_dict=CODE) + b"\x92",
    "a class with arguments": LINEAR + OF_NONE + b"\x81",
    "from a slot": LINEAR + b")\x81N" + mapping(__new__=CONFIG) + b"\x86b" + OF_NONE + b"\x81",
    "from an object": made(LINEAR, __new__=made(LINEAR, _compiled_call_impl=CONFIG)) + OF_NONE + b"\x81",
    "from a Config's items": made(CONFIG, final_config_dict=mapping(__new__=CONFIG)) + OF_NONE + b"\x81",
    "from a memo": made(LINEAR, __new__=CONFIG) + LATER + b"0h\x00" + OF_NONE + b"\x81",
    "after its state": LINEAR + b")\x81" + LATER + b"0h\x00" + mapping(__new__=CONFIG) + b"b" + OF_NONE + b"\x81",
    "from a list": b"](" + made(LAYER, __new__=CONFIG) + b"e" + made(LAYER, __new__=CONFIG) + OF_NONE + b"\x81",
    "of a function": named("logging", "getLogger") + OF_NONE + b"\x81",
    "of an enumeration": named("recbole.utils.enum_type", "ModelType") + b")\x81",
    "of a module": named("recbole.config", "configurator") + OF_NONE + b"\x81",
}
# Nothing is called while these are read: something would be later, from what they leave behind.
LEFT = {
    "a class": mapping(other_parameter=mapping(predict=CONFIG)),
    "a function": mapping(config=made(CONFIG, final_config_dict=mapping(seed=named("logging", "getLogger")))),
    "a class in a list": mapping(a=b"](" + CONFIG + b"e"),
    "a class in a tuple": b"](" + b"(" + CONFIG + b"te",
    "a class in an array": named("numpy._core.multiarray", "_reconstruct") + named("numpy", "ndarray")
    + b"K\x00\x85C\x01b\x87R(K\x01K\x01\x85" + named("numpy", "dtype") + text("O8") + b"\x89\x88\x87R\x89]("
    + CONFIG + b"etb",
    "a class in a slice": named("builtins", "slice") + b"NN](" + CONFIG + b"e\x87R",
    "a layer that is no child": mapping(a=made(LINEAR, _modules=b"}", weight=made(LINEAR))),
    "a layer in a Config": mapping(config=made(CONFIG, final_config_dict=mapping(_apply=made(LINEAR)))),
    "a layer among weights": mapping(state_dict=mapping(__torch_function__=made(LINEAR))),
    "an object in an optimizer": mapping(optimizer=mapping(state=made(INTERACTION, interaction=b"}"))),
    "a method of the model": mapping(other_parameter=mapping(predict=made(LINEAR))),
    "a model's own dictionary": mapping(other_parameter=mapping(__dict__=mapping(predict=made(LINEAR)))),
    "a model's layers": mapping(other_parameter=mapping(_modules=b"}")),
    "a model's hooks": mapping(other_parameter=mapping(_forward_hooks=mapping(a=made(LINEAR)))),
    "hooks added later": LINEAR + b")\x81" + mapping(_forward_hooks=b"}" + LATER) + b"b0h\x00" + text("a")
    + made(LINEAR) + b"s0" + mapping(a=LINEAR + b")\x81" + mapping(_forward_hooks=b"h\x00") + b"b"),
    "a loader of YAML": mapping(config=made(CONFIG, yaml_loader=named("yaml.loader", "UnsafeLoader"))),
    "a model as a loader": mapping(config=made(CONFIG, yaml_loader=CONFIG)),
    "an attribute of a dictionary": ORDERED + mapping(keys=CONFIG) + b"b",
}  # fmt: skip


def archive(pickled: bytes, file) -> None:
    """A checkpoint as PyTorch writes it, with another pickle in it."""
    written = io.BytesIO()
    torch.save({}, written)
    with zipfile.ZipFile(written) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickled if name.endswith("data.pkl") else old.read(name))


@pytest.fixture
def marker(tmp_path):
    """The file that every attack would make."""
    return tmp_path / "it_ran"


@pytest.fixture
def _extension(monkeypatch):
    """Config by a number, which this process has met before."""
    from recbole.config import Config

    copyreg.add_extension("recbole.config.configurator", "Config", 0xF7)
    monkeypatch.setitem(copyreg._extension_cache, 0xF7, Config)
    yield
    copyreg.remove_extension("recbole.config.configurator", "Config", 0xF7)


@pytest.mark.usefixtures("_extension")
@pytest.mark.parametrize("within_a_config", [False, True])
@pytest.mark.parametrize("attack", [*CALLS.values(), *MADE.values(), *LEFT.values()], ids=[*CALLS, *MADE, *LEFT])
def test_no_checkpoint_runs_code(attack, within_a_config, marker, tmp_path):
    from recbole.quick_start import load_data_and_model

    attack = attack.replace(CODE, mapping(a=text(f"open({str(marker)!r}, 'w').close()")))
    if within_a_config and attack not in LEFT.values():
        attack = mapping(config=made(CONFIG, final_config_dict=mapping(seed=attack)))
    archive(b"\x80\x04" + attack + b".", tmp_path / "model.pth")
    for read in (checkpoints.load_checkpoint, load_data_and_model):
        with pytest.raises(pickle.UnpicklingError, match="the checkpoint"):
            read(str(tmp_path / "model.pth"))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("KD_DAGFM", {"teacher": "<code>"}, "names its teacher"),
        ("KD_DAGFM", {"teacher": "exec"}, "has teacher 'exec'"),
        ("KD_DAGFM", {"teacher": "KD_DAGFM.forward"}, "names its teacher"),
        ("KD_DAGFM", {"teacher": ["<code>"]}, "names its teacher"),
        ("../../model", {}, "names its model"),
        ("gru4rec.sys", {}, "names its model"),
        (["GRU4Rec"], {}, "names its model"),
        (None, {}, "names its model"),
    ],
)
def test_no_config_has_recbole_evaluate_text_of_its_own(model, more, message, marker, tmp_path):
    """A checkpoint that holds nothing but data: RecBole's KD_DAGFM evaluates one of its settings."""
    from recbole.config import Config
    from recbole.quick_start import load_data_and_model

    code = f"open({str(marker)!r}, 'w').close()"
    config = Config.__new__(Config)
    more = {key: code if value == "<code>" else [code] if value == ["<code>"] else value for key, value in more.items()}
    vars(config)["final_config_dict"] = {"model": model, "seed": 1, "reproducibility": True, **more}
    torch.save({"config": config}, tmp_path / "model.pth", pickle_protocol=4)
    assert vars(checkpoints.load_checkpoint(tmp_path / "model.pth")["config"]) == vars(config)
    with pytest.raises(UserError, match=message):
        load_data_and_model(str(tmp_path / "model.pth"))
    assert not marker.exists()


@pytest.mark.parametrize("held", [b"}", b"]", mapping(config=made(LINEAR)), mapping(config=made(CONFIG))])
def test_a_checkpoint_without_a_config_of_recboles_is_called_so(held, tmp_path):
    from recbole.quick_start import load_data_and_model

    archive(b"\x80\x04" + held + b".", tmp_path / "model.pth")
    with pytest.raises(UserError, match=r"model\.pth holds no config of RecBole's that names its model"):
        load_data_and_model(str(tmp_path / "model.pth"))


@pytest.mark.parametrize("begin", [b"", b"a"])
def test_a_file_that_pytorch_would_read_in_its_older_ways_is_refused(begin, tmp_path):
    archive(b"\x80\x04}.", tmp_path / "model.pth")
    content = begin + (tmp_path / "model.pth").read_bytes() if begin else pickle.dumps(1)
    (tmp_path / "model.pth").write_bytes(content)
    for file in (tmp_path / "model.pth", io.BytesIO(content)):
        with pytest.raises(UserError, match="is not a whole checkpoint"):
            checkpoints.load_checkpoint(file)
