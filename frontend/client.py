"""A client of the native API in plain zmq and msgpack: copy it into any program, it needs nothing of depthbatch."""

import itertools
from collections.abc import Generator
from typing import Any

import msgpack
import zmq


class Client:
    """Talks to one server: ``Client("ipc:///run/user/1000/depthbatch/4711-0/api")``. One thread, one request at a time.

    timeout_s: the longest wait for one message, in seconds; None waits for ever.
    """

    def __init__(self, address: str, timeout_s: float | None = 30.0) -> None:
        self.timeout_s = timeout_s
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self._ids = itertools.count()

    def send(self, **fields: Any) -> None:
        self.socket.send(msgpack.packb(fields))

    def receive(self) -> dict[str, Any]:
        """The next message; raises TimeoutError."""
        if not self.socket.poll(None if self.timeout_s is None else int(self.timeout_s * 1000)):
            raise TimeoutError(f"no message within {self.timeout_s} s")
        message: dict[str, Any] = msgpack.unpackb(self.socket.recv())
        return message

    def generate(
        self, prompt: str | list[int], request_id: str | None = None, **params: Any
    ) -> Generator[dict[str, Any]]:
        """The messages of one request, the terminal one included; one whose iteration is given up is aborted.

        ``request_id``: a name for ``resume``. Raises RuntimeError on an error, TimeoutError.
        """
        return self._messages(verb="submit", prompt=prompt, params=params, request_id=request_id)

    def resume(self, request_id: str, after: int = 0) -> Generator[dict[str, Any]]:
        """The rest of an answer of this or a former connection, behind the ``after`` tokens that have come. Raises like
        generate."""
        return self._messages(verb="resume", request_id=request_id, after=after)

    def _messages(self, **fields: Any) -> Generator[dict[str, Any]]:
        request_id = next(self._ids)
        self.send(id=request_id, **fields)
        ended = False
        try:
            while not ended:
                message = self._receive_for(request_id)
                ended = message["type"] in ("finished", "error")
                if message["type"] == "error":
                    raise RuntimeError(message["message"])
                yield message
        finally:
            if not ended and not self.socket.closed:
                self.send(verb="abort", id=request_id)

    def _receive_for(self, request_id: int) -> dict[str, Any]:
        """The next message of a request, or an error of none: the server could not tell whose it is.

        Others are of requests given up earlier, or late answers to ``ask``.
        """
        while True:
            message = self.receive()
            owner = message.get("id")
            if owner == request_id or (owner is None and message["type"] == "error"):
                return message

    def ask(self, verb: str) -> dict[str, Any]:
        """The answer to ``stats`` or ``health``. Raises RuntimeError on an error, TimeoutError."""
        self.send(verb=verb)
        while True:
            message = self.receive()
            if message["type"] == verb:
                return message
            if message["type"] == "error" and message["id"] is None:
                raise RuntimeError(message["message"])

    def close(self) -> None:
        self.socket.close()
