"""A worker without tensors that believes nothing: it keeps what every block and slot holds and checks each frame.

KV entries and work items are integers, hashed from what a row reads. A row that reads anything its own sequence did
not write raises at once, so slots and blocks handed on too early cannot go unnoticed. Tokens are a function of the
whole context, so a wrong token anywhere changes all later ones. ``plain_decode`` is the batch-1 reference: it has
neither blocks, slots, stages nor batches. With prefix caching a sequence may start behind whole blocks of others; what
it finds there must stay as it is for as long as it reads it, and a token of another prompt in it changes its output.

The cache remembers how deep each token went, as a real model's does, so a sequence that is rebuilt with one depth wrong
says something else from there on. What a rebuilt sequence must be told is checked against what this worker gave it: no
token of its own through prefill where loops share a plane, and its prompt cut where it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from depthbatch.common.frames import ROW_AUX, ROW_POSITION, ROW_SLOT, Stage, slot_param_rows, split_prefill_frame
from depthbatch.common.gates import Gate
from depthbatch.common.messages import RequestParams, StageExtra, StageResult, Variant
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.stage_batch import ScheduledStage


def entry(token: int, position: int, depth: int) -> int:
    """What the cache holds for a token."""
    return hash((token, position, depth))


def sample(context: Sequence[int], depth: int, vocab_size: int) -> int:
    """The next token after a context of cache entries."""
    return (hash((tuple(context), depth)) >> 7) % vocab_size


def gate_fires(seed: int, position: int, loop: int) -> bool:
    """The fake gate's decision at a loop."""
    return hash((seed, position, loop, 17)) % 3 == 0


def predicted_depth(seed: int, position: int) -> int:
    """The fake pre-loop gate."""
    return 1 + hash((seed, position, 23)) % 6


@dataclass(frozen=True)
class Decoded:
    """What a request must give when nothing interferes."""

    tokens: list[int]
    depths: list[int]
    finish_reason: str


def exit_depth(params: RequestParams, position: int, index: int) -> int:
    """Depth of decode token ``index`` at ``position``, straight from the agreed semantics."""
    gate = params.gate
    if gate is Gate.REPLAY:
        recorded = params.exit_depths
        return min(recorded[index], params.max_loops) if index < len(recorded) else params.max_loops
    if gate is Gate.PRELOOP:
        return max(params.min_loops, min(predicted_depth(params.seed, position), params.max_loops))
    # The fake model has a convergence test, which OWN and DELAYED are then too: only LOOKAHEAD is cumulative.
    if gate.decides_on_device and (gate is not Gate.LOOKAHEAD or params.exit_threshold < 1.0):
        for loop in range(1, params.max_loops):
            if loop + gate.delay >= params.min_loops and gate_fires(params.seed, position, loop):
                return min(loop + gate.delay, params.max_loops)
    return params.max_loops


def plain_decode(prompt: Sequence[int], params: RequestParams, config: SchedulerConfig) -> Decoded:
    """One sequence, one token at a time."""
    context = [entry(token, position, config.r_max) for position, token in enumerate(prompt)]
    tokens, depths = [sample(context, config.r_max, config.vocab_size)], [config.r_max]
    limit = min(params.max_tokens, config.max_model_len - len(prompt))
    while True:
        if tokens[-1] in params.stop_token_ids and len(tokens) > params.min_tokens:
            return Decoded(tokens, depths, "stop")
        if len(tokens) >= limit:
            return Decoded(tokens, depths, "length")
        position = len(prompt) + len(tokens) - 1
        depth = exit_depth(params, position, len(tokens) - 1)
        context.append(entry(tokens[-1], position, depth))
        tokens.append(sample(context, depth, config.vocab_size))
        depths.append(depth)


def forced_tokens(extra: StageExtra) -> dict[int, int]:
    """By slot."""
    pairs = np.frombuffer(extra.forced_tokens, "<i4").reshape(-1, 2).tolist()
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


class Cell:
    """One position of one block: who wrote it, for which position, and what."""

    __slots__ = ("owner", "position", "value")

    def __init__(self, owner: int, position: int, value: int) -> None:
        self.owner, self.position, self.value = owner, position, value


@dataclass
class Slot:
    """Device state of a slot."""

    sequence: int = 0  # incarnation: a new one with every prefill from 0
    expects: tuple[Stage, ...] = ()
    prefilled: int = 0
    token: int = -1
    position: int = -1
    loop: int = 0
    context: list[int] = field(default_factory=list)
    table: dict[int, int] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)  # tokens of each chunk of its prefill
    adopted: list[int] = field(default_factory=list)  # entries of the cached blocks it started with
    params: np.ndarray | None = None


class PagedWorker:
    """Executes stages strictly in the order given."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.shared = not config.kv_layout.keeps_every_loop(config.r_max)
        self.cuts: dict[int, list[int]] = {}  # by seed, of prompts that have given their first token
        self.rebuilt = self.forced = 0  # sequences that went on with a forced token; tokens fed a second time
        self.slots = [Slot() for _ in range(config.max_num_seqs + 1)]
        self.cells: dict[tuple[int, int], Cell] = {}
        self.sequences = 0
        self.adopted = 0  # tokens found in cached blocks
        self.last_step_id = 0
        self.core_rows = 0
        self.mixed_depths = 0  # most different loops in one core batch

    def execute(self, stage: ScheduledStage) -> StageResult:
        header = stage.header
        assert header.step_id == self.last_step_id + 1, "step ids are consecutive"
        self.last_step_id = header.step_id
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
        )

    def _check_rows(self, stage: ScheduledStage) -> list[tuple[Slot, int, int]]:
        """Frame invariants; returns (slot, position, aux) a row."""
        header, frame, config = stage.header, stage.frame, self.config
        assert frame.dtype == np.int32 and frame.flags.c_contiguous and frame.shape == (4, header.bucket)
        assert header.bucket in config.buckets and 1 <= header.rows <= min(header.bucket, config.max_num_seqs)
        assert not any(bucket >= header.rows for bucket in config.buckets if bucket < header.bucket)
        assert not frame[:, header.rows :].any(), "padding rows are all zero"
        assert stage.slot_params is None and header.n_slot_params == 0
        slots = frame[ROW_SLOT, : header.rows].tolist()
        assert len(set(slots)) == len(slots) and min(slots) >= 1 and max(slots) <= config.max_num_seqs
        rows = []
        for index, number in enumerate(slots):
            slot = self.slots[number]
            assert Stage(header.stage) in slot.expects, f"slot {number} expects {slot.expects}, got {header.stage}"
            rows.append((slot, int(frame[ROW_POSITION, index]), int(frame[ROW_AUX, index])))
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
            if number in fresh:
                self.sequences += 1
                slot.sequence = self.sequences
                self._adopt(slot, start)
            else:
                assert Stage.PREFILL in slot.expects and slot.prefilled == start > 0, "chunks are consecutive"
            prompt_tokens = int(slot.params["first_output"])
            for index in range(offset, offset + length):
                position, token, depth = start + index - offset, int(frame.token_ids[index]), depths[index]
                assert position >= prompt_tokens or depth == config.r_max
                self._write(slot, position, entry(token, position, depth))
            offset += length
            slot.prefilled = slot.position = start + length
            slot.cuts.append(length)
            slot.expects = (Stage.PREFILL,)
            assert not self.shared or slot.prefilled <= prompt_tokens
            if number in forced:
                assert not frame.sample[row], "a forced token and a sampled one"
                assert slot.cuts == self.cuts.get(self._seed(slot), slot.cuts) or not self.shared
                slot.token, slot.expects = forced[number], (Stage.PRELUDE,)
                self.rebuilt += 1
            elif frame.sample[row]:
                assert slot.prefilled == prompt_tokens
                slot.token = sample(self._read(slot, slot.prefilled - 1), config.r_max, config.vocab_size)
                slot.expects = (Stage.PRELUDE,)
                self.cuts[self._seed(slot)] = slot.cuts
                sampled.append(slot.token)
                hot = hot or slot.params["temperature"] > 0
                filtered = filtered or self._filters(slot)
        assert bool(header.variant & Variant.SAMPLE) == hot
        assert bool(header.variant & Variant.FILTER) == filtered
        return sampled, []

    def _take_params(self, stage: ScheduledStage) -> set[int]:
        """Parameters come with the first chunk, and with no other; the slots that they are for."""
        params = None if stage.slot_params is None else slot_param_rows(stage.slot_params)
        given = [] if params is None else params["slot"].tolist()
        assert stage.header.n_slot_params == len(given) == len(set(given))
        for row in params if params is not None else ():
            self.slots[int(row["slot"])] = Slot(params=row.copy())  # whatever was here is gone
        return set(given)

    def _adopt(self, slot: Slot, start: int) -> None:
        """Whole blocks before ``start`` hold what other sequences' prefills wrote for these positions."""
        assert start == 0 or (self.config.prefix_caching and start % self.config.block_size == 0)
        for position in range(start):
            cell = self._cell(slot, position)
            assert cell.position == position, "a cached block is not of this place"
            slot.adopted.append(cell.value)
        self.adopted += start

    def _prelude(self, stage: ScheduledStage, rows: list[tuple[Slot, int, int]]) -> tuple[list[int], list[int]]:
        depths = []
        extra = stage.header.extra or StageExtra()
        assert extra == StageExtra(forced_tokens=extra.forced_tokens), "a prelude has forced tokens and nothing else"
        for number, token in forced_tokens(extra).items():
            assert self.shared and self.slots[number].token == token, "decoding again gives the same tokens"
            self.forced += 1
        for slot, position, block in rows:
            assert position == slot.position, "positions are consecutive"
            index = position // self.config.block_size
            if block:
                assert block < self.config.num_blocks
                slot.table[index] = block
            assert index in slot.table, "no block for the token's position"
            slot.loop, slot.expects = 0, (Stage.CORE,)
            depths.append(predicted_depth(self._seed(slot), position))
        return [], depths

    def _core(self, stage: ScheduledStage, rows: list[tuple[Slot, int, int]]) -> tuple[list[int], list[int]]:
        fired = []
        self.core_rows += len(rows)
        self.mixed_depths = max(self.mixed_depths, len({loop for _, _, loop in rows}))
        gated = False
        for slot, position, loop in rows:
            assert position == slot.position and loop == slot.loop + 1 <= self.config.r_max
            slot.loop = loop
            self._write(slot, position, entry(slot.token, position, loop))
            slot.context = self._read(slot, position)
            slot.expects = (Stage.CORE, Stage.CODA)
            gate = Gate(int(slot.params["gate"]))
            gated = gated or gate.decides_on_device
            fired.append(int(gate_fires(self._seed(slot), position, loop)))
        assert bool(stage.header.variant & Variant.GATES) == gated
        return [], fired

    def _coda(self, stage: ScheduledStage, rows: list[tuple[Slot, int, int]]) -> tuple[list[int], list[int]]:
        sampled = []
        hot = filtered = False
        for slot, position, depth in rows:
            assert position == slot.position and depth == slot.loop
            slot.token = sample(slot.context, depth, self.config.vocab_size)
            slot.position = position + 1
            slot.expects = (Stage.PRELUDE,)
            sampled.append(slot.token)
            hot = hot or slot.params["temperature"] > 0
            filtered = filtered or self._filters(slot)
        assert bool(stage.header.variant & Variant.SAMPLE) == hot
        assert bool(stage.header.variant & Variant.FILTER) == filtered
        return sampled, []

    def _write(self, slot: Slot, position: int, value: int) -> None:
        size = self.config.block_size
        self.cells[slot.table[position // size], position % size] = Cell(slot.sequence, position, value)

    def _read(self, slot: Slot, last: int) -> list[int]:
        """Entries of positions 0 .. last; every one must be this sequence's own, or still what it found there."""
        out = []
        for position in range(last + 1):
            cell = self._cell(slot, position)
            if position < len(slot.adopted):
                assert cell.value == slot.adopted[position], "a cached block was written while it was read"
            else:
                assert cell.owner == slot.sequence and cell.position == position, "read what another sequence wrote"
            out.append(cell.value)
        return out

    def _cell(self, slot: Slot, position: int) -> Cell:
        size = self.config.block_size
        return self.cells[slot.table[position // size], position % size]

    @staticmethod
    def _seed(slot: Slot) -> int:
        return int(slot.params["seed_low"])

    @staticmethod
    def _filters(slot: Slot) -> bool:
        row = slot.params
        return bool((row["top_k"] > 0 or row["top_p"] < 1 or row["min_p"] > 0) and row["temperature"] > 0)
