"""One torch thread for every test: fp32 GEMMs are then bitwise independent of batch size (docs/cpu.md, Numerics)."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton, whose own functions are made then

import torch

torch.set_num_threads(1)
