"""Speculation by depth: successive tokens of a sequence on their way at once, each in a lane of its own (docs/speculation.md).

A *chain* is a sequence's tokens at positions base .. tail. The input of its first token is certain. The input of any
other is a *guess* until the token before it is known::

    position     base        base + 1     ..    tail
    input        certain     guess              guess        right as soon as the one ahead says the same token
    loops run    4           3                  1            fewer than any token before it that still runs

A lane without a successor may be read for a *draft* after some loops: the token that its present state would give, with
the random number that its final readout will use. The draft starts the next position. Every lane is read for good once,
at its exit. What a lane has said becomes a token of the sequence when its input is certain (``_commit``); if the next
lane was started with another token, it and all behind it are dropped, and the position starts anew from the token that
the final readout has left on the device.

What keeps the output what it would be without drafts (each rule has a test that fails without it):

* A lane runs loop r + 1 only if every lane before it has run it, or has exited and its planes are filled: else it is
  BLOCKED (``block``). It does not suffice to look at the lane ahead: that may have exited and be filled while one before
  it still runs. A coda fills the planes of the rows it reads for good, and of those that are HELD.
* Where coda has layers, a lane is read for good in a later coda than the one ahead: the K/V of these layers must be
  final for all earlier positions. Until then it is HELD.
* A chain never spans more than L positions, counted from the oldest token that is not known, so that no draft takes the
  lane in which a final readout has left its token. L is two more than draft lanes: a row that is read for good runs no
  more, so the same coda may read the last row for a draft.
* Late results of a lane that was dropped are void: its epoch has passed.
* Requests whose tokens depend on more than logits, seed and position (penalties, bias, bad words, grammars) have no
  drafts.

Drafts take what is left: rows up to the largest bucket, blocks that nobody waits for. A draft never preempts anything.
"""

from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from depthbatch.common.frames import Int32Array, lane_of
from depthbatch.common.stats import DraftStats
from depthbatch.scheduler.config import DraftLimit, SchedulerConfig
from depthbatch.scheduler.requests import Request
from depthbatch.scheduler.rows import (
    BLOCKED,
    DECODE,
    EXITED,
    FREE,
    HELD,
    PREFILLING,
    READ,
    READY,
    Phase,
    RowState,
    SlotArray,
)

BoolArray = npt.NDArray[np.bool_]
_UNKNOWN = -1  # a token that no result has brought yet
_NO_STOP, _MANY_STOPS = -2, -3  # of a request whose stop tokens are not one
_NO_LANES = np.zeros(0, np.intp)
_EVERY_LOOP = np.iinfo(np.int32).max
# by phase: the row may be read for a draft; it runs no more once the next coda is dispatched
_READABLE, _LEAVES = np.isin(list(Phase), (READY, BLOCKED, HELD)), np.isin(list(Phase), (EXITED, READ))


class Committed(NamedTuple):
    """Tokens that have become certain, those of a sequence in order. All [tokens]; lists, as events are made of them."""

    requests: list[Request]
    tokens: list[int]
    depths: list[int]
    logprobs: list[bytes]
    accepted: list[int]  # 1: a draft stood for it, and was right
    rejected: list[int]  # or wrong


@dataclass(slots=True, eq=False)
class CodaRows:
    """What a coda reads, beyond the rows whose token and successor are certain. All [rows]."""

    index: SlotArray  # in the batch
    lanes: SlotArray
    epochs: SlotArray
    final: npt.NDArray[np.bool_]  # read for good, token and successor apart: its token is noted until it is certain
    successors: SlotArray  # lane that was started from this readout, 0 = none


class Chains:
    """The chains of all sequences: arrays by lane beside those of RowState, and by slot."""

    def __init__(self, config: SchedulerConfig, rows: RowState) -> None:
        self._rows = rows
        self._most_rows = config.buckets[-1]
        self._ordered = config.coda_layers > 0
        self._block_size = config.block_size
        size, width = rows.phase.size, rows.width
        lanes = np.arange(size)
        self._ahead = np.where(lanes > width, lanes - width, lanes + size - 1 - width)  # lane of the position before
        self._ahead[0] = 0
        self._slots = np.arange(1, width + 1)
        self._offsets = np.arange(rows.lanes)[:, None]
        self.guess = np.zeros(size, np.bool_)  # the input is not certain
        self._follows = np.zeros(size, np.bool_)  # the position before is on its way, too
        self._filled = np.zeros(size, np.bool_)  # every plane of its K/V is written
        self._input = np.full(size, _UNKNOWN, np.int64)
        self._said = np.full(size, _UNKNOWN, np.int64)  # by its final readout
        self._draft_depth = np.zeros(size, np.int32)  # loops after which its input was read; 0: a final readout
        self._logprobs: dict[int, bytes] = {}
        self._base = np.zeros(width + 1, np.int64)  # position of the oldest token that is not known
        self._tail = np.zeros(width + 1, np.int64)
        self._drafts = np.zeros(width + 1, np.bool_)  # the request may have drafts
        self._stop = np.full(width + 1, _NO_STOP, np.int64)  # its stop token
        self.chained = 0  # lanes that follow another
        self.started = np.zeros(config.r_max + 1, np.int64)  # drafts by the loops they were read after
        self.right = np.zeros(config.r_max + 1, np.int64)
        self.wrong = np.zeros(config.r_max + 1, np.int64)

    # --- a sequence comes and goes

    def begin(self, request: Request) -> None:
        """Its prompt is prefilled: the chain is the token that decode goes on with."""
        slot = request.slot
        self._base[slot] = self._tail[slot] = request.computed
        self._drafts[slot] = request.may_have_drafts
        stops = request.stop_ids
        self._stop[slot] = _NO_STOP if not stops else _MANY_STOPS if len(stops) > 1 else next(iter(stops))
        self._start(np.array([self._rows.lane(slot, request.computed)]), False, 0)

    def end(self, slot: int) -> None:
        """The sequence leaves, before RowState releases its rows. A certain token that was read and is not known yet
        will not be known: whoever goes on with the request samples it again."""
        rows = self._rows
        self._drafts[slot] = False
        of_slot = rows.of_slot(slot)
        request = rows.request[slot]
        assert request is not None
        request.dispatched -= int(np.count_nonzero((rows.phase[of_slot] == READ) & ~self.guess[of_slot]))
        self.chained -= int(np.count_nonzero(self._follows[of_slot]))
        self._follows[of_slot] = self.guess[of_slot] = False
        if self._logprobs:  # of tokens that never became certain
            for lane in range(slot, rows.phase.size, rows.width):
                self._logprobs.pop(lane, None)

    # --- what may be read

    def tails(self, limit: DraftLimit | None) -> SlotArray:
        """Lanes that the next coda may read for a draft; those of the oldest requests where there are not rows for all. A
        chain is as long as it will be once that coda is dispatched: rows that are read for good by then run no more."""
        rows = self._rows
        if limit is None or not limit.lanes:
            return _NO_LANES
        slots = self._drafts.nonzero()[0]
        tail = self._tail.take(slots)
        lanes: SlotArray = lane_of(slots, tail, rows.width, rows.lanes)
        may = _READABLE.take(rows.phase.take(lanes))
        may &= rows.loop.take(lanes) >= limit.depth
        may &= tail < rows.last_position.take(lanes)
        may &= tail - self._base.take(slots) < rows.lanes - 1
        may &= self._draft_lanes(slots, limit.lanes) < limit.lanes
        if not self._has_rows_for(rows.lanes - 2):
            room = self._most_rows - rows.width - self._spoken_for()  # every slot may need a row
            if np.count_nonzero(may) > room:
                lanes = lanes[may]
                return lanes[np.argsort(rows.order[lanes], kind="stable")[: max(room, 0)]]
        return lanes[may]

    def _has_rows_for(self, draft_lanes: int) -> bool:
        """A stage can have so many of every slot."""
        return self._most_rows >= self._rows.width * (1 + draft_lanes)

    def _draft_lanes(self, slots: SlotArray, most: int) -> npt.NDArray[np.int64]:
        """Draft lanes of each chain once the next coda is dispatched. Where not all can have as many as they may (``most``), the
        result of that coda comes first: a draft whose chain turns out to be wrong would have had a row that another lacks."""
        rows = self._rows
        out = self._tail.take(slots) - self._base.take(slots)
        if (rows.count[READ] or rows.count[EXITED]) and self._has_rows_for(most):
            leaving = _LEAVES.take(rows.phase[1:]).reshape(rows.lanes, rows.width).sum(axis=0)
            out -= leaving.take(slots - 1)
        return out

    def _spoken_for(self) -> int:
        """Rows beyond one a slot that stages after the next coda may run. Those whose final readout is dispatched, or is
        with that coda, run no more; where such a one is the last of its chain, its successor does."""
        rows = self._rows
        taken = np.flatnonzero((rows.phase != FREE) & (rows.phase != READ))
        slots = rows.slot.take(taken)
        leaves = (rows.phase.take(taken) == EXITED) & (rows.position.take(taken) < self._tail.take(slots))
        by_slot = np.bincount(slots[~leaves], minlength=rows.width + 1)
        return int(np.maximum(by_slot - 1, 0).sum())

    def within_blocks(self, lanes: SlotArray, free: int) -> SlotArray:
        """Of these tails those whose successor has a block, or gets one of the ``free`` ones."""
        rows = self._rows
        if not lanes.size or lanes.size <= free:
            return lanes
        need = rows.position.take(lanes) + 1 >= rows.num_blocks[rows.slot.take(lanes)] * self._block_size
        return lanes[~need | (need.cumsum() <= free)]

    def unfilled(self) -> SlotArray:
        """Lanes that are HELD, with planes to fill."""
        held = self._rows.in_phase(HELD) if self._rows.count[HELD] else _NO_LANES
        return held[~self._filled[held]]

    def urgent_exits(self, lanes: int) -> int:
        """Rows of Q_C whose input is certain, or that are the last of a chain of fewer than so many draft lanes."""
        rows = self._rows
        exited = rows.in_phase(EXITED)
        slots = rows.slot.take(exited)
        last = (rows.position.take(exited) == self._tail[slots]) & (self._draft_lanes(slots, lanes) < lanes)
        return int(np.count_nonzero(last | ~self.guess[exited]))

    def stalled(self) -> int:
        """BLOCKED rows of sequences that have a row to be filled by a coda."""
        rows = self._rows
        if not rows.count[BLOCKED]:
            return 0
        ended = np.zeros(rows.width + 1, np.bool_)
        ended[rows.slot[((rows.phase == EXITED) | (rows.phase == HELD)) & ~self._filled]] = True
        return int(np.count_nonzero(ended[rows.slot[rows.in_phase(BLOCKED)]]))

    def holds(self, request: Request) -> bool:
        """Self-check of an active sequence: while it decodes, its rows are its chain and nothing else."""
        rows, slot = self._rows, request.slot
        if (rows.phase[rows.of_slot(slot)] == PREFILLING).any():
            return True
        base, tail = int(self._base[slot]), int(self._tail[slot])
        chain = [rows.lane(slot, position) for position in range(base, tail + 1)]
        taken = {lane for lane in range(slot, rows.phase.size, rows.width) if rows.phase[lane] != FREE}
        fits = len(chain) <= rows.lanes and set(chain) == taken and not self.guess[chain[0]]
        fits = fits and rows.position[chain].tolist() == list(range(base, tail + 1))
        return fits and self._follows[chain].tolist() == [False] + [True] * (len(chain) - 1)

    def counted(self) -> bool:
        """Self-check: as many rows are said to follow another as do."""
        return self.chained == int(np.count_nonzero(self._follows))

    def draft_stats(self) -> dict[str, DraftStats]:
        """Of the loops after which any draft was read."""
        counts = zip(self.started.tolist(), self.right.tolist(), self.wrong.tolist(), strict=True)
        return {str(loops): DraftStats(*each) for loops, each in enumerate(counts) if each[0]}

    # --- rows advance

    def hold(self, exited: SlotArray) -> None:
        """Rows that have just exited and come behind one that is not read yet wait for it, where order matters."""
        if not (self._ordered and self.chained and exited.size):
            return
        rows = self._rows
        behind = exited[self._follows[exited] & (rows.phase[self._ahead[exited]] != READ)]
        rows.move(behind, EXITED, HELD)

    def block(self) -> None:
        """After a core step, or once planes are filled: rows that have caught up with one before them wait until it has
        gone further, or has exited and its planes are filled. The others may run."""
        rows = self._rows
        if not (self.chained and (rows.count[EXITED] or rows.count[HELD] or rows.count[BLOCKED])):
            return  # none has stopped, and running they keep their distance
        lanes: SlotArray = lane_of(self._slots, self._base[1:] + self._offsets, rows.width, rows.lanes)
        loops, phase = rows.loop[lanes], rows.phase[lanes]
        written = np.where((phase == FREE) | self._filled[lanes], _EVERY_LOOP, loops)
        np.minimum.accumulate(written, axis=0, out=written)
        stuck = written[:-1] <= loops[1:]
        lanes, phase = lanes[1:], phase[1:]
        rows.move(lanes[stuck & (phase == READY)], READY, BLOCKED)
        rows.move(lanes[~stuck & (phase == BLOCKED)], BLOCKED, READY)

    def begin_coda(self, finals: SlotArray, extra: SlotArray) -> tuple[SlotArray, CodaRows]:
        """Dispatch of a coda that reads ``finals``, all of Q_C, for good, and ``extra`` for drafts or to be filled.

        Returns the finals that are as without speculation (input certain, no successor on its way), which RowState
        advances, and the record of all others.
        """
        rows = self._rows
        has_next = self._tail[rows.slot[finals]] > rows.position[finals]
        apart = self.guess[finals] | has_next
        index = np.concatenate([np.flatnonzero(apart), finals.size + np.arange(extra.size)])
        plain, finals = finals[~apart], finals[apart]
        rows.move(finals, EXITED, READ)
        self._dispatched(finals[~self.guess[finals]])
        self._fill(np.concatenate([plain, finals, extra[rows.phase[extra] == HELD]]))
        read = np.concatenate([finals, extra])
        final = np.arange(read.size) < finals.size
        successors = self._succeed(read, final)
        record = CodaRows(index, read, rows.epoch[read], final, successors)
        self.go_on(plain)
        if self._ordered:
            self._release_held(finals)
        return plain, record

    def go_on(self, finals: SlotArray) -> None:
        """Finals that are as without speculation are dispatched; RowState carries their successors."""
        if finals.size:
            rows = self._rows
            slots, positions = rows.slot[finals], rows.position[finals] + 1
            self._base[slots] = self._tail[slots] = positions
            self._start(lane_of(slots, positions, rows.width, rows.lanes), False, 0)

    def drop_unfed(self) -> int:
        """Drafts that wait for prelude and lack a block give up their row; how many."""
        rows = self._rows
        waiting = rows.in_phase(DECODE)
        waiting = waiting[self.guess[waiting]]
        missing = waiting[rows.position[waiting] >= rows.num_blocks[rows.slot[waiting]] * self._block_size]
        self._cut(missing)
        return missing.size

    # --- results

    def take(self, record: CodaRows, tokens: npt.NDArray[np.int32], logprobs: list[bytes]) -> Committed:
        """What a coda has said; returns the tokens that are certain now. ``tokens`` of the whole batch, as is ``logprobs``
        where there are any."""
        rows, out = self._rows, Committed([], [], [], [], [], [])
        current = rows.epoch[record.lanes] == record.epochs
        heirs = current & (record.successors > 0)
        self._input[record.successors[heirs]] = tokens[record.index[heirs]]
        read = current & record.final
        lanes = record.lanes[read]
        self._said[lanes] = tokens[record.index[read]]
        if logprobs:
            self._logprobs |= zip(
                lanes.tolist(), [logprobs[index] for index in record.index[read].tolist()], strict=True
            )
        certain: SlotArray = lanes[~self.guess[lanes]]
        while certain.size:
            certain = self._commit(certain, out)
        return out

    def _commit(self, lanes: SlotArray, out: Committed) -> SlotArray:
        """Rows that are certain and whose result is known, each the oldest of its sequence, become tokens. Returns the
        rows that have come to be so by that."""
        rows = self._rows
        slots, positions, tokens = rows.slot.take(lanes), rows.position.take(lanes), self._said.take(lanes)
        goes_on = positions < rows.last_position.take(lanes)
        goes_on &= ~self._stops(slots, tokens)  # whoever publishes such a token ends the request, and with it the chain
        positions += 1
        following: SlotArray = lane_of(slots, positions, rows.width, rows.lanes)
        there = self._tail.take(slots) >= positions
        there &= goes_on
        right = self._input.take(following) == tokens
        right &= there
        drafted = self._draft_depth.take(following) * there
        accepted = (drafted > 0) & right
        rejected = (drafted > 0) & ~right
        self.right += np.bincount(drafted[accepted], minlength=self.right.size)
        self.wrong += np.bincount(drafted[rejected], minlength=self.wrong.size)
        out.requests.extend(cast(list[Request], [rows.request[slot] for slot in slots.tolist()]))
        out.tokens.extend(tokens.tolist())
        out.depths.extend(rows.loop.take(lanes).tolist())
        out.accepted.extend(accepted.view(np.int8).tolist())
        out.rejected.extend(rejected.view(np.int8).tolist())
        kept = self._logprobs
        out.logprobs.extend([kept.pop(lane, b"") for lane in lanes.tolist()] if kept else repeat(b"", lanes.size))
        rows.drop(lanes[goes_on], READ)
        self._base[slots[goes_on]] = positions[goes_on]
        certain = following[right]
        self._follows[certain] = self.guess[certain] = False
        self.chained -= certain.size
        self._start_anew(following, slots, positions, there & ~right, goes_on & ~right)
        certain = certain[rows.phase.take(certain) == READ]
        self._dispatched(certain)
        heard: SlotArray = certain[self._said.take(certain) != _UNKNOWN]
        return heard

    def _start_anew(
        self, following: SlotArray, slots: SlotArray, positions: Int32Array, wrong: BoolArray, anew: BoolArray
    ) -> None:
        """Where the row behind one that is known is wrong, it is dropped with all that follow it; where there is none, either,
        the position starts from the token that is known. All [rows]."""
        rows = self._rows
        if wrong.any():
            chain = positions[wrong] + self._offsets
            lanes = lane_of(slots[wrong], chain, rows.width, rows.lanes)
            self._cut(lanes[chain <= self._tail[slots[wrong]]])
        lanes, first = following[anew], positions[anew]
        if lanes.size:
            self._tail[slots[anew]] = first
            rows.carry(lanes, first)
            self._start(lanes, False, 0)

    def _stops(self, slots: SlotArray, said: npt.NDArray[np.int64]) -> BoolArray:
        """[rows] which tokens are stop tokens of their sequence."""
        stop = self._stop.take(slots)
        stops: BoolArray = said == stop
        for row in (stop == _MANY_STOPS).nonzero()[0].tolist():
            request = self._rows.request[slots[row]]
            assert request is not None
            stops[row] = int(said[row]) in request.stop_ids
        return stops

    # --- lanes

    def _succeed(self, read: SlotArray, final: npt.NDArray[np.bool_]) -> SlotArray:
        """Starts the next position from each readout that may have one; their lanes [rows], 0 = none."""
        rows = self._rows
        slots, positions = rows.slot[read], rows.position[read] + 1
        may = (self._tail[slots] < positions) & (positions <= rows.last_position[read]) & self._drafts[slots]
        may &= positions - self._base[slots] < rows.lanes
        successors = np.where(may, lane_of(slots, positions, rows.width, rows.lanes), 0)
        started, drafts = successors[may], may & ~final
        rows.carry(started, positions[may])
        self._tail[slots[may]] = positions[may]
        self._start(started, True, np.where(final, 0, rows.loop[read])[may])
        self._follows[started] = True
        self.chained += started.size
        self.started += np.bincount(rows.loop[read[drafts]], minlength=self.started.size)
        return successors

    def _start(self, lanes: SlotArray, guess: bool, draft_depth: Int32Array | int) -> None:
        self.guess[lanes] = guess
        self._filled[lanes] = False
        self._input[lanes] = self._said[lanes] = _UNKNOWN
        self._draft_depth[lanes] = draft_depth

    def _fill(self, lanes: SlotArray) -> None:
        """Their planes are filled by the coda that is dispatched: rows that wait for that go on."""
        self._filled[lanes] = True
        if self._rows.count[BLOCKED]:
            self.block()

    def _release_held(self, finals: SlotArray) -> None:
        rows = self._rows
        if rows.count[HELD] and finals.size:
            held = rows.in_phase(HELD)
            rows.move(held[np.isin(self._ahead[held], finals)], HELD, EXITED)

    def _dispatched(self, certain: SlotArray) -> None:
        """Final readouts of these certain rows are on their way."""
        requests = self._rows.request
        for slot in self._rows.slot.take(certain).tolist():
            request = requests[slot]
            assert request is not None
            request.dispatched += 1

    def _cut(self, lanes: SlotArray) -> None:
        """Drops rows, of each sequence one and all that follow it."""
        if not lanes.size:
            return
        rows = self._rows
        self.chained -= int(np.count_nonzero(self._follows[lanes]))
        self._follows[lanes] = self.guess[lanes] = False
        if self._logprobs:
            for lane in lanes.tolist():
                self._logprobs.pop(lane, None)
        np.subtract.at(self._tail, rows.slot[lanes], 1)
        rows.drop(lanes)
