"""The C kernels as other processors have them, built once for all tests and kept where the engine keeps its own."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from depthbatch.worker.layers.cpu import compile as building
from depthbatch.worker.layers.cpu.library import Kernels
from fakes.attention_cases import kernels_for

AVX2 = "-march=x86-64-v3"
WITHOUT_BF16 = "this processor without bf16 products"
VARIANTS = {
    "AVX2": (AVX2,),
    # In halves, where registers are of 8 lanes; optimised less, or it would take the compiler twice as long.
    "AVX-512 without bf16 products": (AVX2, "-DGEMM_LANES=16", "-O1", "-fexpensive-optimizations"),
    WITHOUT_BF16: ("-march=native", "-mno-avx512bf16"),
    "AVX-VNNI": (AVX2,),  # but for its int8 products
}
EMULATIONS = Path(__file__).parents[1] / "kernels"
AVX_VNNI = EMULATIONS / "avx_vnni_emulation.h"
TILES = EMULATIONS / "tile_emulation.h"


class _OneOverOther:
    """The functions of a library, and those of another that it lacks."""

    def __init__(self, *libraries: ctypes.CDLL) -> None:
        self._libraries = libraries

    def __getattr__(self, name: str) -> Any:
        return next(getattr(library, name) for library in self._libraries if hasattr(library, name))


@cache
def built(name: str) -> Kernels:
    """The kernels as one variant; skips the test where they cannot be built or run."""
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if " avx2 " not in about or " fma " not in about:
        pytest.skip("needs a processor with AVX2")
    if name == WITHOUT_BF16 and " avx512_bf16" not in about:
        return kernels_for("c")  # which is the same then
    library = ctypes.CDLL(str(_file("*.c", VARIANTS[name])))
    if name != "AVX-VNNI":
        return Kernels(library)
    return Kernels(_OneOverOther(ctypes.CDLL(str(int8_file(AVX2, emulation=AVX_VNNI))), library))  # type: ignore[arg-type]


def int8_file(*flags: str, emulation: Path | None = None) -> Path:
    """A library of the int8 products alone; emulation: a header with instructions that this processor lacks."""
    return _file("int8.c", (*flags, *(("-include", str(emulation)) if emulation else ())), emulation)


def _file(sources: str, flags: tuple[str, ...], header: Path | None = None) -> Path:
    processor = (building.processor(), header.read_text() if header else "")
    try:
        return building.built_once("\0".join(processor), [building.Flags(("-fopenmp", *flags))], sources)
    except building.BuildError as error:
        if any(words in str(error) for words in ("no C compiler", "unrecognized", "bad value")):
            pytest.skip(str(error))
        raise
