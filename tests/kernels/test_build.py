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
print("ready", flush=True)
input()
backend = select_backend(geometry)
print(type(backend).__name__, float(ops.rms_norm(torch.ones(1, 16), torch.ones(16), 0.0)[0, 0]))
"""


def run(tmp_path: Path, **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "DEPTHBATCH_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen([sys.executable, "-c", DECODE], env=env, text=True, stdin=-1, stdout=-1, stderr=-1)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate("go\n", timeout=120)
    return process.returncode, out.strip(), err.strip()


def script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return path


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    """Both start with an empty cache and both end with a library that works; one has built it, and one file and no folder
    is left. The compiler is one that takes its time and gives what another has built."""
    kernels_for("portable")
    compiler = script(
        tmp_path / "slow-cc",
        'for each; do [ "$last" = -o ] && out=$each; last=$each; done',
        f'case "$*" in *-shared*) echo "$out" >> {tmp_path}/linked; sleep 2; cp {build.library_file(True)} "$out" ;;',
        '*) : > "$out" ;; esac',
    )
    cache = tmp_path / "cache"
    processes = [run(cache, DEPTHBATCH_CPU_KERNELS="portable", CC=str(compiler)) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [finish(p)[:2] for p in processes] == [(0, "CpuAttention 1.0")] * 2
    assert len((tmp_path / "linked").read_text().splitlines()) == 1
    left = list(cache.iterdir())
    assert [path.suffix for path in left] == [".so"]
    stamp = left[0].stat().st_mtime_ns
    # The third needs no compiler: it finds the file.
    assert finish(run(cache, DEPTHBATCH_CPU_KERNELS="portable", PATH="", CC=""))[:2] == (0, "ready\nCpuAttention 1.0")
    assert left[0].stat().st_mtime_ns == stamp


def test_no_compiler_falls_back_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one warning line that says so; demanding C is an error that says why."""
    code, out, err = finish(run(tmp_path, PATH="", CC="", DEPTHBATCH_CPU_KERNELS="auto"))
    assert (code, out) == (0, "ready\nSdpaAttention 1.0")
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
    broken = script(tmp_path / "broken-cc", "echo 'x.c:1: error: out of luck' >&2", "exit 1")
    cache = tmp_path / "cache"
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("DEPTHBATCH_CACHE_DIR", str(cache))
    with pytest.raises(build.BuildError, match=r"^[^\n]*broken-cc failed: x\.c:1: error: out of luck$"):
        build.library_file(portable=True)
    assert list(cache.iterdir()) == []


def test_hung_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, after one time limit for all files together; no compiler is left running and nothing in the cache."""
    started = tmp_path / "started"
    hung, cache = script(tmp_path / "hung-cc", f"echo $$ >> {started}", "exec sleep 60"), tmp_path / "cache"
    monkeypatch.setenv("CC", str(hung))
    monkeypatch.setenv("DEPTHBATCH_CACHE_DIR", str(cache))
    monkeypatch.setattr(build, "BUILD_TIMEOUT_S", 1)
    with pytest.raises(build.BuildError, match=r"^[^\n]*hung-cc took more than 1 s$"):
        build.library_file(portable=True)
    assert list(cache.iterdir()) == []
    processes = [int(line) for line in started.read_text().splitlines()]
    assert processes and not any(Path(f"/proc/{process}").exists() for process in processes)


def test_unwritable_cache_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, so that the user can point DEPTHBATCH_CACHE_DIR elsewhere."""
    kernels_for("portable")
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("DEPTHBATCH_CACHE_DIR", str(file / "cache"))
    with pytest.raises(build.BuildError, match="cannot write kernels to"):
        build.library_file(portable=True)


def test_sources_decide_the_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed source, header or flag never meets an old library."""

    def name(*flags: str, sources: str = "*.c") -> str:
        return build._key("", [build.Flags(flags)], sources)

    names = {name(), name("-O3"), name(sources="int8.c")}
    for path in build.SOURCE_DIR.glob("*.[ch]"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path)
    assert name() in names
    with (tmp_path / "vec.h").open("a") as header:
        header.write("\n")
    names.add(name())
    monkeypatch.setattr(build, "COMMON_FLAGS", ("-O1",))
    names.add(name())
    assert len(names) == 5
