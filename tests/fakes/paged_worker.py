"""A worker without tensors that believes nothing: it keeps what every block, slot and lane holds and checks each frame.

It runs the model of ``paged_model``. A row that reads anything but what its own sequence's tokens have left in the
plane it reads raises at once: blocks handed on too early, planes that are not written or not filled, entries of a token
that was dropped, and entries that another row of the same stage writes cannot go unnoticed. Tokens are a function of the
whole context, so a wrong token anywhere changes all later ones. With prefix caching a sequence may start behind whole
blocks of others; what it finds there must stay as it is for as long as it reads it, and a token of another prompt in it
changes its output.

The cache remembers how deep each token went, as a real model's does, so a sequence that is rebuilt with one depth wrong
says something else from there on. What a rebuilt sequence must be told is checked against what this worker gave it: no
token of its own through prefill where loops share a plane, and its prompt cut where it was.

Drafts are right as often as ``acceptance`` says. Only a readout whose coda layers have seen final entries says what the
model says; any other says a draft, whatever the scheduler takes it for.
"""

from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np

from depthbatch.common.frames import (
    ROW_AUX,
    ROW_LANE,
    ROW_POSITION,
    ROW_SLOT,
    Stage,
    lane_of,
    lanes_of_a_slot,
    slot_param_rows,
    split_prefill_frame,
)
from depthbatch.common.gates import Gate
from depthbatch.common.messages import StageExtra, StageResult, Variant
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.stage_batch import ScheduledStage
from fakes.paged_model import draft, entry, gate_fires, leave, predicted_depth, sample, seen, think


def logprobs_of(tokens: list[int]) -> bytes:
    """A row a token; the fake's are the token once more."""
    return np.asarray(tokens, np.int32).tobytes()


def forced_tokens(extra: StageExtra) -> dict[int, int]:
    """By slot."""
    pairs = np.frombuffer(extra.forced_tokens, "<i4").reshape(-1, 2).tolist()
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@dataclass(slots=True, eq=False)
class Cell:
    """One position of one block: who wrote it, for which position, and what."""

    owner: int  # sequence
    position: int
    writer: int  # the token at that position: a new number each time it is started
    planes: dict[int, tuple[int, int]] = field(default_factory=dict)  # value, step that wrote it
    left: tuple[int, int] | None = None  # the coda layers' final entry, likewise

    def values(self) -> tuple[dict[int, int], int | None]:
        return {plane: value for plane, (value, _) in self.planes.items()}, self.left and self.left[0]


@dataclass(slots=True, eq=False)
class Slot:
    """Device state of a slot."""

    sequence: int = 0  # incarnation: a new one with every prefill from 0
    prefilling: bool = False
    prefilled: int = 0
    decoded: int = -1  # last position that was started
    forced: int = -1  # token that decode goes on with
    table: dict[int, int] = field(default_factory=dict)
    writers: list[int] = field(default_factory=list)  # by position
    cuts: list[int] = field(default_factory=list)  # tokens of each chunk of its prefill
    adopted: list[tuple] = field(default_factory=list)  # values of the cached blocks it started with
    params: np.ndarray | None = None

    @property
    def seed(self) -> int:
        return int(self.params["seed_low"])

    @property
    def filters(self) -> bool:
        row = self.params
        return bool((row["top_k"] > 0 or row["top_p"] < 1 or row["min_p"] > 0) and row["temperature"] > 0)


@dataclass(slots=True, eq=False)
class Lane:
    """Device state of a token on its way."""

    sequence: int
    position: int
    writer: int
    behind: int  # writer of the position before
    token: int
    loop: int = 0
    state: int = 0
    exits: int = 0  # times that it was read for good

    @property
    def running(self) -> bool:
        return not self.exits


Row = tuple[Slot, int, int, int]  # slot, lane, position, aux


class PagedWorker:
    """Executes stages strictly in the order given."""

    def __init__(self, config: SchedulerConfig, acceptance: float = 0.0) -> None:
        self.config = config
        self.acceptance = acceptance
        self.shared = not config.kv_layout.keeps_every_loop(config.r_max)
        self.cuts: dict[int, list[int]] = {}  # by seed, of prompts that have given their first token
        self.truth: dict[int, list[int]] = {}  # by seed, what drafts are to guess
        self.rebuilt = self.forced = 0  # sequences that went on with a forced token; tokens fed a second time
        self.slots = [Slot() for _ in range(config.max_num_seqs + 1)]
        self.lanes: list[Lane | None] = [None] * (lanes_of_a_slot(config.draft_lanes) * config.max_num_seqs + 1)
        self.tokens: list[tuple[int, int, int] | None] = [None] * len(self.lanes)  # sequence, position, token to start
        self.cells: dict[tuple[int, int], Cell] = {}
        self.host: dict[tuple[int, int], Cell] = {}  # copies of blocks in host memory
        self.restored = 0  # sequences that went on with K/V from there
        self.sequences = self.writers = 0
        self.adopted = 0  # tokens found in cached blocks
        self.last_step_id = 0
        self.core_rows = self.draft_rows = 0
        self.mixed_depths = 0  # most different loops in one core batch
        self.longest_chain = 0  # most rows of one sequence in one core batch

    def execute(self, stage: ScheduledStage) -> StageResult:
        header = stage.header
        assert header.step_id == self.last_step_id + 1, "step ids are consecutive"
        self.last_step_id = header.step_id
        self._move(stage)
        run = {
            Stage.PREFILL: self._prefill,
            Stage.PRELUDE: self._prelude,
            Stage.CORE: self._core,
            Stage.CODA: self._coda,
        }[Stage(header.stage)]
        if header.stage == Stage.PREFILL:
            tokens, said = run(stage)
        else:
            tokens, said = run(stage, self._check_rows(stage))
        return StageResult(
            header.step_id,
            0.0,
            1e-3,
            token_ids=np.asarray(tokens, dtype=np.int32).tobytes(),
            fired=bytes(said) if header.stage == Stage.CORE else b"",
            predicted_depths=bytes(said) if header.stage == Stage.PRELUDE else b"",
            logprobs=logprobs_of(tokens) if Variant.LOGPROBS in header.variant else b"",
        )

    def _check_rows(self, stage: ScheduledStage) -> list[Row]:
        """Frame invariants; returns the rows."""
        header, frame, config = stage.header, stage.frame, self.config
        width, lanes = config.max_num_seqs, lanes_of_a_slot(config.draft_lanes)
        assert frame.dtype == np.int32 and frame.flags.c_contiguous and frame.shape == (4, header.bucket)
        assert header.bucket in config.buckets and 1 <= header.rows <= min(
            header.bucket, width * (1 + config.draft_lanes)
        )
        assert not any(bucket >= header.rows for bucket in config.buckets if bucket < header.bucket)
        assert not frame[:, header.rows :].any(), "padding rows are all zero"
        assert stage.slot_params is None and header.n_slot_params == 0
        rows, used = [], set()
        for number, position, aux, lane in frame[[ROW_SLOT, ROW_POSITION, ROW_AUX, ROW_LANE], : header.rows].T.tolist():
            slot = self.slots[number]
            assert 1 <= number <= width and lane not in used and lane == lane_of(number, position, width, lanes)
            assert not slot.prefilling, f"slot {number} is in prefill, got {header.stage}"
            assert position < slot.params["first_output"] + config.max_model_len
            used.add(lane)
            rows.append((slot, lane, position, aux))
        return rows

    def _prefill(self, stage: ScheduledStage) -> tuple[list[int], list[int]]:
        header, config = stage.header, self.config
        frame = split_prefill_frame(stage.frame, header.rows, header.n_tokens, header.n_updates)
        assert header.bucket == 0 and 1 <= header.n_tokens <= config.max_num_batched_tokens
        slots = frame.slots.tolist()
        assert len(set(slots)) == len(slots) and int(frame.lengths.sum()) == header.n_tokens
        assert int(frame.lengths.min()) >= 1
        fresh = self._take_params(stage)
        for number, index, block in frame.updates.tolist():
            assert number in slots and 0 < block < config.num_blocks and index < config.max_blocks_per_seq
            self.slots[number].table[index] = block
        extra = header.extra or StageExtra()
        forced = forced_tokens(extra)
        depths = list(extra.depths) or [config.r_max] * header.n_tokens
        assert len(depths) == header.n_tokens and set(forced) <= set(slots)
        sampled, offset = [], 0
        hot = filtered = False
        for row, number in enumerate(slots):
            slot, start, length = self.slots[number], int(frame.starts[row]), int(frame.lengths[row])
            keeps = depths[offset : offset + length] == [0]
            if number in fresh:
                self.sequences += 1
                slot.sequence = self.sequences
                self._adopt(slot, start, keeps)
                self.restored += keeps
            else:
                assert slot.prefilling and slot.prefilled == start > 0, "chunks are consecutive"
            prompt_tokens = int(slot.params["first_output"])
            for index in range(offset, offset + length):
                position, token, depth = start + index - offset, int(frame.token_ids[index]), depths[index]
                if keeps:
                    self._adopt_token(slot, position)
                    continue
                assert position >= prompt_tokens or depth == config.r_max
                said = self._prefill_token(slot, position, token, depth)
            offset += length
            slot.prefilled, slot.prefilling = start + length, True
            slot.cuts.append(length)
            assert not self.shared or keeps or slot.prefilled <= prompt_tokens
            if number in forced:
                assert not frame.sample[row], "a forced token and a sampled one"
                assert keeps or slot.cuts == self.cuts.get(slot.seed, slot.cuts) or not self.shared
                self._goes_on_with(slot, number, forced[number])
                self.rebuilt += 1
            elif frame.sample[row]:
                assert slot.prefilled == prompt_tokens
                self._goes_on_with(slot, number, said)
                self.cuts[slot.seed] = slot.cuts
                sampled.append(said)
                hot = hot or slot.params["temperature"] > 0
                filtered = filtered or slot.filters
        assert bool(header.variant & Variant.SAMPLE) == hot
        assert bool(header.variant & Variant.FILTER) == filtered
        return sampled, []

    def _take_params(self, stage: ScheduledStage) -> set[int]:
        """Parameters come with the first chunk, and with no other; the slots that they are for."""
        params = None if stage.slot_params is None else slot_param_rows(stage.slot_params)
        given = [] if params is None else params["slot"].tolist()
        assert stage.header.n_slot_params == len(given) == len(set(given))
        for row in params if params is not None else ():
            number = int(row["slot"])
            self.slots[number] = Slot(params=row.copy())  # whatever was here is gone
            self.lanes[number :: self.config.max_num_seqs] = [None] * lanes_of_a_slot(self.config.draft_lanes)
        return set(given)

    def _adopt(self, slot: Slot, start: int, keeps: bool) -> None:
        """Whole blocks before ``start`` hold what other sequences' prefills wrote for these positions; or everything does
        that the sequence itself had left, copied back."""
        assert keeps or start == 0 or (self.config.prefix_caching and start % self.config.block_size == 0)
        for position in range(start):
            self._adopt_token(slot, position)
        self.adopted += 0 if keeps else start

    def _adopt_token(self, slot: Slot, position: int) -> None:
        cell = self._cell(slot, position)
        assert cell.position == position, "a cached block is not of this place"
        slot.adopted.append(cell.values())
        slot.writers.append(cell.writer)

    def _move(self, stage: ScheduledStage) -> None:
        """Copies between blocks and host memory, which come before the stage."""
        extra, size, config = stage.header.extra or StageExtra(), self.config.block_size, self.config
        for moves, source, target in ((extra.offloads, self.cells, self.host), (extra.restores, self.host, self.cells)):
            for one, other in np.frombuffer(moves, "<i4").reshape(-1, 2).tolist():
                block, host = (one, other) if source is self.cells else (other, one)
                assert 0 < block < config.num_blocks and 0 <= host < config.host_blocks
                for offset in range(size):
                    target.pop((other, offset), None)
                    if (cell := source.get((one, offset))) is not None:
                        target[other, offset] = deepcopy(cell)

    def _prefill_token(self, slot: Slot, position: int, token: int, depth: int) -> int:
        """All loops of a token whose depth is known; what it says."""
        config, layout = self.config, self.config.kv_layout
        cell, state, left = self._start(slot, position), 0, 0
        for loop in range(1, depth + 1):
            state = think(state, loop, [*self._read(slot, position, loop, -1), entry(token, position, loop)])
        if config.coda_layers:
            before = self._read_left(slot, position, -1)
            assert before is not None
            left = leave(state, before)
            cell.left = left, -1
        for loop in range(1, config.r_max + 1):
            cell.planes[layout.plane(loop)] = seen(layout, token, position, depth, loop), -1
        return sample(state, left, config.vocab_size)

    def _goes_on_with(self, slot: Slot, number: int, token: int) -> None:
        """Prefill is over."""
        slot.prefilling, slot.forced, slot.decoded = False, token, slot.prefilled - 1
        lane = lane_of(number, slot.prefilled, self.config.max_num_seqs, lanes_of_a_slot(self.config.draft_lanes))
        self.tokens[lane] = slot.sequence, slot.prefilled, token

    def _prelude(self, stage: ScheduledStage, rows: list[Row]) -> tuple[list[int], list[int]]:
        depths = []
        extra = stage.header.extra or StageExtra()
        may = StageExtra(forced_tokens=extra.forced_tokens, offloads=extra.offloads)
        assert extra == may, "a prelude has forced tokens and offloads, and nothing else"
        for number, token in forced_tokens(extra).items():
            assert self.shared and self.slots[number].forced == token, "decoding again gives the same tokens"
            self.forced += 1
        assert len({id(slot) for slot, *_ in rows}) == len(rows), "two tokens of a sequence in one prelude"
        for slot, lane, position, block in rows:
            assert position <= slot.decoded + 1, "positions are consecutive"
            index = position // self.config.block_size
            if block:
                assert block < self.config.num_blocks
                slot.table[index] = block
            assert index in slot.table, "no block for the token's position"
            waiting = self.tokens[lane]
            if not self.config.draft_lanes:  # else a final readout may have come before a draft was started from it
                self.tokens[lane] = None
            assert waiting is not None and waiting[:2] == (slot.sequence, position), "no token to start with"
            behind = slot.writers[position - 1]
            cell = self._start(slot, position)
            slot.decoded = position
            self.lanes[lane] = Lane(slot.sequence, position, cell.writer, behind, waiting[2])
            depths.append(predicted_depth(slot.seed, waiting[2], position))
        return [], depths

    def _core(self, stage: ScheduledStage, rows: list[Row]) -> tuple[list[int], list[int]]:
        fired, step = [], stage.header.step_id
        self.core_rows += len(rows)
        self.mixed_depths = max(self.mixed_depths, len({loop for *_, loop in rows}))
        of_slot = [id(slot) for slot, *_ in rows]
        self.longest_chain = max(self.longest_chain, *(of_slot.count(slot) for slot in of_slot))
        gated = False
        for slot, number, position, loop in rows:
            lane = self._lane(slot, number, position)
            assert lane.running and loop == lane.loop + 1 <= self.config.r_max
            own = entry(lane.token, position, loop)
            lane.loop = loop
            lane.state = think(lane.state, loop, [*self._read(slot, position, loop, step), own])
            self._cell(slot, position).planes[self.config.kv_layout.plane(loop)] = own, step
            gated = gated or Gate(int(slot.params["gate"])).decides_on_device
            fired.append(int(gate_fires(slot.seed, lane.token, position, loop)))
        assert bool(stage.header.variant & Variant.GATES) == gated
        return [], fired

    def _coda(self, stage: ScheduledStage, rows: list[Row]) -> tuple[list[int], list[int]]:
        sampled, step, config = [], stage.header.step_id, self.config
        hot = filtered = False
        for slot, number, position, aux in rows:
            lane = self._lane(slot, number, position)
            assert abs(aux) == lane.loop and (lane.running or (config.coda_layers and aux > 0))
            before = self._read_left(slot, position, step) if config.coda_layers else []
            if aux > 0:
                self._exit(slot, lane, step)
            if aux < 0 or before is None:
                token = self._draft(slot, position + 1, abs(aux))
            else:
                left = leave(lane.state, before) if config.coda_layers else 0
                token = sample(lane.state, left, config.vocab_size)
                self._cell(slot, position).left = left, step
            self._says(slot, number, position, token)
            sampled.append(token)
            hot = hot or slot.params["temperature"] > 0
            filtered = filtered or slot.filters
        assert bool(stage.header.variant & Variant.SAMPLE) == hot
        assert bool(stage.header.variant & Variant.FILTER) == filtered
        return sampled, []

    def _exit(self, slot: Slot, lane: Lane, step: int) -> None:
        """Fills the planes that deeper loops of later tokens read."""
        lane.exits += 1
        planes, layout = self._cell(slot, lane.position).planes, self.config.kv_layout
        for plane in layout.planes_to_fill(lane.loop, self.config.r_max):
            planes[plane] = planes[layout.plane(lane.loop)][0], step

    def _draft(self, slot: Slot, position: int, depth: int) -> int:
        """What a readout that is not final says."""
        self.draft_rows += 1
        row, index = slot.params, position - int(slot.params["first_output"])
        shaped = row["presence_penalty"] or row["frequency_penalty"] or row["adjustments"] or row["constrained"]
        assert not shaped and row["repetition_penalty"] in (0, 1), "a draft of a request whose logits are changed"
        truth = self.truth.get(slot.seed, [])
        token = truth[index] if index < len(truth) else None
        return draft(slot.seed, position, depth, token, self.acceptance, self.config.vocab_size)

    def _says(self, slot: Slot, number: int, position: int, token: int) -> None:
        """The token lies where the next position starts."""
        width, lanes = self.config.max_num_seqs, lanes_of_a_slot(self.config.draft_lanes)
        lane = lane_of((number - 1) % width + 1, position + 1, width, lanes)
        self.tokens[lane] = slot.sequence, position + 1, token
        slot.forced = token

    def _lane(self, slot: Slot, number: int, position: int) -> Lane:
        """A lane whose token is on its way: it, and the one before it, are those that its sequence goes by."""
        lane = self.lanes[number]
        assert lane is not None and (lane.sequence, lane.position) == (slot.sequence, position), "no such token"
        assert slot.writers[position - 1] == lane.behind and slot.writers[position] == lane.writer, "a dropped token"
        return lane

    def _start(self, slot: Slot, position: int) -> Cell:
        """A token begins at ``position``: whatever was at or behind it is gone."""
        self.writers += 1
        slot.writers[position:] = [self.writers]
        assert len(slot.writers) == position + 1
        cell = Cell(slot.sequence, position, self.writers)
        size = self.config.block_size
        self.cells[slot.table[position // size], position % size] = cell
        return cell

    def _read(self, slot: Slot, end: int, loop: int, step: int) -> list[int]:
        """What a token at ``end`` sees of those before it at a loop: their own entries, or still what it found there."""
        out, plane = [], self.config.kv_layout.plane(loop)
        for position in range(end):
            cell = self._cell(slot, position)
            if position < len(slot.adopted):
                value = cell.planes[plane][0]
                assert value == slot.adopted[position][0][plane], "a cached block was written while it was read"
            else:
                assert cell.owner == slot.sequence and cell.position == position, "read what another sequence wrote"
                assert cell.writer == slot.writers[position], "read what a dropped token wrote"
                assert plane in cell.planes, "read a plane that is not written"
                value, wrote = cell.planes[plane]
                assert wrote != step or step < 0, "read what another row of the stage writes"
            out.append(value)
        return out

    def _read_left(self, slot: Slot, end: int, step: int) -> list[int] | None:
        """What coda layers see of the tokens before ``end``; None unless all of it is final."""
        out = []
        for position in range(end):
            cell = self._cell(slot, position)
            if position < len(slot.adopted):
                assert cell.left and cell.left[0] == slot.adopted[position][1], "a cached block was written"
            if cell.left is None or (cell.left[1] == step and step > 0):
                return None
            out.append(cell.left[0])
        return out

    def _cell(self, slot: Slot, position: int) -> Cell:
        size = self.config.block_size
        return self.cells[slot.table[position // size], position % size]
