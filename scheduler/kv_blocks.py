"""KV blocks and slots: who may use which, and which blocks hold the prefixes of prompts.

Frees are in stream order: the worker runs stages in the order sent, so a block or slot can be handed to a later stage
as soon as the last stage that touches it has been dispatched.

Prefix caching: full blocks of prompts are shared between sequences and kept after their last owner until memory is needed.
A block is known by a hash of every token up to its end, so equal keys mean equal prefixes. Only what prefill wrote is
shared: a prompt's blocks are never written again (decode writes behind the prompt), so nothing is copied on write. Exact
under layouts that keep a plane a loop; the configuration refuses the others, under which a chunk sees earlier chunks
otherwise than itself. A block can be shared as soon as the chunk that writes it is in a prefill, by later chunks of the
same one, too.

By option outputs are shared as well (multi-turn conversations). Their K/V are those of the depth that each token went,
not of prefill's full depth, so that answers may differ from those of a prompt that was prefilled whole.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from depthbatch.common.frames import Int32Array
from depthbatch.common.splitmix64 import ALL_BITS
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.kv_events import KvEvents
from depthbatch.scheduler.requests import Request

Key = bytes


class BlockPool:
    """Logical KV blocks 1 .. num_blocks - 1; block 0 is the dummy."""

    def __init__(self, num_blocks: int) -> None:
        self.total = num_blocks - 1
        self._stack = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)  # [:height] is free, the top is next
        self._height = self.total

    @property
    def free(self) -> int:
        return self._height

    def take(self, count: int) -> Int32Array:
        """``count`` blocks; the caller has checked ``free``."""
        if count > self.free:
            raise ValueError(f"{count} blocks asked, {self.free} free")
        self._height -= count
        return self._stack[self._height : self._height + count][::-1].copy()

    def give(self, blocks: Int32Array) -> None:
        """Takes blocks back."""
        self._stack[self._height : self._height + blocks.size] = blocks
        self._height += blocks.size

    def free_blocks(self) -> Int32Array:
        """The free blocks, as a view."""
        return self._stack[: self._height]

    def owners(self, blocks: Int32Array) -> Int32Array:
        """How many sequences hold each of these held blocks."""
        return np.ones(blocks.size, np.int32)


class HostPool(BlockPool):
    """Blocks 0 .. count - 1 of host memory."""

    def __init__(self, count: int) -> None:
        super().__init__(count + 1)
        self._stack -= 1


class SlotPool:
    """Device slots 1 .. W; slot 0 is the dummy."""

    def __init__(self, width: int) -> None:
        self.total = width
        self._stack = list(range(width, 0, -1))

    @property
    def free(self) -> int:
        return len(self._stack)

    def take(self) -> int:
        return self._stack.pop()

    def give(self, slot: int) -> None:
        self._stack.append(slot)

    def free_slots(self) -> list[int]:
        return list(self._stack)


def prefix_keys(prompt: Int32Array, block_size: int, salt: bytes = b"") -> tuple[Key, ...]:
    """One key a full block of the prompt, int32 [n], each covering all tokens up to the block's end.

    ``salt``: what else the K/V of a prefix depends on.
    """
    data, size = prompt.astype("<i4", copy=False).tobytes(), 4 * block_size
    keys, last = [], salt
    for end in range(size, len(data) + 1, size):
        last = blake2b(last + data[end - size : end], digest_size=16).digest()
        keys.append(last)
    return tuple(keys)


class PrefixCachingPool(BlockPool):
    """A BlockPool whose blocks may have several owners, and whose cached blocks stay until they are needed.

    ``free`` counts what can be taken: blocks that hold nothing, and cached ones without an owner (idle).
    """

    def __init__(self, num_blocks: int, events: KvEvents | None = None) -> None:
        """``events`` is told what goes; whoever publishes tells it what comes."""
        super().__init__(num_blocks)
        self.events = events
        self._owners = np.zeros(num_blocks, np.int32)
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, no owner; least recently used first

    @property
    def free(self) -> int:
        return self._height + len(self._idle)

    def lookup(self, keys: Iterable[Key]) -> list[int]:
        """The cached blocks of the longest known prefix; they stay whose they are."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these cached blocks have no owner: sharing them takes them out of ``free``."""
        return sum(block in self._idle for block in blocks)

    def share(self, blocks: list[int]) -> Int32Array:
        """One more owner for each of these cached blocks; returns them as an array."""
        shared = np.array(blocks, np.int32)
        for block in blocks:
            self._idle.pop(block, None)
        self._owners[shared] += 1
        return shared

    def publish(self, keys: Iterable[Key], blocks: Iterable[int]) -> list[int]:
        """These owned blocks now hold these prefixes. A prefix that is known already keeps the block it has. Returns which
        of them are new."""
        new: list[int] = []
        for number, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            if key not in self._block_of and block not in self._key_of:
                self._block_of[key] = block
                self._key_of[block] = key
                new.append(number)
        return new

    def take(self, count: int) -> Int32Array:
        if count > self.free:
            raise ValueError(f"{count} blocks asked, {self.free} free")
        evicted = [self._idle.popitem(last=False)[0] for _ in range(count - self._height)]
        gone = [self._key_of.pop(block) for block in evicted]
        for key in gone:
            del self._block_of[key]
        if self.events is not None:
            self.events.removed(gone)
        super().give(np.array(evicted, np.int32))
        blocks = super().take(count)
        self._owners[blocks] = 1
        return blocks

    def give(self, blocks: Int32Array) -> None:
        self._owners[blocks] -= 1
        released = blocks[self._owners[blocks] == 0]
        cached = np.array([block in self._key_of for block in released.tolist()], np.bool_)
        super().give(released[~cached])
        # Last block first: a prefix loses its end before its beginning, without which the end is of no use.
        self._idle.update(dict.fromkeys(released[cached][::-1].tolist()))

    def clear(self) -> None:
        """The memory is gone: nothing is cached any more. Owners stay."""
        super().give(np.fromiter(self._idle, np.int32, len(self._idle)))
        self._idle.clear()
        self._block_of.clear()
        self._key_of.clear()
        if self.events is not None:
            self.events.cleared()

    def free_blocks(self) -> Int32Array:
        return np.concatenate([super().free_blocks(), np.fromiter(self._idle, np.int32, len(self._idle))])

    def owners(self, blocks: Int32Array) -> Int32Array:
        """How many sequences hold each block."""
        return self._owners[blocks]


class PrefixCache:
    """What requests find in the pool and leave there; counts it as vLLM does."""

    def __init__(self, pool: PrefixCachingPool, config: SchedulerConfig) -> None:
        self.pool = pool
        self._block_size = config.block_size
        self._seeded = config.seeded_state
        self._generated = config.generated_prefixes
        self._fills = config.kv_layout.allows_early_exit  # planes that a token did not reach hold its last one
        self._r_max = config.r_max
        self.queries = 0  # prompt tokens looked up
        self.hits = 0  # and found

    def find(self, request: Request) -> list[int]:
        """Cached blocks that the request's prefill can leave out; at least one token is left to it.

        None for requests whose prompt must run for more than its K/V: to have logprobs, or to be counted by a penalty.
        """
        if request.params.prompt_logprobs or request.params.changes_logits:
            return []
        return self.pool.lookup(self._keys(request)[: (request.length - 1) // self._block_size])

    def share(self, request: Request) -> Int32Array:
        """Makes the request an owner of what it finds; [n] blocks."""
        found = self.find(request)
        self.queries += request.prompt.size
        self.hits += len(found) * self._block_size
        return self.pool.share(found)

    def publish(self, request: Request, start: int, table: Int32Array) -> None:
        """A prefill that runs the request's tokens from ``start`` has been put together; ``table``: its slot's blocks."""
        end = min(request.computed, request.prompt.size) // self._block_size
        if end > start // self._block_size:
            self._publish(request, self._keys(request)[:end], request.prompt, table)

    def publish_output(self, request: Request, table: Int32Array) -> None:
        """A request leaves its slot: by option, the blocks that its output fills. The K/V of its last known token, and of
        those that are not known yet, may be incomplete."""
        if not self._generated or not (self._fills or request.params.max_loops == self._r_max):
            return
        if (request.num_tokens - 1) // self._block_size > request.prompt.size // self._block_size:
            known = np.concatenate([request.prompt, np.asarray(request.output[:-1], np.int32)])
            self._publish(request, prefix_keys(known, self._block_size, self._salt(request)), known, table)

    def _publish(self, request: Request, keys: Sequence[Key], known: Int32Array, table: Int32Array) -> None:
        """The first blocks of a slot's ``table`` hold the prefixes with these keys. All of them are published, for one that
        another sequence had cached may have been evicted since, without which those behind it are not found."""
        new = self.pool.publish(keys, table[: len(keys)].tolist())
        if self.pool.events is not None:
            self.pool.events.stored(keys, known, self._salt(request), new)

    def _keys(self, request: Request) -> tuple[Key, ...]:
        if request.prefix_keys is None:
            request.prefix_keys = prefix_keys(request.prompt, self._block_size, self._salt(request))
        return request.prefix_keys

    def _salt(self, request: Request) -> bytes:
        """What the K/V of a prefix depend on beside its tokens, and with whom they may be shared."""
        seed = (request.params.seed & ALL_BITS).to_bytes(8, "little") if self._seeded else b""
        salt = request.params.cache_salt.encode()
        return blake2b(seed + salt, digest_size=16).digest() if salt else seed
