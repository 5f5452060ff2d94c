"""A client of the native API in plain zmq and msgpack: copy it into any program, it needs nothing of depthbatch."""

import contextlib
import itertools
import os
from collections.abc import Generator
from typing import Any

import msgpack
import zmq
from zmq.auth import load_certificate


class Client:
    """Talks to one server: ``Client("ipc:///run/user/1000/depthbatch/4711-0/api")``. One thread, one request at a time.

    timeout_s: the longest wait for one message, in seconds; None waits for ever.

    To a server on another machine, ``Client("tcp://...", key_file="me.key_secret", server_key_file="server.key")``: files of
    ``depthbatch keygen``, or of zmq.auth. A server that does not know the key never answers. Raises ValueError for one file
    without the other or one that holds no secret key, PermissionError for a secret key that others can read.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float | None = 30.0,
        key_file: str | None = None,
        server_key_file: str | None = None,
    ) -> None:
        if (key_file is None) != (server_key_file is None):
            missing = "key_file" if key_file is None else "server_key_file"
            raise ValueError(f"{missing} is missing: the own key and the server's go together")
        self.timeout_s = timeout_s
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, -1 if timeout_s is None else int(timeout_s * 1000))
        if key_file is not None and server_key_file is not None:
            self._secure(key_file, server_key_file)
        self.socket.connect(address)
        self._ids = itertools.count()

    def _secure(self, key_file: str, server_key_file: str) -> None:
        if os.stat(key_file).st_mode & 0o077:
            raise PermissionError(f"{key_file} can be read by others")
        public, secret = load_certificate(key_file)
        if secret is None:
            raise ValueError(f"{key_file} holds no secret key")
        server, _ = load_certificate(server_key_file)
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, server)

    def send(self, **fields: Any) -> None:
        """Raises TimeoutError where no server takes it: a server that refuses a key closes the connection."""
        try:
            self.socket.send(msgpack.packb(fields))
        except zmq.Again:
            raise TimeoutError(f"no server took a message within {self.timeout_s} s") from None

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
                with contextlib.suppress(zmq.Again):  # without a server there is nothing to abort
                    self.socket.send(msgpack.packb({"verb": "abort", "id": request_id}), zmq.NOBLOCK)

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
