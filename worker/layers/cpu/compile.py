"""Builds the C kernels with the machine's compiler on first use and keeps the result in the user's cache.

The cache key covers sources, flags, processor and torch, so a found file is always right and needs no compiler. Files are
compiled at once, as many as there are cores. Of processes that want to build at once one does, and the others wait for it;
each builds in a folder of its own, and the finished file is moved in place atomically. Knows nothing of what the kernels
compute.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent
BUILD_TIMEOUT_S = 120
COMMON_FLAGS = (
    "-std=gnu11",
    "-O2",
    "-ftree-vectorize",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    # Loops lie as close as they can, in functions that begin a cache line: elsewhere what surrounds a file's functions decides
    # where their loops fall, and attention is 3 to 9 % slower in some places than in others (Zen 4).
    "-falign-functions=64",
    "-falign-loops=1",
    "-falign-jumps=1",
    "-falign-labels=1",
    "-w",
)


class BuildError(Exception):
    """The kernels cannot be built here; the message says why in one line."""


class Flags(NamedTuple):
    """What a compiler is given beside COMMON_FLAGS."""

    compile: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()  # to link with


def library_file(portable: bool) -> Path:
    """Path of the built library, building it if the cache lacks it.

    portable: no instruction set beyond the architecture's baseline. Raises BuildError.
    """
    native = () if portable else ("-march=native",)
    # The fastest first: a compiler may know neither -march=native nor OpenMP.
    choices = Flags(("-fopenmp", *native), _openmp()), Flags(native), Flags()
    return built_once("portable" if portable else processor(), choices)


def built_once(about: str, choices: Sequence[Flags], sources: str = "*.c") -> Path:
    """Path of a library with the first of ``choices`` that the compiler takes, from the cache or built now.

    about: whatever else the result depends on. sources: a pattern of file names. Raises BuildError.
    """
    target = cache_dir() / f"kernels-{_key(about, choices, sources)}.so"
    if not target.exists():
        _build(target, choices, sorted(SOURCE_DIR.glob(sources)))
    return target


def cache_dir() -> Path:
    """Where built libraries are kept: DEPTHBATCH_CACHE_DIR, else the user's cache folder."""
    if chosen := os.environ.get("DEPTHBATCH_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "depthbatch"


def _key(about: str, choices: Sequence[Flags], sources: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCE_DIR.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    flags = (*COMMON_FLAGS, *(flag for choice in choices for flag in choice.compile))
    digest.update("\0".join((*flags, sources, platform.machine(), about, torch.__version__)).encode())
    return digest.hexdigest()[:24]


def processor() -> str:
    """What -march=native depends on, in words."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name", "cpu family", "model\t")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _build(target: Path, choices: Sequence[Flags], sources: Sequence[Path]) -> None:
    compiler = _compiler()
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(target), tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
            if target.exists():  # who was first has built it
                return
            logger.info("building the C kernels with %s, once for this machine", compiler)
            built = Path(folder) / target.name
            _compile(compiler, built, choices, sources)
            os.replace(built, target)
    except OSError as error:
        raise BuildError(f"cannot write kernels to {target.parent}: {error}") from error


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Waits until no other process builds in the folder, ``target`` is there or a build takes too long. The lock goes with
    the process that has it; a file system without locks has none."""
    folder, give_up_s = os.open(target.parent, os.O_RDONLY), time.monotonic() + BUILD_TIMEOUT_S
    try:
        while not _locked(folder) and not target.exists() and time.monotonic() < give_up_s:
            time.sleep(0.05)
        yield
    finally:
        os.close(folder)


def _locked(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _compiler() -> str:
    for name in (os.environ.get("CC"), "gcc", "cc"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("no C compiler found (CC, gcc, cc)")


def _compile(compiler: str, built: Path, choices: Sequence[Flags], sources: Sequence[Path]) -> None:
    message = ""
    for choice in choices:
        give_up_s = time.monotonic() + BUILD_TIMEOUT_S
        options = [compiler, *COMMON_FLAGS, *choice.compile]
        objects = [str(built.with_name(f"{source.stem}.o")) for source in sources]
        files = zip(sources, objects, strict=True)
        commands = [[*options, "-c", str(source), "-o", target] for source, target in files]
        link = [*options, "-shared", *objects, "-o", str(built), *choice.libraries, "-lm"]
        error = _run_together(commands, give_up_s) or _run(link, give_up_s)
        if not error:
            return
        message = message or error
    raise BuildError(f"{compiler} failed: {message}")


def _run_together(commands: Sequence[list[str]], give_up_s: float) -> str:
    """Runs commands, as many at a time as there are cores: what the first that fails says, else nothing."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        runs = [pool.submit(_run, command, give_up_s) for command in commands]
        try:
            return next((error for run in as_completed(runs) if (error := run.result())), "")
        finally:
            for run in runs:
                run.cancel()


def _run(command: list[str], give_up_s: float) -> str:
    """What a command says that fails, in one line, else nothing. Raises BuildError when it does not end by ``give_up_s``."""
    left_s = max(give_up_s - time.monotonic(), 0)
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} took more than {BUILD_TIMEOUT_S} s") from None
    if run.returncode == 0:
        return ""
    lines = [line.strip() for line in run.stderr.splitlines() if line.strip()] or [f"exit status {run.returncode}"]
    return next((line for line in lines if "error" in line), lines[0])


def _openmp() -> tuple[str, ...]:
    """Torch's own OpenMP library, so that kernels and torch share one pool of threads."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return (str(bundled[0]),) if bundled else ()
