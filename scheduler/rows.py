"""Per-row state as struct-of-arrays. A row's phase is its queue, so no row is ever in two.

A slot is a sequence; a row is one token of it on its way, in a *lane*. With speculation a sequence has L lanes, so that
L successive tokens may be on their way; without it L = 1, and a lane is a slot. A token's lane follows from its position
(common.frames.lane_of), and arrays are indexed by it::

    lane:        0 (dummy) | 1 .. W                 | W + 1 .. 2 W           | ...
                             slots, position % L = 0  slots, position % L = 1
    phase        FREE -> PREFILLING -> DECODE -> READY -> EXITED -> DECODE of the next position
                                       (Q_D)     (Q_R)    (Q_C)

A chain of drafts adds the phases BLOCKED, HELD and READ (scheduler/lanes.py). Blocks and requests are a slot's.

State advances when a stage is dispatched, not when its result arrives. All writes are methods of RowState.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from depthbatch.common.frames import Int32Array, lane_of
from depthbatch.common.gates import Gate
from depthbatch.scheduler.requests import Request

SlotArray = npt.NDArray[np.intp]
_NO_ROWS = np.zeros(0, np.intp)


class Phase(IntEnum):
    """Which queue a row is in."""

    FREE = 0
    PREFILLING = 1
    DECODE = 2  # Q_D, waits for prelude
    READY = 3  # Q_R, ready for its next loop
    EXITED = 4  # Q_C, waits for coda
    BLOCKED = 5  # its next loop reads a plane that is not final yet
    HELD = 6  # has exited, may not be read for good before the lane ahead of it
    READ = 7  # its final readout is dispatched; its token, or whether its input was right, is not known


FREE, PREFILLING, DECODE, READY, EXITED, BLOCKED, HELD, READ = (int(phase) for phase in Phase)


class ReadyRows(NamedTuple):
    """Rows of Q_R, in slot order."""

    loops: Int32Array  # [q_r] loops behind them
    leaving: npt.NDArray[np.bool_]  # [q_r] certainly exit at their next loop


class Owners(NamedTuple):
    """Whose tokens rows carry."""

    slots: SlotArray  # [rows]
    order: npt.NDArray[np.int64]  # [rows] tells the requests that a slot has had apart


class DecodingRows(NamedTuple):
    """Sequences between their first token and their last: the oldest token of each that is on its way."""

    slots: SlotArray  # [rows]
    loops: Int32Array  # [rows] behind the token they carry; r_max for one that waits for coda
    order: npt.NDArray[np.int64]  # [rows] tells the requests that a slot has had apart
    arrived_s: npt.NDArray[np.float64]  # [rows] on the caller's clock, nan = not known


class RowState:
    """Arrays [L W + 1] and the queue sizes; blocks and requests [W + 1]. W slots of L lanes each."""

    def __init__(self, width: int, max_blocks_per_seq: int, lanes: int = 1) -> None:
        rows = lanes * width + 1
        self.width = width
        self.lanes = lanes
        self.sequences = 0  # slots that are taken
        self.slot = np.zeros(rows, np.intp)  # of each lane
        self.slot[1:] = np.arange(lanes * width) % width + 1
        self.phase = np.zeros(rows, np.int8)
        self.count = [rows - 1, 0, 0, 0, 0, 0, 0, 0]  # rows by phase
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
        self.first_exit = np.zeros(rows, np.bool_)  # prelude says whether the first loop is the last
        self.replayed = np.zeros(rows, np.bool_)
        self.forbids_tokens = np.zeros(rows, np.bool_)  # bad words or an allow list
        self.changes_logits = np.zeros(rows, np.bool_)  # penalties, bias or min_tokens
        self.logprobs = np.zeros(rows, np.bool_)  # wants logprobs
        self.constrained = np.zeros(rows, np.bool_)  # has a grammar
        self.forced = np.zeros(rows, np.bool_)  # is fed a token that is known: what it samples is dropped
        self.num_blocks = np.zeros(width + 1, np.int32)
        self.table = np.zeros((width + 1, max_blocks_per_seq), np.int32)  # logical blocks
        self.replay = np.zeros((width + 1, 0), np.uint8)  # depth by decode token, grown on demand
        self.request: list[Request | None] = [None] * (width + 1)
        kinds = (
            "sampled",
            "filtered",
            "gated",
            "own",
            "preloop",
            "first_exit",
            "replayed",
            "changes_logits",
            "forbids_tokens",
            "logprobs",
            "constrained",
            "forced",
        )
        self.active_with = dict.fromkeys(kinds, 0)

    def in_phase(self, phase: int) -> SlotArray:
        """Slots of a queue, ascending."""
        slots: SlotArray = (self.phase == phase).nonzero()[0]  # in half the time of np.flatnonzero
        return slots

    def move(self, slots: SlotArray, source: int, target: int) -> None:
        """Rows change queue."""
        self.phase[slots] = target
        self.count[source] -= slots.size
        self.count[target] += slots.size

    def any_of(self, kind: str, slots: SlotArray) -> bool:
        """True when some of the rows has the property; no numpy work when no active row has it."""
        return self.active_with[kind] > 0 and bool(getattr(self, kind)[slots].any())

    def lane(self, slot: int, position: int) -> int:
        """The lane of a slot's token at ``position``."""
        return slot + position % self.lanes * self.width

    def slots_of(self, lanes: SlotArray) -> SlotArray:
        """The slots of lanes; the lanes themselves where a slot has one."""
        return lanes if self.lanes == 1 else self.slot.take(lanes)

    def of_slot(self, slot: int) -> slice:
        """All lanes of a slot."""
        return slice(slot, None, self.width)

    def admit(self, slot: int, request: Request, blocks: Int32Array) -> None:
        """A request takes a slot and enters PREFILLING."""
        params, gate, lanes = request.params, request.gate, self.of_slot(slot)
        self._set_phase(slot, PREFILLING)
        self.sequences += 1
        self.request[slot] = request
        self.order[lanes] = request.order
        self.arrived_s[lanes] = np.nan if request.arrived_s is None else request.arrived_s
        self.max_loops[lanes] = params.max_loops
        self.delay[lanes] = gate.delay
        self.first_flag_loop[lanes] = params.min_loops - gate.delay
        self.first_output[lanes] = request.prompt.size
        self.last_position[lanes] = request.prompt.size + request.limit - 2
        self.num_blocks[slot] = blocks.size
        self.table[slot, : blocks.size] = blocks
        self._set_kinds(slot, request, +1)
        if gate is Gate.REPLAY:
            self._load_replay(slot, params.exit_depths, params.max_loops)

    def release(self, slot: int) -> Int32Array:
        """The sequence leaves, with all its rows; returns the blocks it held."""
        request = self.request[slot]
        assert request is not None
        self._set_kinds(slot, request, -1)
        self.set_forced(slot, False)
        for lane in range(slot, self.phase.size, self.width):
            self._set_phase(lane, FREE)
        self.request[slot] = None
        self.sequences -= 1
        self.epoch[self.of_slot(slot)] += 1
        blocks = self.table[slot, : self.num_blocks[slot]].copy()
        self.num_blocks[slot] = 0
        return blocks

    def set_forced(self, slot: int, forced: bool) -> None:
        """The row decodes forced tokens from now on, or no longer."""
        self.active_with["forced"] += int(forced) - int(self.forced[slot])
        self.forced[slot] = forced

    def start_decode(self, slot: int, position: int) -> None:
        """The prompt is prefilled; a row now carries the token at ``position``."""
        self._set_phase(slot, FREE)
        self.carry(np.array([self.lane(slot, position)]), position)

    def carry(self, lanes: SlotArray, positions: Int32Array | int) -> None:
        """Free lanes get the tokens at ``positions``, which wait for prelude."""
        self.move(lanes, FREE, DECODE)
        self.position[lanes] = positions
        self.epoch[lanes] += 1

    def drop(self, lanes: SlotArray, phase: int | None = None) -> None:
        """Tokens, in a queue or (None) in any, are no longer on their way; whatever comes back for them is void."""
        if phase is not None:
            self.move(lanes, phase, FREE)
        else:
            for source, count in enumerate(np.bincount(self.phase[lanes]).tolist()):
                self.count[source] -= count
            self.phase[lanes] = FREE
            self.count[FREE] += lanes.size
        self.epoch[lanes] += 1

    def start_token(self, slots: SlotArray) -> None:
        """Prelude: the token's loop count starts, its depth is set as far as it is known."""
        self.loop[slots] = 0
        self.exit_loop[slots] = self.max_loops[slots]
        if self.active_with["replayed"]:
            rows = slots[self.replayed[slots]]
            index = np.minimum(self.position[rows] - self.first_output[rows], self.replay.shape[1] - 1)
            self.exit_loop[rows] = self.replay[self.slot[rows], index]
        self.move(slots, DECODE, READY)

    def begin_loop(self, slots: SlotArray) -> Int32Array:
        """Core: one more loop; rows that exit with it join Q_C. Returns the loops that each row has begun, [rows]."""
        loops = self.loop.take(slots)
        loops += 1
        self.loop[slots] = loops
        self._exit(slots[loops >= self.exit_loop.take(slots)])
        return loops

    def begin_coda(self, slots: SlotArray) -> SlotArray:
        """Coda: the sequences' next tokens wait for prelude. Returns the rows whose token was the last one allowed."""
        positions = self.position.take(slots)
        last = slots[positions >= self.last_position.take(slots)]
        positions += 1
        if self.lanes == 1:
            self.move(slots, EXITED, DECODE)
            self.position[slots] = positions
            self.epoch[slots] += 1
        else:
            self.move(slots, EXITED, FREE)
            self.epoch[slots] += 1
            self.carry(lane_of(self.slot.take(slots), positions, self.width, self.lanes), positions)
        return last

    def awaits_own(self, slots: SlotArray, loops: Int32Array) -> bool:
        """True when the decision of some row at these loops is needed before the next stage."""
        if not self.any_of("own", slots):
            return False
        undecided = self.own[slots] & (loops >= self.first_flag_loop[slots]) & (loops < self.max_loops[slots])
        return bool(undecided.any())

    def fire(self, lanes: SlotArray, epochs: SlotArray, loops: Int32Array, fired: npt.NDArray[np.uint8]) -> SlotArray:
        """Gates that fired, [rows], at these loops become exits. Rows that carry another token by now are not touched.
        Returns the rows that join Q_C with that."""
        counts = self._decides_for(lanes, epochs) & (fired != 0) & self.gated[lanes]
        counts &= loops >= self.first_flag_loop[lanes]
        rows = lanes[counts]
        exits = np.minimum(loops[counts] + self.delay[rows], self.exit_loop[rows])
        self.exit_loop[rows] = exits
        phase = self.phase[rows]
        leaving: SlotArray = rows[(self.loop[rows] >= exits) & ((phase == READY) | (phase == BLOCKED))]
        if leaving.size:
            self.move(leaving[self.phase[leaving] == BLOCKED], BLOCKED, READY)
            self._exit(leaving)
        return leaving

    def set_predicted_depths(self, slots: SlotArray, epochs: SlotArray, depths: npt.NDArray[np.uint8]) -> None:
        """What preloop gates say of their tokens, [rows]. Rows that carry another token by now are not touched."""
        counts = self._decides_for(slots, epochs) & self.preloop[slots]
        rows = slots[counts]
        fewest = self.first_flag_loop[rows] + self.delay[rows]
        self.exit_loop[rows] = np.clip(depths[counts].astype(np.int32), fewest, self.max_loops[rows])

    def fire_first(self, lanes: SlotArray, epochs: SlotArray, depths: npt.NDArray[np.uint8]) -> SlotArray:
        """Pre-loop heads that say, [rows], that one loop is enough are gates that fired before it. As ``fire``."""
        if not self.active_with["first_exit"]:
            return _NO_ROWS
        said = ((depths == 1) & self.first_exit[lanes]).astype(np.uint8)
        return self.fire(lanes, epochs, np.zeros(lanes.size, np.int32), said)

    def force_depth(self, slot: int, depth: int) -> None:
        """The row's forced token exits where it did the first time."""
        self.exit_loop[slot] = depth

    def add_blocks(self, slots: SlotArray, blocks: Int32Array) -> None:
        """One more block at the end of each row's table."""
        owners = self.slots_of(slots)
        self.table[owners, self.num_blocks[owners]] = blocks
        self.num_blocks[owners] += 1

    def ready_rows(self) -> ReadyRows:
        """Q_R as a policy may see it."""
        ready = self.in_phase(READY)
        loops = self.loop.take(ready)
        return ReadyRows(loops, loops + 1 >= self.exit_loop.take(ready))

    def owners(self, phase: int) -> Owners:
        """Of the rows of a queue, in slot order."""
        rows = self.in_phase(phase)
        return Owners(self.slots_of(rows), self.order.take(rows))

    def decoding_rows(self, r_max: int) -> DecodingRows:
        """Sequences that carry a token, wherever they are with it; of a chain the oldest."""
        lanes = np.flatnonzero(self.phase >= DECODE)
        if self.lanes > 1:
            lanes = lanes[np.lexsort((self.position[lanes], self.slot[lanes]))]
            lanes = lanes[np.unique(self.slot[lanes], return_index=True)[1]]
        phase = self.phase.take(lanes)
        running = (phase == READY) | (phase == BLOCKED)
        loops = np.where(running, self.loop.take(lanes), np.where(phase == DECODE, 0, r_max)).astype(np.int32)
        return DecodingRows(self.slot.take(lanes), loops, self.order.take(lanes), self.arrived_s.take(lanes))

    def youngest(self) -> int:
        """The slot whose request is served last."""
        active = np.flatnonzero(self.phase != FREE)
        return int(self.slot[active[np.argmax(self.order[active])]])

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
            "first_exit": request.first_exit,
            "replayed": gate is Gate.REPLAY,
            "changes_logits": request.params.changes_logits,
            "forbids_tokens": request.params.forbids_tokens,
            "logprobs": request.params.logprobs,
            "constrained": bool(request.params.grammar),
        }
        lanes = self.of_slot(slot)
        for kind, value in holds.items():
            getattr(self, kind)[lanes] = value and sign > 0
            self.active_with[kind] += sign * value

    def _load_replay(self, slot: int, depths: bytes, max_loops: int) -> None:
        """The column after the last recorded depth stands for all missing ones."""
        width = self.replay.shape[1]
        if len(depths) + 1 > width:
            wider = np.empty((self.replay.shape[0], max(len(depths) + 1, 2 * width)), np.uint8)
            wider[:, :width] = self.replay
            wider[:, width:] = self.max_loops[: self.width + 1, None]  # what is missing in a row is full depth
            self.replay = wider
        self.replay[slot, : len(depths)] = np.minimum(np.frombuffer(depths, np.uint8), max_loops)
        self.replay[slot, len(depths) :] = max_loops
