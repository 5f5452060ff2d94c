"""Compiles the Triton kernels for GPUs that need not be there: ``TRITON_INTERPRET=0 python compile_triton.py``.

One line a kernel: name, element type, shape, architecture, bytes of shared memory. Interpreting shows that the numbers
are right, compiling that a kernel can be built at all.
"""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from depthbatch.worker.attention import triton_decode
from depthbatch.worker.layers import ops_triton

INTS = ("window", "table_stride", "num_planes", "row_stride", "q_stride", "k_stride", "v_stride")
INDICES = ("slots", "positions", "planes", "block_tables")
OURO, HUGINN, GROUPED = (16, 1, 128), (55, 1, 96), (4, 8, 64)  # KV heads, query heads a KV head, head_dim
# Ampere is 80, Hopper 90.
TARGETS = (("*bf16", OURO, 90), ("*bf16", HUGINN, 90), ("*bf16", GROUPED, 80), ("*fp32", OURO, 80))


def signature(kernel: Any, element: str, constants: dict[str, int]) -> dict[str, str]:
    """Triton type of each argument, by the names that the kernels share."""
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in INTS:
            types[name] = "i32"
        elif name in INDICES:
            types[name] = "*i32"
        elif name in ("scale", "eps"):
            types[name] = "fp32"
        elif name in ("k_scales", "v_scales"):
            types[name] = "*i16"
        elif name in ("k_cache", "v_cache") and constants.get("KIND"):
            types[name] = "*u8"
        else:
            types[name] = "*fp32" if name.startswith("part_") or name in ("cos", "sin") else element
    return types


def constants_of(kernel: Any, kind: int, heads: int, group: int, dim: int) -> dict[str, int]:
    values = {
        "BLOCK_SIZE": 16,
        "HEADS": heads,
        "NUM_HEADS": heads * group,
        "GROUP": group,
        "GROUP_PAD": triton.next_power_of_2(group),
        "DIM": dim,
        "DIM_PAD": triton.next_power_of_2(dim),
        "HALF": dim // 2,
        "WIDTH": triton.next_power_of_2(heads * dim),
        "BLOCK": 1024,
        "SPLITS": triton_decode.SPLITS,
        "KIND": kind,
        "HAS_Y": 1,
        "HAS_RESIDUAL": 1,
        "INTERLEAVED": group % 2,
    }
    if kernel is ops_triton._norm:
        values |= {"DIM": heads * dim}
    if kernel is ops_triton._rope:
        values |= {"WIDTH": triton.next_power_of_2(dim // 2)}
    return {name: values[name] for name in kernel.arg_names if name in values}


def main() -> None:
    partial, append = triton_decode._partial, triton_decode._append_quantized
    stored = [(partial, 0), *((kernel, kind) for kernel in (partial, append) for kind in (1, 2))]
    others = (triton_decode._append, triton_decode._combine, ops_triton._norm, ops_triton._silu_mul, ops_triton._rope)
    for kernel, kind in (*stored, *((other, 0) for other in others)):
        for element, shape, architecture in TARGETS:
            constants = constants_of(kernel, kind, *shape)
            keyed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
            source = ASTSource(kernel, signature(kernel, element, constants), keyed)
            compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
            assert compiled.asm["cubin"]
            print(compiled.metadata.name, kind, element, shape, architecture, compiled.metadata.shared)


if __name__ == "__main__":
    main()
