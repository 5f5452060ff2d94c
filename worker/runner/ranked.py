"""Stages on several ranks: rank 0 alone decides, the others compute their share of the layers and take its tokens.

What feeds back on the device is the next token of every row, so that is what rank 0 broadcasts: one int32 vector a
prefill and a coda. Whose gate fired goes to the scheduler, which answers with the loops of the next frames.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor

from depthbatch.common.frames import Int32Array
from depthbatch.common.messages import PLAIN, StageBatch, StageExtra, Variant
from depthbatch.worker.host_kv import HostKV
from depthbatch.worker.runner.plain import PlainRunner
from depthbatch.worker.runner.stage_input import StageLimits
from depthbatch.worker.runner.stage_io import LaunchedStage
from depthbatch.worker.runner.stages import Sampled, Stages
from depthbatch.worker.sampling.grammar_matchers import Grammars

Tell = Callable[[StageBatch, Int32Array, Int32Array | None], None]


def all_reduce(x: Tensor) -> Tensor:
    """The sum of ``x`` over all ranks, in its place."""
    dist.all_reduce(x)
    return x


class LeadingStages(Stages):
    """Rank 0's."""

    def _next_tokens(
        self, hidden: Tensor, slots: Tensor, lanes: Tensor, positions: Tensor, variant: Variant
    ) -> Sampled:
        sampled = super()._next_tokens(hidden, slots, lanes, positions, variant)
        dist.broadcast(sampled.tokens, 0)
        return sampled


class FollowingStages(Stages):
    """Another rank's: looks at no logits."""

    def _next_tokens(
        self, hidden: Tensor, slots: Tensor, lanes: Tensor, positions: Tensor, variant: Variant
    ) -> Sampled:
        tokens = torch.empty(len(slots), dtype=torch.int32, device=hidden.device)
        dist.broadcast(tokens, 0)
        self.slots.token.index_copy_(0, lanes, tokens)
        return Sampled(tokens, self._no_logprobs(hidden))


class LeadingRunner(PlainRunner):
    """Tells the other ranks of every stage before it runs here. ``failed`` is called when a stage fails."""

    def __init__(
        self,
        stages: Stages,
        limits: StageLimits,
        device: torch.device,
        grammars: Grammars | None,
        host_kv: HostKV | None,
        tell: Tell,
        failed: Callable[[], None],
    ) -> None:
        super().__init__(stages, limits, device, grammars, host_kv)
        self._tell = tell
        self._failed = failed

    def launch(self, header: StageBatch, frame: Int32Array, slot_params: Int32Array | None = None) -> LaunchedStage:
        try:
            self._tell(without_decisions(header), frame, slot_params)
            return super().launch(header, frame, slot_params)
        except (RuntimeError, OSError):
            self._failed()
            raise


def without_decisions(header: StageBatch) -> StageBatch:
    """A stage as ranks other than 0 run it: no gates, no sampling, nothing that shapes or scores tokens."""
    extra = header.extra
    if extra is not None:
        extra = StageExtra(
            depths=extra.depths,
            forced_tokens=extra.forced_tokens,
            offloads=extra.offloads,
            restores=extra.restores,
        )
    return structs.replace(header, variant=PLAIN, extra=extra)
