"""Triton kernels run in interpreter mode here; the variable must be set before Triton is imported.

Tests marked ``gpu`` need a device and compiled kernels: ``TRITON_INTERPRET=0 pytest -m gpu``.
"""

import os

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if not torch.cuda.is_available():
        reason = "no CUDA device is available"
    elif os.environ["TRITON_INTERPRET"] == "1":
        reason = "needs compiled Triton kernels: set TRITON_INTERPRET=0"
    for item in items:
        if reason is not None and item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
