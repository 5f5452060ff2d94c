"""Builds the C kernels with the machine's compiler on first use and keeps the result in the user's cache.

The cache key covers sources, flags, processor and torch, so a found file is always right and needs no compiler. Two
processes may build at once: each builds in its own folder, the finished file is moved in place atomically. Knows
nothing of what the kernels compute.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent
BUILD_TIMEOUT_S = 120
COMMON_FLAGS = (
    "-std=gnu11",
    "-O2",
    "-ftree-vectorize",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-w",
)


class BuildError(Exception):
    """The kernels cannot be built here; the message says why in one line."""


def library_file(portable: bool) -> Path:
    """Path of the built library, building it if the cache lacks it.

    portable: no instruction set beyond the architecture's baseline. Raises BuildError.
    """
    target = cache_dir() / f"kernels-{_key(portable)}.so"
    if not target.exists():
        _build(target, portable)
    return target


def cache_dir() -> Path:
    """Where built libraries are kept: DEPTHBATCH_CACHE_DIR, else the user's cache folder."""
    if chosen := os.environ.get("DEPTHBATCH_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "depthbatch"


def _sources() -> list[Path]:
    return sorted(SOURCE_DIR.glob("*.c"))


def _key(portable: bool) -> str:
    digest = hashlib.sha256()
    for path in [*_sources(), *sorted(SOURCE_DIR.glob("*.h"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    processor = "portable" if portable else _processor()
    digest.update("\0".join((*COMMON_FLAGS, platform.machine(), processor, torch.__version__)).encode())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name", "cpu family", "model\t")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _build(target: Path, portable: bool) -> None:
    compiler = _compiler()
    logger.info("building the C kernels with %s, once for this machine", compiler)
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
            built = Path(folder) / target.name
            _compile(compiler, built, portable)
            os.replace(built, target)
    except OSError as error:
        raise BuildError(f"cannot write kernels to {target.parent}: {error}") from error


def _compiler() -> str:
    for name in (os.environ.get("CC"), "gcc", "cc"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("no C compiler found (CC, gcc, cc)")


def _compile(compiler: str, built: Path, portable: bool) -> None:
    """Tries the fastest flags first: a compiler may know neither -march=native nor OpenMP."""
    native: tuple[str, ...] = () if portable else ("-march=native",)
    sources = [str(path) for path in _sources()]
    message = ""
    for flags, libraries in ((("-fopenmp", *native), _openmp()), (native, ()), ((), ())):
        command = [compiler, *COMMON_FLAGS, *flags, *sources, "-o", str(built), *libraries, "-lm"]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise BuildError(f"{compiler} took more than {BUILD_TIMEOUT_S} s") from None
        if run.returncode == 0:
            return
        message = message or next((line for line in run.stderr.splitlines() if "error" in line), run.stderr[:200])
    raise BuildError(f"{compiler} failed: {message.strip()}")


def _openmp() -> tuple[str, ...]:
    """Torch's own OpenMP library, so that kernels and torch share one pool of threads."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return (str(bundled[0]),) if bundled else ()
