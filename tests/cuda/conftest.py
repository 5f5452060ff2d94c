"""Triton kernels run in interpreter mode here; the variable must be set before Triton is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
