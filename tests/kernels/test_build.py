"""Building, caching and choosing the C kernels; in processes of their own where a loaded library would stay loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from depthbatch.common.errors import ConfigError
from depthbatch.worker.attention.backend import CacheGeometry
from depthbatch.worker.attention.sdpa import SdpaAttention
from depthbatch.worker.attention.select import select_backend
from depthbatch.worker.layers.cpu import compile as build
from depthbatch.worker.layers.cpu import library
from fakes.attention_cases import kernels_for

DECODE = """
import logging, torch
logging.basicConfig(format="%(message)s")
from depthbatch.worker.attention.backend import CacheGeometry
from depthbatch.worker.attention.select import select_backend
from depthbatch.worker.layers import ops
geometry = CacheGeometry(3, 16, 2, 2, 16, (1,), torch.float32, torch.device("cpu"))
backend = select_backend(geometry)
print(type(backend).__name__, float(ops.rms_norm(torch.ones(1, 16), torch.ones(16), 0.0)[0, 0]))
"""


def run(tmp_path: Path, **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "DEPTHBATCH_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen([sys.executable, "-c", DECODE], env=env, text=True, stdout=-1, stderr=-1)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out.strip(), err.strip()


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    """Both start with an empty cache and both end with a library that works; one file and no folder is left."""
    kernels_for("portable")
    processes = [run(tmp_path, DEPTHBATCH_CPU_KERNELS="portable") for _ in range(2)]
    assert [finish(p)[:2] for p in processes] == [(0, "CpuAttention 1.0")] * 2
    left = list(tmp_path.iterdir())
    assert [path.suffix for path in left] == [".so"]
    stamp = left[0].stat().st_mtime_ns
    # The third needs no compiler: it finds the file.
    assert finish(run(tmp_path, DEPTHBATCH_CPU_KERNELS="portable", PATH="", CC=""))[:2] == (0, "CpuAttention 1.0")
    assert left[0].stat().st_mtime_ns == stamp


def test_no_compiler_falls_back_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one warning line that says so; demanding C is an error that says why."""
    code, out, err = finish(run(tmp_path, PATH="", CC="", DEPTHBATCH_CPU_KERNELS="auto"))
    assert (code, out) == (0, "SdpaAttention 1.0")
    assert err == "C kernels not available, using slower torch operators: no C compiler found (CC, gcc, cc)"
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("DEPTHBATCH_CACHE_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^DEPTHBATCH_CPU_KERNELS=c: no C compiler found"):
        library.load_kernels.__wrapped__("c")


def test_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is obeyed; a misspelt mode is refused by name."""
    geometry = CacheGeometry(3, 16, 2, 2, 16, (1,), torch.float32, torch.device("cpu"))
    monkeypatch.setenv(library.MODE_VARIABLE, "torch")
    assert library.cpu_kernels() is None
    assert isinstance(select_backend(geometry), SdpaAttention)
    with pytest.raises(ConfigError, match="switched off"):
        select_backend(geometry, "cpu")
    monkeypatch.setenv(library.MODE_VARIABLE, "fast")
    with pytest.raises(ConfigError, match="must be one of auto, c, portable, torch, not 'fast'"):
        library.cpu_kernels()


def test_broken_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that fails leaves nothing in the cache and one line for the user."""
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'x.c:1: error: out of luck' >&2\nexit 1\n")
    broken.chmod(0o755)
    cache = tmp_path / "cache"
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("DEPTHBATCH_CACHE_DIR", str(cache))
    with pytest.raises(build.BuildError, match="out of luck"):
        build.library_file(portable=True)
    assert list(cache.iterdir()) == []


def test_unwritable_cache_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, so that the user can point DEPTHBATCH_CACHE_DIR elsewhere."""
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("DEPTHBATCH_CACHE_DIR", str(file / "cache"))
    kernels_for("c")
    with pytest.raises(build.BuildError, match="cannot write kernels to"):
        build.library_file(portable=True)


def test_sources_decide_the_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed source, header or flag never meets an old library."""
    names = {build._key(portable=False), build._key(portable=True)}
    for path in build.SOURCE_DIR.glob("*.[ch]"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path)
    assert build._key(portable=True) in names
    with (tmp_path / "vec.h").open("a") as header:
        header.write("\n")
    names.add(build._key(portable=True))
    monkeypatch.setattr(build, "COMMON_FLAGS", ("-O1",))
    names.add(build._key(portable=True))
    assert len(names) == 4
