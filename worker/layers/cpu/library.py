"""The C kernels as Python functions (ctypes, which releases the GIL), and the choice whether to use them.

``DEPTHBATCH_CPU_KERNELS``: ``auto`` (C where it can be built, else torch), ``c``, ``portable`` (C without instruction
sets beyond the baseline), ``torch``. Knows signatures and element types, nothing of shapes.
"""

import ctypes
import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from depthbatch.common.errors import ConfigError
from depthbatch.worker.layers.cpu.compile import BuildError, library_file
from depthbatch.worker.layers.cpu.memory import zeros_on_large_pages
from depthbatch.worker.layers.cpu.structs import F32, I32, I64, PTR
from depthbatch.worker.layers.int8 import Int8Weight

logger = logging.getLogger(__name__)

MODE_VARIABLE = "DEPTHBATCH_CPU_KERNELS"
MODES = ("auto", "c", "portable", "torch")
PAIR_COLUMNS = 32  # of a packed weight, gemm.h

Function = Callable[..., None]


class TypedKernels:
    """The kernels for one element type."""

    def __init__(self, library: ctypes.CDLL, suffix: str, have_gemm: bool) -> None:
        def function(name: str, *argtypes: Any) -> Function:
            bound = getattr(library, f"{name}_{suffix}")
            bound.argtypes, bound.restype = argtypes, None
            return bound  # type: ignore[no-any-return]

        self.norm = function("db_norm", PTR, PTR, PTR, PTR, PTR, I64, I64, F32)
        self.norm_add_norm = function("db_norm_add_norm", PTR, PTR, PTR, PTR, PTR, PTR, I64, I64, F32)
        self.silu_mul = function("db_silu_mul", PTR, PTR, I64, I64)
        self.rope = function("db_rope", PTR, PTR, PTR, PTR, I64, I64, I64, I64, I64)
        self.attend = function("db_attend", PTR, PTR, PTR)
        self.linear = function("db_linear", PTR, PTR, PTR, I64, I64, I64, I32) if have_gemm else None
        self.int8_linear = function("db_int8_linear", PTR, PTR, PTR, I64, PTR)
        self.stack = function("db_stack", PTR, PTR, PTR)
        self.core = function("db_core", PTR, PTR)
        self.coda = function("db_coda", PTR, PTR)
        self.temper = function("db_temper", PTR, PTR, PTR, I64, I64) if suffix == "f32" else None


class Kernels:
    """A loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        have_gemm = bool(library.db_have_gemm())
        self.by_type = {
            torch.float32: TypedKernels(library, "f32", have_gemm),
            torch.bfloat16: TypedKernels(library, "bf16", have_gemm),
        }
        library.db_copy_planes.argtypes, library.db_copy_planes.restype = (PTR, I32, PTR, PTR, PTR, PTR), None
        self.copy_planes: Function = library.db_copy_planes
        library.db_prelude.argtypes, library.db_prelude.restype = (PTR, PTR, I64), None
        self.prelude: Function = library.db_prelude
        library.db_pack.argtypes, library.db_pack.restype = (PTR, PTR, I64, I64, I64, I32), None
        self._pack: Function = library.db_pack
        library.db_packed_size.argtypes, library.db_packed_size.restype = (I64, I64, I32), I64
        self._packed_size: Callable[..., int] = library.db_packed_size
        library.db_int8_pack.argtypes, library.db_int8_pack.restype = (PTR, PTR, PTR, PTR, I64, I64, I32, I64), None
        self._int8_pack: Function = library.db_int8_pack
        library.db_int8_packed_size.argtypes, library.db_int8_packed_size.restype = (I64, I64, I32), I64
        self._int8_packed_size: Callable[..., int] = library.db_int8_packed_size
        library.db_int8_row_bytes.argtypes, library.db_int8_row_bytes.restype = (I64,), I64
        self.int8_row_bytes: Callable[[int], int] = library.db_int8_row_bytes

        library.db_read.argtypes, library.db_read.restype = (PTR, I64), I64
        self.read: Callable[..., int] = library.db_read
        library.db_multiply.argtypes, library.db_multiply.restype = (I64, I32, PTR), I64
        self.multiply: Callable[..., int] = library.db_multiply

    def can_multiply(self, weight: torch.Tensor) -> bool:
        """Whether the matrix products take a weight [out, in]."""
        kernels = self.by_type.get(weight.dtype)
        return kernels is not None and kernels.linear is not None and weight.shape[1] % 2 == 0

    def pack(self, weight: torch.Tensor, gated: bool) -> torch.Tensor:
        """Weight [out, in] in the order the matrix products read it; gated: see gemm.h."""
        out, width = weight.shape
        weight = weight.contiguous()
        packed = zeros_on_large_pages((self._packed_size(out, width, gated),), weight.dtype)
        self._pack(packed.data_ptr(), weight.data_ptr(), out, width, weight.element_size(), gated)
        return packed

    def pack_int8(self, weight: Int8Weight, gated: bool) -> Int8Weight:
        """The same in the order the int8 products read it (int8.h): bytes uint8, and the scales of packed columns."""
        out, width = weight.shape
        values, scales = weight.values.contiguous(), weight.scales.contiguous()
        size, padded = (
            self._int8_packed_size(out, width, gated),
            self._int8_packed_size(1, width, False) // PAIR_COLUMNS,
        )
        packed = zeros_on_large_pages((size,), torch.uint8)
        packed_scales = torch.zeros(size // padded, scales.shape[1])
        group = weight.group if scales.shape[1] > 1 else padded
        self._int8_pack(
            packed.data_ptr(), packed_scales.data_ptr(), values.data_ptr(), scales.data_ptr(), out, width, gated, group
        )
        return Int8Weight(packed, packed_scales, group)


def cpu_kernels() -> Kernels | None:
    """The kernels this process uses; None: torch operators.

    Raises ConfigError for an unknown mode, and when C is demanded but cannot be built.
    """
    mode = os.environ.get(MODE_VARIABLE, "auto")
    if mode not in MODES:
        raise ConfigError(f"{MODE_VARIABLE} must be one of {', '.join(MODES)}, not {mode!r}")
    return None if mode == "torch" else load_kernels(mode)


@cache
def load_kernels(mode: str) -> Kernels | None:
    """The library of a mode other than ``torch``, built if need be; None only in ``auto``."""
    try:
        path = library_file(portable=mode == "portable")
        return Kernels(ctypes.CDLL(str(path)))
    except (BuildError, OSError) as error:
        if mode != "auto":
            raise ConfigError(f"{MODE_VARIABLE}={mode}: {error}") from error
        logger.warning("C kernels not available, using slower torch operators: %s", error)
        return None
