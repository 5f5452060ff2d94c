"""The Triton kernels of the small operators: right (interpreted, against torch) and buildable (compiled for GPUs)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from depthbatch.common.errors import ConfigError
from depthbatch.worker.layers import ops, ops_torch
from depthbatch.worker.layers.ops import small_ops
from fakes.fake_cuda import fake_cuda
from fakes.small_op_cases import cases

TESTS = Path(__file__).parent.parent


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_interpreted_equal_torch(dtype: torch.dtype) -> None:
    """Random rows: a wrong lane, stride or pairing of features is far outside the bound of one rounding."""
    for case in cases(dtype, torch.device("cpu")):
        case.check()


def test_where_triton_cannot_run_torch_does() -> None:
    """Tensors on the CPU and fake ones must never reach a kernel that would read their addresses."""
    assert small_ops(torch.zeros(1)) is ops_torch
    with fake_cuda():
        assert small_ops(torch.zeros(1, device="cuda")) is ops_torch


def test_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton unless told otherwise; a mistyped mode is an error, not a default."""
    for mode, wanted in (("auto", "depthbatch.worker.layers.ops_triton"), ("torch", ops_torch.__name__)):
        monkeypatch.setenv(ops.MODE_VARIABLE, mode)
        assert ops._on_gpu.__wrapped__().__name__ == wanted  # type: ignore[attr-defined]
    monkeypatch.setenv(ops.MODE_VARIABLE, "tritn")
    with pytest.raises(ConfigError, match="must be one of auto, torch, not 'tritn'"):
        ops._on_gpu.__wrapped__()


def test_every_kernel_compiles_for_gpus(tmp_path: Path) -> None:
    """All Triton kernels at the published models' shapes, to machine code of sm_80 and sm_90: an error of types or
    shapes that interpreting does not see would stop a GPU worker at its first stage. In a process of its own, since this
    one interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(TESTS / "fakes" / "compile_triton.py")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 10 * 4
