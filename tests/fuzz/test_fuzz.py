"""Random damage to messages, ZMQ requests, HTTP and configuration: each ends in an answer or in the one error it may have.

Inputs are valid ones, damaged as bytes or, where they have a structure, in it. ``--inputs N`` says how many (a million by
``--inputs 1000000``), ``--fuzz-seed`` which ones; a failure names the input. ``guided.py`` looks for inputs by what code they reach.
"""

import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fakes.chat_tokenizer import byte_tokenizer
from fakes.fuzz_targets import BODIES, ConfigurationTarget, MessagesTarget, VerbsTarget, damaged_bytes, damaged_value
from fakes.http_server import LiveServer


def draws(pytestconfig: pytest.Config, share: float, what: str) -> Iterator[random.Random]:
    """A generator of its own for each input, so that one can be drawn again alone."""
    seed = pytestconfig.getoption("--fuzz-seed")
    for number in range(max(1, int(share * pytestconfig.getoption("--inputs")))):
        yield random.Random(f"{what}-{seed}-{number}")


def run_all(target: Any, rngs: Iterator[random.Random]) -> int:
    """How many damaged samples got through; an error that the target does not expect tells the input."""
    samples, through = target.samples(), 0
    for rng in rngs:
        data = target.damaged(rng.choice(samples), rng)
        try:
            through += target(data)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} for {data!r}") from error
    return through


def test_messages(pytestconfig: pytest.Config) -> None:
    """Of every direction between the processes."""
    target = MessagesTarget()
    assert run_all(target, draws(pytestconfig, 0.5, "message")) and target.taken
    assert not target.scheduler.num_unfinished


def test_zmq_requests(pytestconfig: pytest.Config) -> None:
    """Of the native API."""
    target = VerbsTarget()
    assert run_all(target, draws(pytestconfig, 0.25, "verb")) and target.refused


def test_configuration(pytestconfig: pytest.Config) -> None:
    """JSON and TOML."""
    assert run_all(ConfigurationTarget(), draws(pytestconfig, 0.1, "config"))


def test_http(pytestconfig: pytest.Config) -> None:
    """Bodies: no answer is a 5xx, each that is not 2xx has the one shape of errors. Raw bytes on a connection: an answer or
    a closed connection. Afterwards the server is healthy and no sequence runs."""
    with LiveServer(byte_tokenizer()) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        for number, rng in enumerate(draws(pytestconfig, 0.15, "http")):
            path, body = rng.choice(BODIES)
            data = json.dumps(damaged_value(body, rng), default=str).encode()
            if rng.random() < 0.3:
                data = damaged_bytes(data, rng)
            if number % 8 == 0:
                _raw(server, path, data, rng)
                continue
            answer = client.post(path, content=data, headers={"content-type": "application/json"})
            assert answer.status_code < 500, (path, data, answer.text)
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, (path, data, answer.text)
        assert client.get("/health").status_code == 200
        assert not server.engine.running and not server.service.limit.in_flight


def _raw(server: LiveServer, path: str, body: bytes, rng: random.Random) -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    data = damaged_bytes(head.encode(), rng) + body
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 20) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(1 << 16):  # a timeout here is a connection that hangs
            answer += part
    assert not answer or answer.startswith(b"HTTP/1."), data
    assert b" 500 " not in answer.split(b"\r\n", 1)[0], data
