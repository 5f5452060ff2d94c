"""Hands whole decode stages to the C kernels, from the state that is kept of rows and back into it, a stage a call.

For models of plain stacks on the CPU whose products are packed; the result is bit for bit that of the stages' own operators
(runner/stages.py), which take what cannot go this way: models with stages of their own, ranks, and in a coda all rows that
ask for more than a token that is greedy or drawn by temperature alone. Knows the structures, not what the kernels do.
"""

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthbatch.common.frames import SLOT_PARAM_WORDS, SLOT_PARAMS
from depthbatch.worker.attention.backend import AttentionBackend
from depthbatch.worker.attention.cpu import CpuAttention
from depthbatch.worker.attention.cpu_stack import ROW_PADDING, FusedStack, point_into_scratch
from depthbatch.worker.layers.blocks import BlockStack
from depthbatch.worker.layers.cpu.structs import (
    ROPE_INTERLEAVED,
    ROPE_SPLIT_HALF,
    CodaArgs,
    CodaCall,
    CoreArgs,
    CoreCall,
    PreludeArgs,
)
from depthbatch.worker.layers.linear import Linear, PackedProduct
from depthbatch.worker.models.interface import LoopedModel
from depthbatch.worker.models.llama_like import StackedModel
from depthbatch.worker.slots import SlotState

# What the kernels do, as this module found it.
_COMPUTED = {name: getattr(StackedModel, name) for name in ("prelude", "core", "coda", "logits")}


class FusedPrelude:
    """Embedding rows into work items, new blocks into the table, gates at their start."""

    def __init__(self, model: StackedModel, backend: CpuAttention, slots: SlotState) -> None:
        embedding = model.weights.embedding
        self._args = PreludeArgs(
            embedding=embedding.data_ptr(),
            item=slots.item[0].data_ptr(),
            row_bytes=embedding.shape[1] * embedding.element_size(),
            token=slots.token.data_ptr(),
            survival=slots.survival.data_ptr(),
            cumulated=slots.cumulated.data_ptr(),
            block_tables=slots.block_table.data_ptr(),
            table_stride=slots.block_table.stride(0),
            block_size=backend.geometry.block_size,
        )
        self._kept = (model, slots)  # what the arguments point to
        self._function = backend.prelude_kernel

    def __call__(self, frame: Tensor) -> None:
        """frame int32 [4, N] of a prelude (common.frames)."""
        self._function(ctypes.addressof(self._args), frame.data_ptr(), frame.shape[1])


class FusedCore:
    """A loop of the core on work items where they lie."""

    def __init__(
        self, model: StackedModel, stack: FusedStack, backend: CpuAttention, slots: SlotState, planes: int
    ) -> None:
        """``planes``: of a looped layer."""
        rotary, adapter = model.rotary, None if model.adapter is None else model.adapter.product
        assert adapter is None or isinstance(adapter, PackedProduct)
        self._args = CoreArgs(
            stack=ctypes.addressof(stack.args),
            item=slots.item[0].data_ptr(),
            injection=None if adapter is None else slots.item[1].data_ptr(),
            cos=rotary.cos.data_ptr(),
            sin=rotary.sin.data_ptr(),
            half=rotary.cos.shape[1],
            block_tables=slots.block_table.data_ptr(),
            table_stride=slots.block_table.stride(0),
            planes=planes,
        )
        if adapter is not None:
            self._args.adapter = adapter.args
        self._kept = (model, stack, slots)  # what the arguments point to
        self._call = CoreCall(wide_stride=0 if adapter is None else adapter.width + ROW_PADDING)
        self._call.stack.rope = ROPE_INTERLEAVED if rotary.interleaved else ROPE_SPLIT_HALF
        self._widths, self._dtype, self._function = stack.widths, backend.geometry.dtype, backend.kernels.core
        self._scratch: tuple[Tensor, ...] = ()
        self._rows = 0  # that there is scratch for

    def __call__(self, frame: Tensor) -> None:
        """frame int32 [4, N] of a core step (common.frames)."""
        call, n = self._call, frame.shape[1]
        if n > self._rows:
            self._make_scratch(n)
        call.frame, call.n = frame.data_ptr(), n
        self._function(ctypes.addressof(self._args), ctypes.addressof(call))

    def _make_scratch(self, rows: int) -> None:
        call, half = self._call, self._args.half
        out, wide = (torch.empty(rows * width, dtype=self._dtype) for width in (self._widths.hidden, call.wide_stride))
        planes, cos, sin = torch.empty(rows, dtype=torch.int32), torch.empty(rows * half), torch.empty(rows * half)
        call.stack.out, call.wide = out.data_ptr(), wide.data_ptr()
        call.planes, call.cos, call.sin = planes.data_ptr(), cos.data_ptr(), sin.data_ptr()
        areas = point_into_scratch(call.stack, self._widths, rows, self._dtype)
        self._scratch, self._rows = (*areas, out, wide, planes, cos, sin), rows


class FusedCoda:
    """Planes that a token did not reach, norm, head, choice and the way to the next token."""

    def __init__(
        self, model: StackedModel, head: PackedProduct, backend: CpuAttention, slots: SlotState, planes: int
    ) -> None:
        """``planes``: of a looped layer, if a token that leaves early has to fill some; else 0."""
        coda = model.weights.coda
        words: Mapping[str, tuple[Any, ...]] = SLOT_PARAMS.fields or {}
        self.gathers = _is_computed(model, "coda") and type(coda) is BlockStack and not coda.blocks
        self._args = CodaArgs(
            item=slots.item[0].data_ptr(),
            norm=None if coda.final_norm is None else coda.final_norm.data_ptr(),
            head=head.args,
            next_lane=None if slots.lanes == 1 else slots.next_lane.data_ptr(),
            token=slots.token.data_ptr(),
            params=slots.params.data_ptr(),
            param_words=SLOT_PARAM_WORDS,
            **{name: words[name][1] // 4 for name in ("temperature", "seed_low", "seed_high")},
            eps=coda.eps,
            layers=ctypes.addressof(backend.looped_layers),
            num_layers=len(backend.looped_layers) if planes else 0,
            planes=planes,
            block_tables=slots.block_table.data_ptr(),
            table_stride=slots.block_table.stride(0),
        )
        self._kept = (model, backend, slots)  # what the arguments point to
        self._call = CodaCall(normed_stride=head.width + ROW_PADDING)
        self._head, self._dtype, self._function = head, backend.geometry.dtype, backend.kernels.coda
        self._rows = 0  # that there is scratch for
        self._normed = self._logits = self._weights = torch.empty(0)

    def __call__(self, frame: Tensor, hidden: Tensor | None, tokens: Tensor, sample: bool) -> None:
        """frame int32 [4, N] of a coda (common.frames) -> tokens int32 [N], and into the slots' state. hidden [N, D]: what
        the head reads; None: it is taken from the rows' work items, which ``gathers`` allows. ``sample`` False: all rows
        are greedy."""
        call, n, columns = self._call, frame.shape[1], self._head.columns
        if n > self._rows:
            self._normed = torch.empty(n * call.normed_stride, dtype=self._dtype)
            self._logits = torch.empty(n * columns, dtype=self._dtype)
            call.normed, call.logits, self._rows = self._normed.data_ptr(), self._logits.data_ptr(), n
        if sample and n * columns > len(self._weights):
            self._weights = torch.empty(n * columns)
        if hidden is not None:
            hidden = hidden.contiguous()
        call.hidden = None if hidden is None else hidden.data_ptr()
        call.frame, call.tokens, call.n = frame.data_ptr(), tokens.data_ptr(), n
        call.weights = self._weights.data_ptr() if sample else None
        self._function(ctypes.addressof(self._args), ctypes.addressof(call))


class FusedStages(NamedTuple):
    """The decode stages that are one call."""

    prelude: FusedPrelude | None = None
    core: FusedCore | None = None
    coda: FusedCoda | None = None


def fuse_stages(
    model: LoopedModel, backend: AttentionBackend, slots: SlotState, planes: int, fills: bool
) -> FusedStages:
    """Whichever the kernels can do. ``planes``: of a looped layer; ``fills``: tokens that leave early fill some."""
    if not isinstance(backend, CpuAttention) or not isinstance(model, StackedModel):
        return FusedStages()
    weights, dtype = model.weights, backend.geometry.dtype
    if not all(type(x) is Tensor and x.is_cpu and x.is_contiguous() for x in slots.tensors()):
        return FusedStages()
    if slots.item[0].dtype is not dtype:
        return FusedStages()
    prelude, core, coda = None, None, None
    plain = _is_computed(model, "prelude") and len(slots.item) == 1
    if plain and _is_empty(weights.prelude) and weights.prelude.final_norm is None:
        prelude = FusedPrelude(model, backend, slots) if _is_plain(weights.embedding, dtype) else None
    stack, fits = backend.fused(weights.core), model.adapter is None or len(slots.item) == 2
    if _is_computed(model, "core") and stack is not None and fits and _is_packed(model.adapter, dtype):
        core = FusedCore(model, stack, backend, slots, planes)
    norm, product = weights.coda.final_norm, weights.head.product
    if _is_computed(model, "logits") and _is_packed(weights.head, dtype) and isinstance(product, PackedProduct):
        coda = FusedCoda(model, product, backend, slots, planes if fills else 0) if _is_plain(norm, dtype) else None
    return FusedStages(prelude, core, coda)


def _is_computed(model: StackedModel, name: str) -> bool:
    """Whether this method is the one whose work the kernels do, not another class's nor what has been put in its place."""
    return getattr(getattr(model, name), "__func__", None) is _COMPUTED[name]


def _is_empty(stack: BlockStack) -> bool:
    return type(stack) is BlockStack and not stack.blocks


def _is_plain(x: Tensor | None, dtype: torch.dtype) -> bool:
    return x is None or (type(x) is Tensor and x.is_cpu and x.is_contiguous() and x.dtype is dtype)


def _is_packed(layer: Linear | None, dtype: torch.dtype) -> bool:
    if layer is None:
        return True
    return type(layer) is Linear and isinstance(layer.product, PackedProduct) and layer.product.takes(dtype)
