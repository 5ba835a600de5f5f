"""The library in C: each mechanism's ``kernel.c``, built by the compiler at hand, once, for this processor.

The first process that wants it builds the sources of ``recbft/kernels`` into the user's cache, in a few seconds; later
ones load what stands there. A build is known by its sources, its compiler and its processor, so that machines may share
a home, and by its own content, so that none is loaded that a crash has cut. What another user owns or may write is
never loaded, be it the cache or a file in it: the process then builds for itself. Without a compiler, or elsewhere than
on Linux, the other paths serve, and ``missing`` says why; ``RECBFT_COMPILED=0`` in the environment asks for that.

The threads are PyTorch's own: what OpenMP needs is left open in the build, and found in the library that PyTorch has
loaded (``_share_openmp``). All take single precision on a CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from logging import getLogger
from pathlib import Path

import torch
from torch import Tensor

from recbft.autograd.boundaries import HALVES, autocast_device
from recbft.system.files import hold, sweep

SWITCH = "RECBFT_COMPILED"
KERNELS = Path(__file__).parents[1]
FLAGS = [
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=fast",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
]
WIDE = "-mprefer-vector-width=512"  # for what the compiler turns into vectors by itself, on processors that have them
PATIENCE = 300.0  # seconds a build may take
_WAY = ("In file included from", " ")  # begin the lines that lead to what a compiler has to say
_ROOM = 2**24  # bytes on the cache's disk without which a build is not kept
_BUILD = re.compile(r"build-\w{8}")  # a folder in which a build is made
_OTHERS = stat.S_IWGRP | stat.S_IWOTH  # that others may write


class UnavailableError(Exception):
    """Why there is no build; the message is for people."""


def missing() -> str | None:
    """Why there are no kernels in C on this machine, or None."""
    found = _found()
    return found if isinstance(found, str) else None


def decline(tensor: Tensor) -> str | None:
    """Why they cannot serve a tensor, or None."""
    widened = tensor.dtype in HALVES and autocast_device() is not None  # by ``in_full_precision`` before it is called
    if tensor.dtype != torch.float32 and not widened:
        return f"serves float32, got {str(tensor.dtype).removeprefix('torch.')}"
    return missing()


def library() -> ctypes.CDLL:
    """The build, loaded."""
    found = _found()
    assert isinstance(found, ctypes.CDLL), found
    torch.get_num_threads()  # tells OpenMP how many PyTorch was given, on a thread on which PyTorch has not worked yet
    return found


def pointer(x: Tensor | None) -> int | None:
    """Where the elements of a tensor begin, for a field of a structure."""
    return None if x is None else x.data_ptr()


def pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    """The same as arguments of a call."""
    return [ctypes.c_void_p(pointer(x)) for x in tensors]


@lru_cache
def _found() -> ctypes.CDLL | str:
    try:
        return _loaded()
    except (UnavailableError, OSError, subprocess.SubprocessError) as error:
        return f"no compiled kernels: {error}"


def _loaded() -> ctypes.CDLL:
    """The build for this machine, made unless it stands in the cache."""
    if os.environ.get(SWITCH, "1").strip().lower() in ("0", "off", "no", "false"):
        raise UnavailableError(f"{SWITCH} is {os.environ[SWITCH]!r}")
    if not sys.platform.startswith("linux"):
        raise UnavailableError(f"they are built on Linux, and this is {platform.system()}")
    _share_openmp()
    compiler = _compiler()
    sources = sorted(KERNELS.rglob("*.[ch]"))
    stem = f"kernels-{_key(compiler, sources)}"
    log = getLogger("recbft")
    with _cache() as folder:
        if folder is not None:
            sweep(folder, _BUILD)  # of processes that were killed while they built
        for built in [] if folder is None else folder.glob(f"{stem}-*.so"):
            kept = _kept(built, stem)
            if kept is not None:
                return kept
        if folder is not None and os.access(folder, os.W_OK) and shutil.disk_usage(folder).free >= _ROOM:
            place = os.path.realpath(folder)
            log.info("building kernels for this processor with %s, once; they stay in %s", compiler[0], place)
            return _build(compiler, sources, folder, stem)
    log.info("building kernels with %s, for this process alone: no cache with room that can be written", compiler[0])
    with tempfile.TemporaryDirectory(prefix="recbft-kernels-") as own:  # what is loaded stays when its file goes
        return _build(compiler, sources, Path(own), stem)


def _share_openmp() -> None:
    """Let builds find the OpenMP that PyTorch works with: its wheels for ARM keep it to themselves."""
    with suppress(AttributeError, OSError):  # then loading a build says what is missing
        function = ctypes.CDLL(torch._C.__file__).omp_get_thread_num  # of what PyTorch is linked with
        place = (ctypes.c_char_p * 4)()  # a Dl_info, whose first part is the file
        if ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), place):
            ctypes.CDLL(os.fsdecode(place[0] or b""), mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)


def _compiler() -> list[str]:
    """The command that compiles: CC, or gcc, whose OpenMP is PyTorch's, or whatever cc is."""
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise UnavailableError(f"CC is {os.environ['CC']!r} ({error}); give a command") from error
    for command in [named] if named else [["gcc"], ["cc"]]:
        if shutil.which(command[0]) is not None:
            return command
    raise UnavailableError(f"no C compiler ({' '.join(named) or 'gcc'}); install gcc, or name it in CC")


def _build(compiler: list[str], sources: list[Path], folder: Path, stem: str) -> ctypes.CDLL:
    """Compile, link and load; the file appears whole, under its content's name, or not at all."""
    with (
        tempfile.TemporaryDirectory(prefix="recbft-build-") as made,  # since /proc/self is another for the compiler
        tempfile.TemporaryDirectory(dir=folder, prefix="build-") as kept,
        _opened(kept) as held,
    ):
        hold(held)
        compiled = [source for source in sources if source.suffix == ".c"]
        objects = [str(Path(made) / f"{source.parent.name}-{source.stem}.o") for source in compiled]
        found_in = f"-I{Path(__file__).parent}"
        pairs = zip(compiled, objects, strict=True)
        commands = [[*compiler, *FLAGS, *_wide(), found_in, "-c", str(source), "-o", out] for source, out in pairs]
        with ThreadPoolExecutor(os.cpu_count()) as at_once:
            list(at_once.map(_call, commands))
        # Without -fopenmp: linked to its own OpenMP, the build would bring a second set of threads.
        linked = Path(made) / f"{stem}.so"
        _call([*compiler, "-shared", "-o", str(linked), *objects, "-lm"])
        shared = Path(kept) / linked.name
        try:
            shutil.copyfile(linked, shared)
            library = ctypes.CDLL(str(shared))
        except OSError as error:
            raise UnavailableError(
                f"what {compiler[0]} builds cannot be loaded ({error}); use gcc, whose OpenMP is PyTorch's"
            ) from error
        with open(shared, "rb") as file:
            os.chmod(file.fileno(), 0o755)  # whatever the umask, others may not write what is to be loaded again
            os.fsync(file.fileno())
            name = _name(stem, file.read())
        shared.replace(folder / name)
    return library


@contextmanager
def _opened(folder: str) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _kept(built: Path, stem: str) -> ctypes.CDLL | None:
    """A build of the cache, loaded; None for a file that is none, or that others may have written.

    Nobody else may write the cache, so that the file which is checked is the one which is loaded, unless it is a link.
    """
    with suppress(OSError), open(built, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW)) as file:
        if _is_ours(file.fileno()) and built.name == _name(stem, file.read()):
            return ctypes.CDLL(str(built))
    return None


def _is_ours(descriptor: int) -> bool:
    """Whether an open file or folder belongs to this user or root, and nobody else may write it."""
    found = os.fstat(descriptor)
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & _OTHERS


def _name(stem: str, content: bytes) -> str:
    return f"{stem}-{hashlib.sha256(content).hexdigest()[:16]}.so"


def _call(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=PATIENCE)
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
        reason = next((line for line in said if not line.startswith(_WAY)), said[0])
        raise UnavailableError(f"{command[0]} could not build them: {reason}") from error
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{command[0]} took more than {PATIENCE:.0f} s") from error


def _key(compiler: list[str], sources: list[Path]) -> str:
    """What a build depends on."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=PATIENCE, check=False).stdout
    parts = [*compiler, version.decode(errors="replace"), *FLAGS, *_wide(), _processor(), torch.__version__]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _wide() -> list[str]:
    return [WIDE] if "avx512f" in _processor().split() else []


@lru_cache
def _processor() -> str:
    """What the compiler looks at for -march=native, as far as Linux says it."""
    kept = ("model name", "cpu family", "model", "flags", "Features", "CPU part")
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    said = {line.split(":")[0].strip(): line for line in lines if ":" in line}
    return "\n".join([platform.machine(), *(said[name] for name in kept if name in said)])


@contextmanager
def _cache() -> Iterator[Path | None]:
    """The user's folder of builds, which may be read-only; None where there is no such folder that is the user's alone.

    It is held open and named by that, so that who may write a folder above it cannot put another in its place.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(named if os.path.isabs(named) else os.path.expanduser("~/.cache")) / "recbft"
    held = None
    if folder.is_absolute():  # it is not for a user without a home
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    if held is None:
        yield None
        return
    try:
        if _is_ours(held):
            yield Path(f"/proc/self/fd/{held}")
        else:
            getLogger("recbft").warning(
                "kernels are not kept in %s: another user owns or may write it; "
                "make it your own (chown, chmod go-w), or set XDG_CACHE_HOME to a folder of your own",
                folder,
            )
            yield None
    finally:
        os.close(held)
