"""How the library in C is built, kept and loaded."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from recbft.core import SequenceContext
from recbft.kernels import c_library, dispatch
from recbft.kernels.softmax_moments import softmax_moments

REASON = c_library.missing()
needs_build = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def compiler(folder, script):
    """A compiler of our own."""
    file = folder / "cc"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(c_library.SWITCH, raising=False)
    monkeypatch.setattr(c_library, "FLAGS", ["-O0", *c_library.FLAGS[1:]])
    return tmp_path / "cache" / "recbft"


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Two builds at the same time, which take seconds, by a user whose group may write what the user makes."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder))
        patched.delenv(c_library.SWITCH, raising=False)
        patched.setattr(c_library, "FLAGS", ["-O0", *c_library.FLAGS[1:]])
        before = os.umask(0o002)
        try:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda _: c_library._loaded(), range(2)))
        finally:
            os.umask(before)
    [built] = (folder / "recbft").iterdir()
    return built


@pytest.fixture
def kept(build, cache):
    """The build, as the cache of a test has it."""
    cache.mkdir(parents=True, mode=0o700)
    return Path(shutil.copy(build, cache))


@needs_build
def test_what_a_killed_build_left_goes_at_the_next_start(kept, cache):
    for name, at in (("build-ab12_d9x", 0), ("build-of mine", 0), ("build-another_", None)):
        (cache / name).mkdir()
        os.utime(cache / name, None if at is None else (at, at))
    c_library._loaded()
    assert sorted(os.listdir(cache)) == ["build-another_", "build-of mine", kept.name], "one was begun just now"


PRIVATE = """
import ctypes
public, ctypes.RTLD_GLOBAL = ctypes.RTLD_GLOBAL, ctypes.RTLD_LOCAL
import torch
ctypes.RTLD_GLOBAL = public
from recbft.kernels import c_library
assert not hasattr(ctypes.CDLL(None), "omp_get_thread_num")
print(c_library.missing())
"""


@needs_build
def test_pytorch_s_openmp_is_found_where_it_keeps_it_to_itself():
    # As its wheels for ARM do.
    done = subprocess.run([sys.executable, "-c", PRIVATE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"


@needs_build
@pytest.mark.slow
@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:5000], lambda content: content[::-1]])
def test_a_build_that_was_cut_is_not_loaded(kept, monkeypatch, damage):
    kept.write_bytes(damage(kept.read_bytes()))
    monkeypatch.setattr(c_library, "_build", lambda *_: "made again")
    assert c_library._loaded() == "made again"


@needs_build
@pytest.mark.slow
def test_a_build_that_was_cut_is_replaced_by_what_it_was(kept):
    whole = kept.read_bytes()
    kept.write_bytes(whole[:5000])
    assert c_library._loaded() is not None
    assert [file.read_bytes() for file in kept.parent.iterdir()] == [whole]


@needs_build
@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_replaced_by_a_folder_of_this_process(build, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv(c_library.SWITCH, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(c_library, "_build", lambda *words: ctypes.CDLL(shutil.copy(build, words[2])))
    assert c_library._loaded() is not None
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def unwritable(path, mode, access=os.access):
    """``os.access`` where nothing can be written."""
    return mode != os.W_OK and access(path, mode)


@needs_build
@pytest.mark.slow
def test_a_build_in_a_cache_that_can_only_be_read_is_loaded(kept, monkeypatch):
    monkeypatch.setattr(os, "access", unwritable)
    monkeypatch.setattr(c_library, "_build", lambda *_: pytest.fail("built again"))
    assert c_library._loaded() is not None


def place_of_a_build(compiler, sources, folder, stem):
    """In place of ``_build``: where it would keep what it builds."""
    return folder.resolve()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the cache is opened as Linux does it")
@pytest.mark.parametrize(("writable", "said"), [(True, "once; they stay in"), (False, "for this process alone")])
def test_what_cannot_be_read_in_the_cache_is_no_build(cache, monkeypatch, tmp_path, caplog, writable, said):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("CC", compiler(tmp_path, "echo mine"))
    monkeypatch.setattr(c_library, "_key", lambda *_: "key")
    if not writable:
        monkeypatch.setattr(os, "access", unwritable)
    monkeypatch.setattr(c_library, "_build", place_of_a_build)
    cache.mkdir(parents=True, mode=0o700)
    (cache / "kernels-key-0123.so").mkdir()  # open raises, as it does without permission
    with caplog.at_level(logging.INFO, logger="recbft"):
        folder = c_library._loaded()
    assert (folder == cache.resolve()) is writable
    assert [said in message for message in caplog.messages] == [True]


@needs_build
@pytest.mark.slow
def test_a_build_can_be_written_by_nobody_else_whatever_the_umask(build):
    assert stat.S_IMODE(build.stat().st_mode) == 0o755 and stat.S_IMODE(build.parent.stat().st_mode) == 0o700


def to_another(path):
    """Give a file or folder to another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(path, 12345, -1)


@needs_build
@pytest.mark.slow
@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("expose", [to_another, *(lambda path, m=m: path.chmod(m) for m in (0o770, 0o777))])
def test_a_cache_that_another_user_may_write_is_not_used(kept, cache, monkeypatch, tmp_path, caplog, expose, linked):
    if linked:
        cache.symlink_to(cache.rename(tmp_path / "elsewhere"))
    expose(cache)
    monkeypatch.setattr(c_library, "_build", place_of_a_build)
    with caplog.at_level(logging.INFO, logger="recbft"):
        folder = c_library._loaded()
    assert folder.name.startswith("recbft-kernels-") and list(cache.iterdir()) == [cache / kept.name]
    assert f"not kept in {cache}: another user owns or may write it; make it your own" in caplog.messages[0]
    assert "for this process alone" in caplog.messages[1]


def by_a_link(path):
    """A link to the file in its place."""
    path.symlink_to(path.rename(path.parent.parent / "elsewhere"))


@needs_build
@pytest.mark.slow
@pytest.mark.parametrize("expose", [to_another, by_a_link, *(lambda path, m=m: path.chmod(m) for m in (0o775, 0o757))])
def test_a_file_of_the_cache_that_another_user_may_write_is_built_again(kept, cache, monkeypatch, expose):
    expose(kept)
    monkeypatch.setattr(c_library, "_build", place_of_a_build)
    assert c_library._loaded() == cache.resolve()


@needs_build
@pytest.mark.slow
@pytest.mark.parametrize("user", [None, 12345])
def test_a_build_of_this_user_or_root_is_loaded_through_a_link_too(kept, cache, monkeypatch, tmp_path, user):
    cache.symlink_to(cache.rename(tmp_path / "elsewhere"))
    if user is not None:
        if os.geteuid() != 0:
            pytest.skip("only root has builds of root")
        monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(c_library, "_build", lambda *_: pytest.fail("built again"))
    assert c_library._loaded() is not None


@needs_build
@pytest.mark.slow
def test_a_folder_put_in_the_place_of_the_cache_once_that_is_checked_is_not_read(kept, cache, monkeypatch, tmp_path):
    def checked(descriptor, check=c_library._is_ours):
        if cache.joinpath(kept.name).exists():
            cache.rename(tmp_path / "before")
            cache.mkdir()
        return check(descriptor)

    monkeypatch.setattr(c_library, "_is_ours", checked)
    monkeypatch.setattr(c_library, "_build", lambda *_: pytest.fail("built again"))
    assert c_library._loaded() is not None
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (c_library.SWITCH, "0", "RECBFT_COMPILED is '0'"),
        ("CC", "no-such-compiler", r"no C compiler \(no-such-compiler\); install gcc, or name it in CC"),
        ("CC", '"', r"CC is '\"' \(No closing quotation\); give a command"),
    ],
)
def test_a_build_that_is_not_to_be_had_has_a_reason(name, value, reason, cache, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv(name, value)
    with pytest.raises(c_library.UnavailableError, match=reason):
        c_library._loaded()
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(c_library.UnavailableError, match="RECBFT_COMPILED" if name == c_library.SWITCH else "on Linux"):
        c_library._loaded()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 0", "what .* builds cannot be loaded .*; use gcc, whose OpenMP is PyTorch's"),
        ('case "$1" in --version) ;; *) echo no vectors here >&2; exit 1;; esac', "not build them: no vectors here"),
        (r"printf '\377\376'; exit 1", "could not build them"),
        (r"printf 'In file included from a.h:1,\n    from a.c:1:\nmath.h: none\n' >&2; exit 1", "them: math.h: none"),
    ],
)
def test_a_failed_build_says_why_and_leaves_nothing(cache, monkeypatch, tmp_path, script, reason):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("CC", compiler(tmp_path, script))
    with pytest.raises(c_library.UnavailableError, match=reason):
        c_library._loaded()
    assert list(cache.iterdir()) == []


def test_without_a_build_the_other_path_serves_and_the_reason_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(c_library, "_found", lambda: "no compiled kernels: none here")
    dispatch._log_once.cache_clear()
    context = SequenceContext(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None])
    q, k, v = torch.randn(3, 1, 1, 4, 3)
    with caplog.at_level(logging.INFO, logger="recbft"):
        for _ in range(2):
            found = softmax_moments(q, k, v, context)
    assert caplog.messages == ["c path declined: no compiled kernels: none here"]
    assert torch.equal(found.mean, softmax_moments(q, k, v, context, impl="torch").mean)
