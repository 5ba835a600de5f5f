"""The folders that are installed, the import names of the three that are not called recbft, and the commit."""

import subprocess
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

RENAMED = {"recbft_cli": "cli", "recbft_cards": "data", "recbft_configs": "configs"}
ROOT = Path(__file__).resolve().parent


def git(*words):
    """What git says of this folder."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def write_commit(tree):
    """Leave the commit for ``recbft.runs.environment``; a source distribution has it from its own build."""
    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() == ROOT:
            changed = " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
            commit = git("rev-parse", "--short=12", "HEAD") + changed
            Path(tree, "recbft", "runs", "commit.txt").write_text(commit)
    except (OSError, subprocess.CalledProcessError):
        pass


class BuildPy(build_py):
    """With the commit in it, unless the folder itself is what is imported."""

    def run(self):
        super().run()
        if not getattr(self, "editable_mode", False):
            write_commit(self.build_lib)


class SDist(sdist):
    """With the commit in it."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)


setup(
    cmdclass={"build_py": BuildPy, "sdist": SDist},
    packages=[*find_packages(include=["recbft", "recbft.*"]), *RENAMED],
    package_dir=RENAMED,
    include_package_data=False,  # exactly what is named here, whatever MANIFEST.in adds to a source distribution
    package_data={
        "recbft": [
            "py.typed",
            "kernels/*/*.[ch]",
            "recbole/defaults/*.yaml",
            "reporting/page.css",
            "api/*.yaml",
            "runs/commit.txt",
        ],
        "recbft_cards": ["*.yaml"],
        "recbft_configs": ["**/*.yaml"],
    },
)
