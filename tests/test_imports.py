"""Imports point one way: a room of the house imports from those that the table lists for it, which stand above it."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import recbft

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path for folder in ("recbft", "cli") for path in (ROOT / folder).rglob("*.py"))

# The rooms are the folders and files of recbft/, and cli, from the ground up. An import that is new belongs here if it
# leads to a row above.
MAY_IMPORT = {
    "errors": "",
    "autograd": "",
    "system": "errors",
    "config": "errors system",
    "core": "errors autograd",
    "kernels": "errors autograd system core",
    "datasets": "errors system config",
    "mixers": "errors autograd config core kernels",
    "models": "errors autograd config core kernels datasets mixers",
    "evaluation": "errors system config core kernels datasets models",
    "runs": "errors autograd system config kernels evaluation",
    "training": "errors system config kernels datasets mixers models evaluation runs",
    "serving": "errors system config datasets models evaluation",
    "experiments": "errors system config datasets mixers models evaluation runs training",
    "comparing": "errors system config datasets evaluation runs training experiments",
    "reporting": "errors system config datasets evaluation runs training experiments comparing",
    "recbole": "errors config datasets models evaluation runs training",
    "pretrained": "errors autograd config core kernels mixers models",
    "api": "errors system config kernels datasets evaluation runs training serving experiments comparing reporting",
    "recbft": "system",  # and, by name on first use, what it exports
    "cli": "errors system config datasets mixers models evaluation runs training serving"
    " experiments comparing reporting api",
}
# Packages of others that a plain `import recbft` must not need, and the rooms whose files may import them.
OTHERS = {
    "typer": "cli",
    "rich": "reporting",
    "matplotlib": "reporting",
    "optuna": "experiments",
    "mlflow": "training",
    "wandb": "training",
    "recbole": "recbole",
    "transformers": "pretrained",
    "triton": "kernels",
    "starlette": "api",
    "anyio": "api",
    "prometheus_client": "api",
    "uvicorn": "cli",
    "onnxruntime": "serving",
    "faiss": "serving",
}
LIGHT = (
    "core",
    "mixers",
    "models",
    "datasets",
    "training",
    "evaluation",
    "kernels",
    "serving",
    "experiments",
    "comparing",
    "reporting",
)


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what a file imports, in functions too; what only a type checker reads is left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                yield from imported(ast.Module([other], []))
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            yield ast.unparse(node.args[0]).strip("f'\"")
        yield from imported(node)


def room(dotted: str) -> str:
    """The room of a module of ours, the package of one of others.

    >>> room("recbft.core.belief"), room("recbft.Dataset"), room("recbft_cli.main"), room("numpy.random")
    ('core', 'recbft', 'cli', 'numpy')
    """
    first, _, rest = dotted.partition(".")
    if first in ("recbft_cli", "cli"):
        return "cli"
    inner = rest.partition(".")[0]
    return inner if first == "recbft" and inner in MAY_IMPORT else first


def room_of(path: Path) -> str:
    return room(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.fixture(scope="module")
def today() -> dict[tuple[str, str], str]:
    """(importing room, what it imports) of every file, with one file as the example."""
    found = {}
    for path in FILES:
        for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
            assert not name.startswith("."), f"{path} imports {name}; name it from recbft on"
            found[room_of(path), room(name)] = f"{path.relative_to(ROOT)} imports {name}"
    return found


def test_every_file_is_in_a_room_of_the_table():
    rooms = {path: room_of(path) for path in FILES}
    assert set(rooms.values()) == set(MAY_IMPORT)
    assert [path for path, found in rooms.items() if found == "recbft"] == [ROOT / "recbft" / "__init__.py"]


def test_rooms_import_what_the_table_lists_and_nothing_else(today):
    listed = {(source, target) for source, targets in MAY_IMPORT.items() for target in targets.split()}
    found = {edge: example for edge, example in today.items() if edge[1] in MAY_IMPORT and edge[0] != edge[1]}
    assert [example for edge, example in found.items() if edge not in listed] == []
    assert listed - set(found) == set(), "the table lists imports that are gone; take them out"


def test_the_table_points_one_way():
    order = list(MAY_IMPORT)
    for source, targets in MAY_IMPORT.items():
        assert [target for target in targets.split() if order.index(target) >= order.index(source)] == [], source


def test_packages_that_may_be_missing_are_imported_in_one_room_each(today):
    wrong = [example for (source, target), example in today.items() if OTHERS.get(target, source) != source]
    assert wrong == []


def test_the_library_is_imported_without_the_packages_that_may_be_missing():
    files = [path for room in LIGHT for path in (ROOT / "recbft" / room).rglob("*.py")]
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in files
        if not path.name.startswith("triton") and path.name != "graph_break.py"  # which PyTorch's compiler imports
    ]
    code = (
        "import recbft.kernels.c_library.heads\n"  # what kernels share can be imported first of all
        "import sys; from importlib import import_module\n"
        f"for name in {sorted(modules)}: import_module(name)\n"
        f"print(sorted({set(OTHERS)} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_every_file_of_a_package_is_installed_with_it(monkeypatch):
    setuptools, made = pytest.importorskip("setuptools"), {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", made.update)
    runpy.run_path("setup.py")
    renamed = made["package_dir"]
    folders = {package: ROOT / renamed.get(package, package.replace(".", "/")) for package in made["packages"]}
    installed = {file for folder in folders.values() for file in folder.glob("*.py")}
    for package, patterns in made["package_data"].items():
        installed |= {file for pattern in patterns for file in folders[package].glob(pattern)}
    tops = {folder for package, folder in folders.items() if "." not in package}
    kinds = (".py", ".c", ".h", ".css", ".yaml", ".typed")
    assert installed == {file for top in tops for file in top.rglob("*") if file.suffix in kinds}


@pytest.mark.parametrize(
    ("arrow", "numpy", "fit"),
    [("26.0.1", "1.26.4", False), ("25.0.1", "1.26.4", True), ("26.0.1", "2.4.6", True), ("27.0.0", None, True)],
)
def test_a_pyarrow_that_does_not_go_with_its_numpy_is_named_with_one_that_does(monkeypatch, arrow, numpy, fit):
    def version(name):
        found = {"pyarrow": arrow, "numpy": numpy}[name]
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    if fit:
        recbft._check_pair()
        return
    with pytest.raises(ImportError, match=r"pyarrow 26\.0\.1 needs numpy 2 or later, and numpy is 1\.26\.4; pip inst"):
        recbft._check_pair()
