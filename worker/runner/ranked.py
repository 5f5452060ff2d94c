"""Stages on several ranks: rank 0 alone decides, the others compute their share of the layers and take its tokens.

What feeds back on the device is the next token of every row, so that is what rank 0 broadcasts: one int32 vector a
prefill and a coda. Whose gate fired goes to the scheduler, which answers with the loops of the next frames.

On GPUs all this is on the compute lane, most of it inside captured graphs (runner/overlapped.py). A collective meets the
one of the same number on the other ranks, so each rank captures the same stages in the same order, which runs every one
of their collectives once outside a capture first, and replays them in the order in which rank 0 tells of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor

from depthbatch.common.frames import Int32Array, Stage
from depthbatch.common.messages import PLAIN, StageBatch, StageExtra, StageResult, Variant
from depthbatch.worker.runner.overlapped import OverlappedRunner
from depthbatch.worker.runner.plain import PlainRunner
from depthbatch.worker.runner.stage_io import LaunchedStage
from depthbatch.worker.runner.stage_tensors import DecodeBuffers
from depthbatch.worker.runner.stages import Sampled, Stages

Tell = Callable[[StageBatch, Int32Array, Int32Array | None], None]


def all_reduce(x: Tensor) -> Tensor:
    """The sum of ``x`` over all ranks, in its place."""
    dist.all_reduce(x)
    return x


class LeadingStages(Stages):
    """Rank 0's."""

    chooses_alone = False

    def _next_tokens(
        self, hidden: Tensor, slots: Tensor, lanes: Tensor, positions: Tensor, variant: Variant
    ) -> Sampled:
        sampled = super()._next_tokens(hidden, slots, lanes, positions, variant)
        dist.broadcast(sampled.tokens, 0)
        return sampled


class FollowingStages(Stages):
    """Another rank's: looks at no gates and no logits, whatever form of a stage rank 0 captures or runs."""

    chooses_alone = False

    def decode(self, stage: Stage, buffers: DecodeBuffers, variant: Variant) -> None:
        super().decode(stage, buffers, PLAIN)

    def _next_tokens(
        self, hidden: Tensor, slots: Tensor, lanes: Tensor, positions: Tensor, variant: Variant
    ) -> Sampled:
        tokens = torch.empty(len(slots), dtype=torch.int32, device=hidden.device)
        dist.broadcast(tokens, 0)
        self.slots.token.index_copy_(0, lanes, tokens)
        return Sampled(tokens, self._no_logprobs(hidden))


class LeadingRunner:
    """Tells the other ranks of every stage before ``runner`` runs it here. ``failed`` is called when a stage fails, before
    its error goes on."""

    def __init__(self, runner: PlainRunner | OverlappedRunner, tell: Tell, failed: Callable[[], None]) -> None:
        self.runner = runner
        self.stages, self.limits, self.grammars = runner.stages, runner.limits, runner.grammars
        self.completions = runner.completions
        self._tell = tell
        self._failed = failed

    def launch(self, header: StageBatch, frame: Int32Array, slot_params: Int32Array | None = None) -> LaunchedStage:
        with self._noting_failure():
            self._tell(without_decisions(header), frame, slot_params)
            return self.runner.launch(header, frame, slot_params)

    def finished(self, stage: LaunchedStage) -> bool:
        with self._noting_failure():
            return self.runner.finished(stage)

    def read(self, stage: LaunchedStage) -> StageResult:
        with self._noting_failure():
            return self.runner.read(stage)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
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
