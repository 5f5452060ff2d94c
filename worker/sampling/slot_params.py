"""The parameters of some rows, as tensors: the fields of SLOT_PARAMS, by name."""

import torch
from torch import Tensor

from depthbatch.common.frames import SLOT_PARAMS

_INTEGERS, _FLOATS = (
    {name: field[1] // 4 for name, field in (SLOT_PARAMS.fields or {}).items() if field[0].kind == kind}
    for kind in ("i", "f")
)


class SlotParams:
    """The parameters of N rows. An attribute a field of SLOT_PARAMS, [N]: int32, or fp32 from the bits that were sent."""

    def __init__(self, rows: Tensor) -> None:
        """``rows``: int32 [N, SLOT_PARAM_WORDS], viewed, not copied."""
        self._rows = rows

    def __getattr__(self, name: str) -> Tensor:
        if name in _FLOATS:
            return self._rows.view(torch.float32)[:, _FLOATS[name]]
        if name in _INTEGERS:
            return self._rows[:, _INTEGERS[name]]
        raise AttributeError(f"{name} is no field of SLOT_PARAMS")
