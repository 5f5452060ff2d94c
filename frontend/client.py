"""A client of the native API in plain zmq and msgpack: copy it into any program, it needs nothing of depthbatch."""

import itertools
from collections.abc import Iterator
from typing import Any

import msgpack
import zmq


class Client:
    """Talks to one server: ``Client("ipc:///run/user/1000/depthbatch/4711-0/api")``. One thread."""

    def __init__(self, address: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self._ids = itertools.count()

    def send(self, **fields: Any) -> None:
        self.socket.send(msgpack.packb(fields))

    def receive(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """The next message; raises TimeoutError."""
        if not self.socket.poll(int(timeout_s * 1000)):
            raise TimeoutError(f"no message within {timeout_s} s")
        message: dict[str, Any] = msgpack.unpackb(self.socket.recv())
        return message

    def generate(self, prompt: str | list[int], **params: Any) -> Iterator[dict[str, Any]]:
        """The messages of one request, the terminal one included; raises RuntimeError on an error."""
        request_id = next(self._ids)
        self.send(verb="submit", id=request_id, prompt=prompt, params=params)
        while True:
            message = self.receive()
            if message["id"] != request_id:
                continue  # of an earlier request whose iteration was given up
            if message["type"] == "error":
                raise RuntimeError(message["message"])
            yield message
            if message["type"] == "finished":
                return

    def ask(self, verb: str) -> dict[str, Any]:
        """The answer to ``stats`` or ``health``."""
        self.send(verb=verb)
        while (message := self.receive())["type"] not in (verb, "error"):
            pass
        return message

    def close(self) -> None:
        self.socket.close()
