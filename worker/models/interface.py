"""What a looped model is to the engine: declared stages, a work item, KV layouts, exit gates (models.md, section 3).

A model is prelude, core (run r times), coda, then logits. Between stages a token is a *work item*: one or more named
[N, D] tensors (Ouro ``h``; Huginn ``state``, ``injection``). Stage functions are pure: rows in, rows out; K/V goes
through the attention context, which knows blocks, planes and positions. The same functions run decode (one token a
row), packed prefill, eager, compiled or captured; they may hold no host synchronisation and no data-dependent shape.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from depthbatch.common.gates import Gate
from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.layers.blocks import AttentionContext

WorkItem = tuple[torch.Tensor, ...]  # each [N, D]


@dataclass(frozen=True)
class ModelSpec:
    """The facts of a loaded model that the engine around it needs."""

    architecture: str  # "ouro", "huginn"
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    prelude_layers: int  # attention layers of each stage; cache layers are numbered prelude, core, coda
    core_layers: int
    coda_layers: int
    work_item: tuple[str, ...]
    r_max: int  # loops of a full-depth token as configured
    r_limit: int  # largest r_max the model may be run with
    r_min: int  # fewest loops after which a gate may let a token go
    layouts: tuple[KVLayout, ...]
    default_layout: KVLayout
    gates: tuple[Gate, ...]
    default_gate: Gate
    default_threshold: float
    max_positions: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    quantization: str | None = None  # how layers run where not in ``dtype``
    windows: tuple[int, ...] = ()  # by cache layer, tokens a query sees, itself included; 0 or no entry: all

    def of_a_rank(self, ranks: int) -> "ModelSpec":
        """What each of ``ranks`` ranks computes with: its share of the heads."""
        return replace(self, num_heads=self.num_heads // ranks, num_kv_heads=self.num_kv_heads // ranks)

    def planes_per_layer(self, layout: KVLayout) -> tuple[int, ...]:
        """Planes of every cache layer: 1 outside the core, S inside."""
        planes = layout.num_planes(self.r_max)
        return (1,) * self.prelude_layers + (planes,) * self.core_layers + (1,) * self.coda_layers

    def kv_bytes_per_token(self, layout: KVLayout, kind: KVCacheDtype = KVCacheDtype.AUTO) -> int:
        """K and V bytes of one token over all cache layers and planes, scales included."""
        vectors = sum(self.planes_per_layer(layout)) * 2 * self.num_kv_heads
        return vectors * kind.bytes_per_vector(self.head_dim, self.dtype.itemsize)


class LoopedModel(Protocol):
    """A model with its weights on a device."""

    spec: ModelSpec

    def prelude(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        state_seeds: torch.Tensor,
        attend: AttentionContext,
    ) -> WorkItem:
        """Embeds token_ids [N] at positions [N] and runs the layers before the loop. state_seeds [N] int32."""
        ...

    def core(self, item: WorkItem, positions: torch.Tensor, loops: torch.Tensor, attend: AttentionContext) -> WorkItem:
        """One loop of every row; loops [N] int32, 1-based, may differ between rows."""
        ...

    def coda(self, item: WorkItem, positions: torch.Tensor, attend: AttentionContext) -> torch.Tensor:
        """The layers after the loop, with the final norm: what the head reads, [N, D]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, D] -> fp32 logits [N, V]."""
        ...

    def gate_logit(self, item: WorkItem) -> torch.Tensor:
        """Hazard logit of the model's own gate after a loop, fp32 [N]. Models without such a gate raise."""
        ...

    def lookahead_logit(self, item: WorkItem) -> torch.Tensor:
        """After loop r, the trained head's hazard logit of loop r + 1, fp32 [N]. Models without such a head raise."""
        ...

    def preloop_depth(self, item: WorkItem, threshold: torch.Tensor) -> torch.Tensor:
        """From the prelude's item, the depth a trained head predicts for threshold fp32 [N]: int32 [N], 1-based.

        The smallest depth whose cumulated probability reaches the threshold; the last one for a threshold of 1 or more.
        Models without such a head raise.
        """
        ...

    def convergence(self, before: WorkItem, after: WorkItem) -> torch.Tensor:
        """Distance of consecutive states |s_r - s_{r-1}| / |s_r|, fp32 [N]. Models without one raise."""
        ...
