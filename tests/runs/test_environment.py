"""What a run keeps of the machine that it was made on."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from recbft.runs import environment


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
@pytest.mark.parametrize("name", ["repository", "größe", os.fsdecode(b"caf\xe9")])
def test_the_commit_is_found_whatever_its_folder_is_called(name, tmp_path, monkeypatch):
    root = (tmp_path / name).resolve()
    try:
        root.mkdir()
    except OSError:
        pytest.skip("the file system takes no such name")
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for command in (["init"], ["commit", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *own, *command], cwd=root, check=True, capture_output=True)
    monkeypatch.setattr(environment, "ROOT", root)
    assert len(environment.commit()) == 12


def test_the_root_is_that_of_the_checkout():
    assert (environment.ROOT / "recbft" / "errors.py").is_file()
