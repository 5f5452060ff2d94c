"""The ZeroMQ layer of all three processes: run directory, ipc endpoints, ROUTER and DEALER with strict decoding.

Wiring, all of it below one 0700 run directory::

    frontend  DEALER --connect-->  ROUTER  RUN/scheduler  (scheduler binds)
    worker    DEALER --connect-->  ROUTER  RUN/worker     (scheduler binds)
    client    DEALER --connect-->  ROUTER  RUN/api        (frontend binds)

A message is ``[header, *frames]``: the header is one message of the link's union, frames are raw bytes. Nothing is
dropped between living peers: both high-water marks are off (the number of requests is bounded at the edge), and a
ROUTER reports a peer that has gone instead of discarding in silence. Knows nothing of what messages mean.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zmq

from depthbatch.common.endpoints import MAX_IPC_PATH_BYTES
from depthbatch.common.errors import ConfigError, DecodeError
from depthbatch.common.logging import get_logger
from depthbatch.common.messages import Message, MessageDecoder, encode

SCHEDULER_ENDPOINT = "scheduler"
WORKER_ENDPOINT = "worker"
API_ENDPOINT = "api"

MAX_MESSAGE_BYTES = 256 << 20
LINGER_MS = 500  # how long a closing socket may still deliver its last message (a Fatal, the last tokens)

Frame = bytes | memoryview | npt.NDArray[np.int32]

log = get_logger("transport")


def endpoint(run_dir: str | Path, name: str) -> str:
    """``ipc://RUN/name``; raises ConfigError when the path does not fit into a UNIX socket address."""
    path = str(Path(run_dir) / name)
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise ConfigError(f"run directory too long: {path!r} has more than {MAX_IPC_PATH_BYTES} bytes")
    return f"ipc://{path}"


class Received(NamedTuple):
    """One decoded message."""

    peer: bytes  # routing id, empty on a DEALER
    message: object  # a member of the link's union
    frames: list[bytes]  # the raw parts after the header


class Link:
    """What ROUTER and DEALER share: strict, non-blocking receive and a counter of bytes that were no message."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, incoming: object) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(kind)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.decode_errors = 0
        self._next_report_s = 0.0
        self._decoder = MessageDecoder(incoming)
        self._head = 1 if kind == zmq.ROUTER else 0  # parts before the header

    def receive(self) -> Received | None:
        """The next good message, or None when nothing is there now. Bad ones are counted, logged and skipped."""
        while True:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            peer = parts[0] if self._head else b""
            try:
                if len(parts) <= self._head:
                    raise DecodeError("bad message: no header")
                return Received(peer, self._decoder.decode(parts[self._head]), parts[self._head + 1 :])
            except DecodeError as error:
                error.data = b"" if len(parts) <= self._head else parts[self._head]
                self.decode_errors += 1
                self._report(error)
                self.on_decode_error(peer, error)

    def _report(self, error: DecodeError) -> None:
        """At most one line a second: a peer that sends noise must not fill the log."""
        now_s = time.monotonic()
        if now_s >= self._next_report_s:
            self._next_report_s = now_s + 1.0
            log.warning("%s (%d so far)", error, self.decode_errors)

    def on_decode_error(self, peer: bytes, error: DecodeError) -> None:
        """Hook for links whose peers are owed an answer."""

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Closes the socket; what was sent is still delivered for ``linger_ms``. Closing twice is fine."""
        self.socket.close(linger_ms)


class Router(Link):
    """A bound ROUTER: many peers, each known by its routing id from its first message on.

    ``incoming`` is the union that peers send, e.g. ``Router(context, endpoint(run, "scheduler"), FrontendMessage)``.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        incoming: object,
        prepare: Callable[[zmq.Socket[bytes]], None] = lambda socket: None,
    ) -> None:
        """``prepare`` gets the socket before it is bound."""
        super().__init__(context, zmq.ROUTER, incoming)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        prepare(self.socket)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.close(0)
            raise ConfigError(f"cannot bind {address}: {error}") from None

    def send(self, peer: bytes, message: Message, *frames: Frame) -> bool:
        """Sends to one peer. False: the peer has gone (its connection is closed); forget it."""
        return self.send_bytes(peer, encode(message), *frames)

    def send_bytes(self, peer: bytes, header: bytes, *frames: Frame) -> bool:
        """The same with an encoded header, for messages that go to many peers."""
        parts: list[Any] = [peer, header, *frames]
        try:
            self.socket.send_multipart(parts, zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError) as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True


class Dealer(Link):
    """A DEALER connected to one ROUTER. Connecting before the other side binds is fine: messages wait."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, incoming: object) -> None:
        super().__init__(context, zmq.DEALER, incoming)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
        self.socket.connect(address)

    def send(self, message: Message, *frames: Frame) -> None:
        """Queues a message; never blocks and never drops while the other side lives."""
        parts: list[Any] = [encode(message), *frames]
        self.socket.send_multipart(parts, zmq.NOBLOCK)
