"""One torch thread for every test: fp32 GEMMs are then bitwise independent of batch size (docs/cpu.md, Numerics)."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton, whose own functions are made then

import pytest
import torch

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell's background job, and all it starts, would not heed it

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Tests that can go on for longer than anybody waits for."""
    parser.addoption("--chaos-s", type=float, default=10.0, help="seconds of tests/processes/test_chaos.py")
    parser.addoption("--chaos-seed", type=int, default=0, help="what happens in it")
    parser.addoption("--chaos-preemption", choices=("recompute", "offload"), default="recompute")
    parser.addoption("--inputs", type=int, default=4000, help="inputs of tests/fuzz")
    parser.addoption("--fuzz-seed", type=int, default=0, help="which ones")
