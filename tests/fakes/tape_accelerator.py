"""An accelerator whose captures are tapes of operators over fixed addresses: what a CUDA graph keeps, on the CPU.

A replay runs no Python of the captured work: operators run again with the tensors and numbers of the capture, and each
result goes to the address it had then. So a number that was read on the host, a rebound tensor or a shape made of data
replays wrong, as in a graph; operators that a graph cannot hold raise at capture. Work that bypasses torch (C kernels,
interpreted Triton) leaves no trace on a tape, so captured code must use torch operators here.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from depthbatch.worker.runner.accelerator import Work
from fakes.adverse_accelerator import AdverseAccelerator

NOT_IN_A_GRAPH = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.item.default", "aten.equal.default"}


class Entry(NamedTuple):
    """One operator as it ran."""

    operator: Any
    args: Any
    kwargs: Any
    results: list[Tensor]


class Tape(TorchDispatchMode):
    """Records operators; keeps what they read and wrote alive."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert str(func) not in NOT_IN_A_GRAPH, f"{func} waits for the device, which a capture forbids"
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.entries.append(Entry(func, args, kwargs, _tensors(out)))
        return out

    def replay(self) -> None:
        with torch.inference_mode():
            for entry in self.entries:
                results = _tensors(entry.operator(*entry.args, **entry.kwargs))
                for then, now in zip(entry.results, results, strict=True):
                    if now.data_ptr() != then.data_ptr():  # not a view of an argument
                        then.copy_(now)


def _tensors(out: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]


class TapeAccelerator(AdverseAccelerator):
    """Adverse lanes, and captures that hold what a graph holds."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.tapes: list[Tape] = []

    def capture(self, work: Work) -> Work:
        work()
        tape = Tape()
        with tape:
            work()
        self.tapes.append(tape)
        return tape.replay
