"""Preempted K/V in host memory: what is copied there and back, and for which victims that is cheaper than computing again.

The scheduler owns the books of the host's blocks; the worker copies, in the order of the stages that carry the copies
(common.frames, offloads and restores). A victim's blocks are copied before the next stage that may write to them, which is
the next prelude or prefill; they come back in the prefill that gives it a slot. ::

    prelude lacks blocks -> victim: blocks to host, then free        the prelude carries the offloads
    victim is at the head -> slot, blocks, host to blocks            the prefill carries the restores

A victim is computed again instead when the host's blocks run out, when its prefill must run for more than its K/V
(penalties, bad words, a grammar), when it has given no token yet or is being rebuilt, or when that is expected to take
less of the device's time. Both costs are fitted from what has been seen; until there is enough of that, it is copied.
"""

import msgspec
import numpy as np

from depthbatch.common.frames import Int32Array, Stage
from depthbatch.common.messages import StageExtra, StageResult
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.inflight import InFlightStep
from depthbatch.scheduler.kv_blocks import HostPool
from depthbatch.scheduler.policy.cost_model import LinearFit
from depthbatch.scheduler.requests import Request
from depthbatch.scheduler.rows import RowState

_FORGET = 0.98  # of the mean cost of a row, a core step


class MoveCosts:
    """Seconds of the device: copies by blocks, prefills by tokens, a row of a core step."""

    def __init__(self) -> None:
        self._copy, self._prefill = LinearFit(1), LinearFit(1)
        self._row_s = 0.0

    def observe(self, step: InFlightStep, result: StageResult) -> None:
        """A stage has retired."""
        seconds = result.end_s - result.start_s
        if step.moved_blocks:
            self._copy.add((step.moved_blocks,), result.moved_s)
        if step.stage is Stage.PREFILL:
            self._prefill.add((step.tokens,), seconds)
        elif step.stage is Stage.CORE:
            row_s = seconds / step.header.rows
            self._row_s = _FORGET * self._row_s + (1.0 - _FORGET) * row_s if self._row_s else row_s

    def copy_pays(self, request: Request, blocks: int) -> bool:
        """Copying so many blocks out and in takes no longer than computing the request again; True while costs are not
        known. Either way a prefill gives it a slot, so what a prefill costs however short it is does not count."""
        if self._copy.solve() is None or self._prefill.solve() is None:
            return True
        copy, prefill = self._copy.coefficients, self._prefill.coefficients
        assert copy is not None and prefill is not None
        again_s = prefill[1] * request.length
        if request.forced_decode:  # its output is decoded again
            again_s += self._row_s * sum(request.depths[1:])
        return 2.0 * (copy[0] + copy[1] * blocks) <= again_s


class Offload:
    """The host's blocks, and the copies that the next prelude or prefill carries."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.host = HostPool(config.host_blocks)
        self.costs = MoveCosts()
        self.offloaded_blocks = self.restored_blocks = 0  # so far
        self._offloads: list[Int32Array] = []  # each [n, 2]
        self._restores: list[Int32Array] = []

    def take_out(self, request: Request, rows: RowState) -> bool:
        """A victim's K/V are to be copied, if they may and that pays; its slot and blocks are still its own."""
        blocks = rows.table[request.slot, : rows.num_blocks[request.slot]]
        params = request.params
        whole = request.output and not rows.forced[request.slot]
        more = params.changes_logits or params.forbids_tokens or params.grammar
        if not whole or more or blocks.size > self.host.free or not self.costs.copy_pays(request, blocks.size):
            return False
        request.host_blocks = self.host.take(blocks.size)
        self._offloads.append(np.stack([blocks, request.host_blocks], axis=1))
        self.offloaded_blocks += blocks.size
        return True

    def bring_back(self, request: Request, blocks: Int32Array) -> None:
        """An admitted request gets its K/V into the first ``blocks`` of its own."""
        assert request.host_blocks is not None
        self._restores.append(np.stack([request.host_blocks[: blocks.size], blocks], axis=1))
        self.restored_blocks += blocks.size
        self.drop(request)
        request.restored = True

    def drop(self, request: Request) -> None:
        """Its blocks of the host are free for copies of later stages."""
        if request.host_blocks is not None:
            self.host.give(request.host_blocks)
            request.host_blocks = None

    def take_moves(self) -> tuple[bytes, bytes, int]:
        """Offloads and restores that are due, as they travel, and how many blocks they are."""
        out, back = self._offloads, self._restores
        self._offloads, self._restores = [], []
        offloads, restores = (np.concatenate(each) if each else np.empty((0, 2), np.int32) for each in (out, back))
        return offloads.tobytes(), restores.tobytes(), len(offloads) + len(restores)

    def forget(self) -> None:
        """The worker's memory is gone."""
        self._offloads.clear()
        self._restores.clear()


def with_moves(extra: StageExtra | None, offloads: bytes, restores: bytes) -> StageExtra | None:
    """A stage's extra inputs with the copies that come before it."""
    if not offloads and not restores:
        return extra
    return msgspec.structs.replace(extra or StageExtra(), offloads=offloads, restores=restores)
