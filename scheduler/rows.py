"""Per-row state as struct-of-arrays, indexed by slot. A row's phase is its queue, so no row is ever in two.

::

    slot:        0 (dummy) | 1 | 2 | ... | W
    phase        FREE -> PREFILLING -> DECODE -> READY -> EXITED -> DECODE ...
                                       (Q_D)     (Q_R)    (Q_C)

State advances when a stage is dispatched, not when its result arrives. All writes are methods of RowState.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from depthbatch.common.frames import Int32Array
from depthbatch.common.gates import Gate
from depthbatch.scheduler.requests import Request

SlotArray = npt.NDArray[np.intp]


class Phase(IntEnum):
    """Which queue a row is in."""

    FREE = 0
    PREFILLING = 1
    DECODE = 2  # Q_D, waits for prelude
    READY = 3  # Q_R, ready for its next loop
    EXITED = 4  # Q_C, waits for coda


FREE, PREFILLING, DECODE, READY, EXITED = (int(phase) for phase in Phase)


class ReadyRows(NamedTuple):
    """Rows of Q_R, in slot order."""

    loops: Int32Array  # [q_r] loops behind them
    leaving: npt.NDArray[np.bool_]  # [q_r] certainly exit at their next loop


class DecodingRows(NamedTuple):
    """Rows between their first token and their last, in slot order."""

    slots: SlotArray  # [rows]
    loops: Int32Array  # [rows] behind the token they carry; r_max for one that waits for coda
    order: npt.NDArray[np.int64]  # [rows] tells the requests that a slot has had apart
    arrived_s: npt.NDArray[np.float64]  # [rows] on the caller's clock, nan = not known


class RowState:
    """Arrays [W + 1] and the queue sizes."""

    def __init__(self, width: int, max_blocks_per_seq: int) -> None:
        rows = width + 1
        self.phase = np.zeros(rows, np.int8)
        self.count = [width, 0, 0, 0, 0]  # rows by phase
        self.position = np.zeros(rows, np.int32)  # of the token the row carries
        self.loop = np.zeros(rows, np.int32)  # loops dispatched for that token
        self.exit_loop = np.zeros(rows, np.int32)  # as far as known; max_loops until a gate fires
        self.max_loops = np.zeros(rows, np.int32)
        self.first_flag_loop = np.zeros(rows, np.int32)  # a flag before this loop does not count
        self.delay = np.zeros(rows, np.int32)  # loops between flag and exit
        self.last_position = np.zeros(rows, np.int32)  # the coda here samples the last token the limit allows
        self.first_output = np.zeros(rows, np.int32)  # prompt length
        self.order = np.zeros(rows, np.int64)
        self.arrived_s = np.full(rows, np.nan)  # of a request that is admitted for the first time
        self.epoch = np.zeros(rows, np.int64)  # bumped for every token and owner: late exits of older ones are void
        self.sampled = np.zeros(rows, np.bool_)  # temperature > 0
        self.filtered = np.zeros(rows, np.bool_)  # so, and with top-k, top-p or min-p
        self.gated = np.zeros(rows, np.bool_)  # a core step returns a decision
        self.own = np.zeros(rows, np.bool_)  # that decision is needed before the next stage
        self.preloop = np.zeros(rows, np.bool_)  # prelude returns the depth
        self.replayed = np.zeros(rows, np.bool_)
        self.changes_logits = np.zeros(rows, np.bool_)  # penalties, bias or min_tokens
        self.logprobs = np.zeros(rows, np.bool_)  # wants logprobs
        self.constrained = np.zeros(rows, np.bool_)  # has a grammar
        self.forced = np.zeros(rows, np.bool_)  # is fed a token that is known: what it samples is dropped
        self.num_blocks = np.zeros(rows, np.int32)
        self.table = np.zeros((rows, max_blocks_per_seq), np.int32)  # logical blocks
        self.replay = np.zeros((rows, 0), np.uint8)  # depth by decode token, grown on demand
        self.request: list[Request | None] = [None] * rows
        kinds = (
            "sampled",
            "filtered",
            "gated",
            "own",
            "preloop",
            "replayed",
            "changes_logits",
            "logprobs",
            "constrained",
            "forced",
        )
        self.active_with = dict.fromkeys(kinds, 0)

    def in_phase(self, phase: int) -> SlotArray:
        """Slots of a queue, ascending."""
        return np.flatnonzero(self.phase == phase)

    def move(self, slots: SlotArray, source: int, target: int) -> None:
        """Rows change queue."""
        self.phase[slots] = target
        self.count[source] -= slots.size
        self.count[target] += slots.size

    def any_of(self, kind: str, slots: SlotArray) -> bool:
        """True when some of the rows has the property; no numpy work when no active row has it."""
        return self.active_with[kind] > 0 and bool(getattr(self, kind)[slots].any())

    def admit(self, slot: int, request: Request, blocks: Int32Array) -> None:
        """A request takes a slot and enters PREFILLING."""
        params, gate = request.params, request.gate
        self._set_phase(slot, PREFILLING)
        self.request[slot] = request
        self.order[slot] = request.order
        self.arrived_s[slot] = np.nan if request.arrived_s is None else request.arrived_s
        self.max_loops[slot] = params.max_loops
        self.delay[slot] = gate.delay
        self.first_flag_loop[slot] = params.min_loops - gate.delay
        self.first_output[slot] = request.prompt.size
        self.last_position[slot] = request.prompt.size + request.limit - 2
        self.num_blocks[slot] = blocks.size
        self.table[slot, : blocks.size] = blocks
        self._set_kinds(slot, request, +1)
        if gate is Gate.REPLAY:
            self._load_replay(slot, params.exit_depths, params.max_loops)

    def release(self, slot: int) -> Int32Array:
        """The row leaves; returns the blocks it held."""
        request = self.request[slot]
        assert request is not None
        self._set_kinds(slot, request, -1)
        self.set_forced(slot, False)
        self._set_phase(slot, FREE)
        self.request[slot] = None
        self.epoch[slot] += 1
        blocks = self.table[slot, : self.num_blocks[slot]].copy()
        self.num_blocks[slot] = 0
        return blocks

    def set_forced(self, slot: int, forced: bool) -> None:
        """The row decodes forced tokens from now on, or no longer."""
        self.active_with["forced"] += int(forced) - int(self.forced[slot])
        self.forced[slot] = forced

    def start_decode(self, slot: int, position: int) -> None:
        """The prompt is prefilled; the row now carries the token at ``position``."""
        self._set_phase(slot, DECODE)
        self.position[slot] = position

    def start_token(self, slots: SlotArray) -> None:
        """Prelude: the token's loop count starts, its depth is set as far as it is known."""
        self.loop[slots] = 0
        self.epoch[slots] += 1
        self.exit_loop[slots] = self.max_loops[slots]
        if self.active_with["replayed"]:
            rows = slots[self.replayed[slots]]
            index = np.minimum(self.position[rows] - self.first_output[rows], self.replay.shape[1] - 1)
            self.exit_loop[rows] = self.replay[rows, index]
        self.move(slots, DECODE, READY)

    def begin_loop(self, slots: SlotArray) -> Int32Array:
        """Core: one more loop; rows that exit with it join Q_C. Returns the loops that each row has begun, [rows]."""
        loops = self.loop.take(slots)
        loops += 1
        self.loop[slots] = loops
        self._exit(slots[loops >= self.exit_loop.take(slots)])
        return loops

    def begin_coda(self, slots: SlotArray) -> SlotArray:
        """Coda: rows carry their next token and wait for prelude. Returns those whose token was the last one allowed."""
        positions = self.position.take(slots)
        last = slots[positions >= self.last_position.take(slots)]
        positions += 1
        self.position[slots] = positions
        self.move(slots, EXITED, DECODE)
        return last

    def awaits_own(self, slots: SlotArray, loops: Int32Array) -> bool:
        """True when the decision of some row at these loops is needed before the next stage."""
        if not self.any_of("own", slots):
            return False
        undecided = self.own[slots] & (loops >= self.first_flag_loop[slots]) & (loops < self.max_loops[slots])
        return bool(undecided.any())

    def fire(self, slots: SlotArray, epochs: SlotArray, loops: Int32Array, fired: npt.NDArray[np.uint8]) -> None:
        """Gates that fired, [rows], at these loops become exits. Rows that carry another token by now are not touched."""
        counts = self._decides_for(slots, epochs) & (fired != 0) & self.gated[slots]
        counts &= loops >= self.first_flag_loop[slots]
        rows = slots[counts]
        exits = np.minimum(loops[counts] + self.delay[rows], self.exit_loop[rows])
        self.exit_loop[rows] = exits
        self._exit(rows[(self.loop[rows] >= exits) & (self.phase[rows] == READY)])

    def set_predicted_depths(self, slots: SlotArray, epochs: SlotArray, depths: npt.NDArray[np.uint8]) -> None:
        """What preloop gates say of their tokens, [rows]. Rows that carry another token by now are not touched."""
        counts = self._decides_for(slots, epochs) & self.preloop[slots]
        rows = slots[counts]
        fewest = self.first_flag_loop[rows] + self.delay[rows]
        self.exit_loop[rows] = np.clip(depths[counts].astype(np.int32), fewest, self.max_loops[rows])

    def force_depth(self, slot: int, depth: int) -> None:
        """The row's forced token exits where it did the first time."""
        self.exit_loop[slot] = depth

    def add_blocks(self, slots: SlotArray, blocks: Int32Array) -> None:
        """One more block at the end of each row's table."""
        self.table[slots, self.num_blocks[slots]] = blocks
        self.num_blocks[slots] += 1

    def ready_rows(self) -> ReadyRows:
        """Q_R as a policy may see it."""
        ready = self.in_phase(READY)
        loops = self.loop.take(ready)
        return ReadyRows(loops, loops + 1 >= self.exit_loop.take(ready))

    def decoding_rows(self, r_max: int) -> DecodingRows:
        """Rows that carry a token, wherever they are with it."""
        slots = np.flatnonzero(self.phase >= DECODE)
        phase = self.phase.take(slots)
        loops = np.where(phase == EXITED, r_max, np.where(phase == READY, self.loop.take(slots), 0)).astype(np.int32)
        return DecodingRows(slots, loops, self.order.take(slots), self.arrived_s.take(slots))

    def youngest(self) -> int:
        """The slot whose request is served last."""
        active = np.flatnonzero(self.phase != FREE)
        return int(active[np.argmax(self.order[active])])

    def _exit(self, slots: SlotArray) -> None:
        if slots.size:
            self.move(slots, READY, EXITED)

    def _decides_for(self, slots: SlotArray, epochs: SlotArray) -> npt.NDArray[np.bool_]:
        """Rows that still carry the token of that epoch, at a depth that is not known already."""
        current: npt.NDArray[np.bool_] = self.epoch[slots] == epochs
        if self.active_with["forced"]:
            current &= ~self.forced[slots]
        return current

    def _set_phase(self, slot: int, target: int) -> None:
        self.count[self.phase[slot]] -= 1
        self.phase[slot] = target
        self.count[target] += 1

    def _set_kinds(self, slot: int, request: Request, sign: int) -> None:
        gate = request.gate
        holds = {
            "sampled": request.params.temperature > 0,
            "filtered": request.params.filters,
            "gated": gate.decides_on_device,
            "own": gate is Gate.OWN,
            "preloop": gate is Gate.PRELOOP,
            "replayed": gate is Gate.REPLAY,
            "changes_logits": request.params.changes_logits,
            "logprobs": request.params.logprobs,
            "constrained": bool(request.params.grammar),
        }
        for kind, value in holds.items():
            getattr(self, kind)[slot] = value and sign > 0
            self.active_with[kind] += sign * value

    def _load_replay(self, slot: int, depths: bytes, max_loops: int) -> None:
        """The column after the last recorded depth stands for all missing ones."""
        width = self.replay.shape[1]
        if len(depths) + 1 > width:
            wider = np.empty((self.replay.shape[0], max(len(depths) + 1, 2 * width)), np.uint8)
            wider[:, :width] = self.replay
            wider[:, width:] = self.max_loops[:, None]  # what is missing in a row is full depth
            self.replay = wider
        self.replay[slot, : len(depths)] = np.minimum(np.frombuffer(depths, np.uint8), max_loops)
        self.replay[slot, len(depths) :] = max_loops
