"""Who gets a slot and blocks, and which prompt tokens the next prefill runs (scheduling.md, CanPrefill).

Prompts are cut where a batch is full; those whose K/V depend on where are cut at fixed places (rebuild.py).
"""

import numpy as np

from depthbatch.common.frames import Int32Array, lanes_of_a_slot
from depthbatch.scheduler.config import DraftLimit, SchedulerConfig
from depthbatch.scheduler.kv_blocks import BlockPool, PrefixCache, PrefixCachingPool, SlotPool
from depthbatch.scheduler.kv_events import KvEvents
from depthbatch.scheduler.lanes import Chains
from depthbatch.scheduler.offload import Offload
from depthbatch.scheduler.passing import WINDOW, tokens_to_wait
from depthbatch.scheduler.rebuild import next_cut
from depthbatch.scheduler.requests import PrefillLimit, Request, State, WaitingQueue
from depthbatch.scheduler.rows import DECODE, RowState, SlotArray
from depthbatch.scheduler.stage_batch import PrefillChunk

_NO_BLOCKS = np.zeros(0, np.int32)
_NO_LANES = np.zeros(0, np.intp)


class Admission:
    """Slots, blocks, the waiting queue and the prompt that is partly prefilled.

    With preemption off a request gets the blocks of its whole life at admission, so decode never lacks one. With
    recompute it gets those of its prompt and one more whenever it needs it.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._reserve_all = config.preemption == "off"
        self._headroom = int(np.ceil(config.kv_headroom * config.usable_blocks))
        self.rows = RowState(config.max_num_seqs, config.max_blocks_per_seq, lanes_of_a_slot(config.draft_lanes))
        self.chains = Chains(config, self.rows) if config.draft_lanes else None
        self.blocks = BlockPool(config.num_blocks)
        self.prefixes: PrefixCache | None = None
        self.kv_events = KvEvents(config.block_size) if config.kv_events else None
        if config.prefix_caching:
            self.blocks = pool = PrefixCachingPool(config.num_blocks, self.kv_events)
            self.prefixes = PrefixCache(pool, config)
        self.offload = Offload(config) if config.host_blocks else None
        self.slots = SlotPool(config.max_num_seqs)
        self.waiting = WaitingQueue()
        self.partial: Request | None = None  # the one prompt that is partly prefilled
        self._admissions = 0

    @property
    def num_active(self) -> int:
        return self.slots.total - self.slots.free

    def can_prefill(self, min_free_slots: int | None = None) -> bool:
        """Independent of how many requests wait. ``min_free_slots``: S, if not the configured one."""
        if self.partial is not None:
            return True
        needed = self._config.min_free_slots if min_free_slots is None else min_free_slots
        return self.slots.free >= needed and self._next() is not None

    def next_prompt(self) -> Request | None:
        """What prefill would go on with: the prompt that is partly prefilled, who is next, or the head of the queue."""
        return self.partial or self._next() or self.waiting.head()

    def _next(self) -> Request | None:
        """The waiting request that is next and has its blocks: the head, or who passes it."""
        head = self.waiting.head()
        if head is None:
            return None
        missing = self._blocks_missing(head)
        if missing <= 0:
            return head
        if head.blocked_since is None:
            head.blocked_since = self._admissions
        tokens = tokens_to_wait(head, missing, self.rows.request, self.rows.num_blocks)
        if not tokens:
            return None
        for request in self.waiting.behind_head(WINDOW):
            if request.limit - len(request.output) <= tokens and self._blocks_missing(request) <= 0:
                return request
        return None

    def pack(self, limit: PrefillLimit | None = None) -> list[PrefillChunk]:
        """Up to M prompt tokens in arrival order, or up to a policy's limit; the caller has checked can_prefill."""
        budget, prompts = self._config.max_num_batched_tokens, self.slots.total
        if limit is not None:
            budget, prompts = self._first_chunk(limit.tokens), limit.prompts
        chunks: list[PrefillChunk] = []
        if self.partial is not None:
            chunks.append(self._chunk(self.partial, budget, _NO_BLOCKS))
            budget -= chunks[-1].length
        # A chunk's blocks can be shared by the next: of every layer and loop, a stage writes all K/V before it reads any.
        while budget and prompts and self.partial is None and self.slots.free:
            request = self._next()
            if request is None or self._cut(request, 0, budget) > budget:
                break
            chunks.append(self._chunk(request, budget, self._admit(request)))
            budget -= chunks[-1].length
            prompts -= 1
        return chunks

    def _first_chunk(self, tokens: int) -> int:
        """A limit that lets the first chunk through where that cannot be shorter."""
        request = self.next_prompt()
        start = 0 if self.partial is None else self.partial.computed
        return tokens if request is None else max(tokens, self._cut(request, start, tokens))

    def _cut(self, request: Request, start: int, budget: int) -> int:
        return next_cut(request, start, budget, self._config.max_num_batched_tokens)

    def blocks_missing(self) -> bool:
        """True when the rows of Q_D need more blocks than there are."""
        needed = self.rows.count[DECODE]
        if needed <= self.blocks.free:
            return False
        slots = self.rows.in_phase(DECODE)
        return int(np.count_nonzero(self._at_border(slots))) > self.blocks.free

    def tails(self, limit: DraftLimit | None) -> SlotArray:
        """Lanes that a coda may read for a draft. Blocks are for them only beyond one for each sequence."""
        if self.chains is None:
            return _NO_LANES
        spare = 0 if self._reserve_all else self.blocks.free - self.num_active
        return self.chains.within_blocks(self.chains.tails(limit), spare)

    def grow(self, slots: SlotArray) -> Int32Array | None:
        """One block for every row whose token starts one: [rows], 0 = none. None when no row does."""
        border = self._at_border(slots)
        growing = slots[border]
        if not growing.size:
            return None
        taken = self.blocks.take(growing.size)
        self.rows.add_blocks(growing, taken)
        new_blocks = np.zeros(slots.size, np.int32)
        new_blocks[border] = taken
        return new_blocks

    def forget_memory(self) -> None:
        """The worker's memory is gone, and what it held in the host's."""
        if self.prefixes is not None:
            self.prefixes.pool.clear()
        if self.offload is not None:
            self.offload.forget()

    def release(self, request: Request) -> None:
        """Slot and blocks go back."""
        if self.chains is not None:
            self.chains.end(request.slot)
        if self.prefixes is not None and self.partial is not request:
            self.prefixes.publish_output(request, self.rows.table[request.slot])
        self.blocks.give(self.rows.release(request.slot))
        self.slots.give(request.slot)
        request.slot = 0
        request.restored = False
        request.prefill_tokens = None
        if self.partial is request:
            self.partial = None

    def _at_border(self, slots: SlotArray) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Rows whose token lies beyond the blocks they hold."""
        rows = self.rows
        return rows.position[slots] >= rows.num_blocks[rows.slots_of(slots)] * self._config.block_size

    def _blocks_needed(self, request: Request) -> int:
        tokens = request.prompt.size + request.limit - 1 if self._reserve_all else request.num_tokens
        return self._config.blocks_for(tokens)

    def _blocks_missing(self, request: Request) -> int:
        """Blocks that are not free of those for the prompt, headroom, and one block of growth for each running sequence
        (two for a request that comes back: it must get further than the last time). An empty engine admits whatever fits."""
        needed, free = self._blocks_needed(request), self.blocks.free
        if active := self.num_active:
            growth = 0 if self._reserve_all else active * (2 if request.preempted else 1)
            needed += max(self._headroom, growth)
        if needed > free and self.prefixes is not None and not request.keeps_kv:
            found = self.prefixes.find(request)
            needed -= len(found) - self.prefixes.pool.num_idle(found)
        return needed - free

    def _admit(self, request: Request) -> Int32Array:
        self.waiting.remove(request)
        if request.is_suspect:
            self.waiting.alone = request
        keeps = request.host_blocks is not None
        shared = _NO_BLOCKS if self.prefixes is None or keeps else self.prefixes.share(request)
        blocks = np.concatenate([shared, self.blocks.take(self._blocks_needed(request) - shared.size)])
        if self.offload is not None and keeps:
            self.offload.bring_back(request, blocks[: self._config.blocks_for(request.length)])
        self._admissions += 1
        request.admitted, request.blocked_since = self._admissions, None
        request.slot = self.slots.take()
        request.state = State.ACTIVE
        request.computed = request.length - 1 if keeps else shared.size * self._config.block_size
        request.cached_tokens = request.computed
        request.prefill_tokens = request.tokens_to_prefill()
        if not request.output:
            request.cuts.clear()  # nothing has come of them
        self.rows.admit(request.slot, request, blocks)
        return blocks

    def _chunk(self, request: Request, budget: int, new_blocks: Int32Array) -> PrefillChunk:
        start, total = request.computed, request.length
        length = self._cut(request, start, budget)
        request.computed = start + length
        if request.forced_decode and sum(request.cuts) == start < request.prompt.size:
            request.cuts.append(length)
        is_last = request.computed == total
        self.partial = None if is_last else request
        if self.prefixes is not None:
            self.prefixes.publish(request, start, self.rows.table[request.slot])
        return PrefillChunk(request, start, length, is_last, new_blocks)
