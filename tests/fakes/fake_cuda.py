"""Fake ``cuda`` tensors that can be indexed and copied where torch is built without CUDA.

torch's own ``tensor[...]``, ``copy_`` and ``contiguous`` ask for a guard of the tensor's device before they reach the fake mode, and a
build without CUDA has none. The same through aten operators has no such step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


class _Unguarded(TorchFunctionMode):
    """Takes over subscripts, copies and uploads."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            view, indices = _basic(args[0], args[1])
            return aten.index.Tensor(view, indices) if indices else view
        if func is torch.Tensor.__setitem__:
            view, indices = _basic(args[0], args[1])
            value = args[2]
            return aten.index_put_.default(view, indices, value) if indices else aten.copy_.default(view, value)
        if func is torch.Tensor.copy_:
            return aten.copy_.default(*args, **(kwargs or {}))
        if func is torch.Tensor.contiguous:
            [x] = args
            return x if x.is_contiguous() else aten.clone.default(x, memory_format=torch.contiguous_format)
        if func is torch.tensor and not isinstance(args[0], int) and kwargs and "device" in kwargs:
            host = func(*args, **{**kwargs, "device": "cpu"})
            return torch.empty(host.shape, dtype=host.dtype, device=kwargs["device"])
        return func(*args, **(kwargs or {}))


def _basic(x: torch.Tensor, key: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The view that slices, integers and None make of x, and the tensors to index it with."""
    parts = key if isinstance(key, tuple) else (key,)
    if Ellipsis in [part for part in parts if not isinstance(part, torch.Tensor)]:
        place = next(i for i, part in enumerate(parts) if part is Ellipsis)
        skipped = x.dim() - sum(part is not None and part is not Ellipsis for part in parts)
        parts = (*parts[:place], *[slice(None)] * skipped, *parts[place + 1 :])
    indices: list[torch.Tensor | None] = []
    for part in parts:
        if isinstance(part, int):
            x = aten.select.int(x, len(indices), part)
            continue
        if part is None:
            x = aten.unsqueeze.default(x, len(indices))
        elif isinstance(part, slice):
            x = aten.slice.Tensor(x, len(indices), part.start, part.stop, part.step or 1)
        indices.append(part if isinstance(part, torch.Tensor) else None)
    while indices and indices[-1] is None:
        indices.pop()
    return x, indices


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Everything made inside is fake; ``cuda`` is a device."""
    with FakeTensorMode(), _Unguarded():
        yield
