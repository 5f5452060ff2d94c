"""What happens to cached prefixes, told to routers in vLLM's format: msgpack batches on a PUB socket, numbered, and
repeated on request.

A message is ``[topic, sequence number, batch]``, the number in 8 big-endian bytes; a batch is the array ``[time in s,
[event, ...], rank]``, and an event a map with its name as ``type`` (vllm/distributed/kv_events.py). A block goes by the lower
64 bits of the hash of all tokens up to its end.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import zmq

from depthbatch.common.endpoints import is_ipv6
from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import Int32Array
from depthbatch.common.kv_events import KvEventsConfig, binds

RANK = 0
END = (-1).to_bytes(8, "big", signed=True)  # the number of the message after the last one that is repeated
MEDIUM = "GPU"  # the only kind of memory with K/V here, whatever the device
BITS = (1 << 64) - 1


class _Event(msgspec.Struct, frozen=True, tag=True):
    """Base of all."""


class BlockStored(_Event, frozen=True):
    block_hashes: tuple[int, ...]  # of blocks that follow each other
    parent_block_hash: int | None  # of the block before them
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: None = None
    medium: str = MEDIUM
    lora_name: None = None
    extra_keys: tuple[tuple[str, ...] | None, ...] | None = None  # a block: what its hash depends on beside tokens


class BlockRemoved(_Event, frozen=True):
    block_hashes: tuple[int, ...]
    medium: str = MEDIUM


class AllBlocksCleared(_Event, frozen=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float  # s since 1970
    events: tuple[Event, ...]
    data_parallel_rank: int = RANK


def block_hash(key: bytes) -> int:
    return int.from_bytes(key, "big") & BITS


class KvEvents:
    """Collects what the prefix cache does until somebody takes it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[Event] = []

    def stored(self, keys: Sequence[bytes], prompt: Int32Array, salt: bytes, numbers: Iterable[int]) -> None:
        """Blocks ``numbers``, ascending, of a prompt with these keys are cached from now on. ``salt``: what its keys depend
        on beside its tokens."""
        run: list[int] = []
        for number in numbers:
            if run and number != run[-1] + 1:
                self._stored(keys, prompt, salt, run)
                run = []
            run.append(number)
        if run:
            self._stored(keys, prompt, salt, run)

    def _stored(self, keys: Sequence[bytes], prompt: Int32Array, salt: bytes, run: list[int]) -> None:
        first, end, size = run[0], run[-1] + 1, self._block_size
        extra = ((salt.hex(),), *[None] * (len(run) - 1)) if salt and not first else None
        self._events.append(
            BlockStored(
                tuple(map(block_hash, keys[first:end])),
                block_hash(keys[first - 1]) if first else None,
                tuple(prompt[first * size : end * size].tolist()),
                size,
                extra_keys=extra,
            )
        )

    def removed(self, keys: Iterable[bytes]) -> None:
        """Their blocks are given to others."""
        if hashes := tuple(map(block_hash, keys)):
            self._events.append(BlockRemoved(hashes))

    def cleared(self) -> None:
        """The memory is gone."""
        self._events.append(AllBlocksCleared())

    def take(self) -> tuple[Event, ...]:
        """In order; each once."""
        events, self._events = tuple(self._events), []
        return events


class KvEventPublisher:
    """The sockets. Never waits for a subscriber: one that is too slow loses batches, which their numbers show."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: KvEventsConfig) -> None:
        """Raises ConfigError where an address cannot be had."""
        self._topic = config.topic.encode()
        self._encode = msgspec.msgpack.Encoder().encode
        self._number = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps if config.replay_endpoint else 0)
        self._socket = context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, config.hwm)
        self.replays: zmq.Socket[bytes] | None = None
        try:
            self._open(context, config)
        except ConfigError:
            self.close()
            raise

    def _open(self, context: zmq.Context[zmq.Socket[bytes]], config: KvEventsConfig) -> None:
        _open(self._socket, config.endpoint, binds(config.endpoint))
        if config.replay_endpoint:
            self.replays = context.socket(zmq.ROUTER)
            # A client gets all that is kept, however late it reads. ZeroMQ may take up to half of its mark for unread that
            # is read; whoever asks on and on without reading is dropped at it.
            self.replays.setsockopt(zmq.SNDHWM, 2 * (config.buffer_steps + 1))
            _open(self.replays, config.replay_endpoint, True)

    def publish(self, events: tuple[Event, ...]) -> None:
        if not events:
            return
        payload = self._encode(Batch(time.time(), events))
        self._sent.append((self._number, payload))
        self._socket.send_multipart([self._topic, self._number.to_bytes(8, "big"), payload], zmq.NOBLOCK)
        self._number += 1

    def answer_replays(self) -> None:
        """Whoever has sent a number of 8 bytes gets every batch that is kept from there on, then END, and may ask again
        once it has read them. Other messages are no requests."""
        while self.replays is not None:
            try:
                client, *rest = self.replays.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(rest) != 2 or len(rest[1]) != 8:
                continue
            first = int.from_bytes(rest[1], "big")
            for number, payload in [*self._sent, (-1, b"")]:
                if number < 0 or number >= first:
                    self.replays.send_multipart(
                        [client, b"", number.to_bytes(8, "big", signed=True), payload], zmq.NOBLOCK
                    )

    def close(self) -> None:
        self._socket.close(0)
        if self.replays is not None:
            self.replays.close(0)


def _open(socket: zmq.Socket[bytes], address: str, bind: bool) -> None:
    socket.setsockopt(zmq.IPV6, int(is_ipv6(address)))
    try:
        if bind:
            socket.bind(address)
        else:
            socket.connect(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"kv_events_config: cannot {'bind' if bind else 'connect'} {address}: {error}") from None
