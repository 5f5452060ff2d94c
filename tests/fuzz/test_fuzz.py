"""Random damage to messages, ZMQ requests, HTTP and configuration: each ends in an answer or in the one error it may have.

Inputs are valid ones, damaged as bytes or, where they have a structure, in it. ``--inputs N`` says how many (a million by
``--inputs 1000000``), ``--fuzz-seed`` which ones; a failure names the input.
"""

import json
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from depthbatch.common.config import FIELDS, EngineConfig
from depthbatch.common.errors import ConfigError, DecodeError, RequestError
from depthbatch.common.gates import Gate
from depthbatch.common.messages import (
    Abort,
    EngineReady,
    Fatal,
    FrontendMessage,
    GetStats,
    Hello,
    MessageDecoder,
    Rejected,
    RequestParams,
    RowFailure,
    SchedulerHeartbeat,
    SchedulerMessage,
    SchedulerStats,
    Shutdown,
    StageBatch,
    StageExtra,
    StageResult,
    Submit,
    SubmitAll,
    TokenEvent,
    Tokens,
    WorkerCommand,
    WorkerHeartbeat,
    WorkerMessage,
    WorkerReady,
)
from depthbatch.common.options import read_toml, to_toml
from depthbatch.frontend.params import RequestDefaults
from depthbatch.frontend.zmq_api import ApiRequest, SubmitVerb, _params
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from fakes.chat_tokenizer import byte_tokenizer
from fakes.http_server import LiveServer
from fakes.serving_engine import fake_info

SUBMIT = Submit(
    7, b"\1\0\0\0" * 5, RequestParams(max_tokens=4, stop_token_ids=(2,), gate=Gate.REPLAY, exit_depths=b"\2\1")
)
UNIONS: list[tuple[Any, list[Any]]] = [
    (FrontendMessage, [Hello("x"), SUBMIT, SubmitAll((SUBMIT, SUBMIT)), Abort(3), GetStats(), Shutdown(True)]),
    (SchedulerMessage, [
        EngineReady(fake_info()), Tokens((TokenEvent(1, (5, 6), (4, 2)), TokenEvent(2, (), (), "stop", 2))),
        Rejected(4, "too long", "prompt"), SchedulerHeartbeat(1, 0.5, 7, 1, 2, 3), SchedulerStats(), Fatal("worker", "x"),
    ]),
    (WorkerCommand, [StageBatch(1, 2, 8, 3), StageBatch(2, 0, 0, 1, 5, 1, extra=StageExtra(depths=b"\4")), Shutdown()]),
    (WorkerMessage, [
        WorkerReady(9, fake_info(), "x"), WorkerHeartbeat(3, 0.1, 0.2, 0.3), Fatal("worker", "y", True),
        StageResult(3, 0.0, 1.0, b"\1\0\0\0", b"\1", failed=(RowFailure(0, "no"),)),
    ]),
]  # fmt: skip
VERBS = [
    {"verb": "submit", "id": 1, "prompt": "hi", "params": {"max_tokens": 5, "temperature": 0.5, "seed": 3}},
    {
        "verb": "submit",
        "id": "a",
        "prompt": [1, 2, 3],
        "params": {"logit_bias": {5: 1.0}, "stop": ["x"], "gate": "own"},
    },
    {
        "verb": "submit",
        "id": 2,
        "prompt": "x",
        "params": {"num_loops": 2, "bad_words": ["a"], "allowed_token_ids": [1]},
    },
    {"verb": "abort", "id": 1},
    {"verb": "stats"},
    {"verb": "health"},
]
BODIES: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": "hi", "max_tokens": 3, "n": 2, "temperature": 1, "stop": ["b"], "logprobs": 2}),
    (
        "/v1/completions",
        {"prompt": [[1, 2], [3]], "stream": True, "stream_options": {"include_usage": True}, "seed": 1},
    ),
    ("/v1/completions", {"prompt": "a", "echo": True, "logit_bias": {"5": 1}, "exit_depths": [1, 2], "min_tokens": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "top_logprobs": 2, "logprobs": True}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "stream": True},
    ),
    ("/tokenize", {"prompt": "hi", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/abort", {"request_id": ["x", "y"]}),
]
NASTY = [
    None, True, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, 1e308, float("nan"), float("inf"), "", "a", "\x00", "\ud800",
    "é" * 300, "nan", "1e5", "../..", "{}", b"", [], {}, [[]], [None], [[[[[]]]]], {"": None}, {"a": {"b": 1}}, [0] * 300,
]  # fmt: skip


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    """A few flips, cuts, repetitions and insertions."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del out[at : at + rng.choice((1, 2, 8, 64))]
            case 2:
                out[at:at] = out[at : at + rng.choice((1, 4, 32))]
            case 3:
                out[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
            case _:
                out[at : at + 4] = rng.choice(
                    (b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\xdd\xff\xff\xff", b"\xc6\xff\xff\xff")
                )
    return bytes(out)


def damaged_value(value: Any, rng: random.Random) -> Any:
    """One place of a structure holds something else, is gone or is there twice."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        out = dict(value)
        match rng.randrange(6):
            case 0:
                del out[key]
            case 1:
                out[rng.choice(["x", "prompt", "n", "stop", key + "s" if isinstance(key, str) else 9])] = rng.choice(
                    NASTY
                )
            case _:
                out[key] = damaged_value(value[key], rng)
        return out
    if isinstance(value, list) and value and rng.random() < 0.7:
        out_list = list(value)
        at = rng.randrange(len(out_list))
        out_list[at] = damaged_value(out_list[at], rng)
        return out_list * rng.choice((1, 1, 1, 3))
    return rng.choice(NASTY)


def draws(pytestconfig: pytest.Config, share: float, what: str) -> Iterator[random.Random]:
    """A generator of its own for each input, so that one can be drawn again alone."""
    seed = pytestconfig.getoption("--fuzz-seed")
    for number in range(max(1, int(share * pytestconfig.getoption("--inputs")))):
        yield random.Random(f"{what}-{seed}-{number}")


def allowed(call: Callable[[], Any], errors: tuple[type[Exception], ...], given: object) -> Any:
    """What a call gives, None after an error that it may raise; any other error tells the input."""
    try:
        return call()
    except errors:
        return None
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error} for {given!r}") from error


def test_messages(pytestconfig: pytest.Config) -> None:
    """Row "pickle over ZMQ, type names from the wire, 0.0.0.0 binds": what decodes is a message of its own direction and
    encodes to itself again; a request that decodes is taken by the scheduler or refused, and leaves nothing behind."""
    decoders = [(MessageDecoder(union), union.__args__, samples) for union, samples in UNIONS]
    config = SchedulerConfig(
        policy="refill", max_num_seqs=4, max_num_batched_tokens=64, min_free_slots=1, min_coda_batch=1, r_max=4,
        block_size=4, num_blocks=40, max_model_len=64, buckets=(4,), vocab_size=40, async_scheduling="lookahead",
    )  # fmt: skip
    scheduler, taken, decoded = Scheduler(config), 0, 0
    for rng in draws(pytestconfig, 0.5, "message"):
        decoder, kinds, samples = rng.choice(decoders)
        data = damaged_bytes(msgspec.msgpack.encode(rng.choice(samples)), rng)
        message = allowed(lambda d=decoder, b=data: d.decode(b), (DecodeError,), data)
        if message is None:
            continue
        decoded += 1
        assert isinstance(message, kinds)
        again = decoder.decode(msgspec.msgpack.encode(message))
        assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(message)
        for submit in message.requests if isinstance(message, SubmitAll) else [message]:
            if isinstance(submit, Submit) and allowed(lambda s=submit: (scheduler.submit(s, 0.0),), (), data) == (
                None,
            ):
                taken += 1
                scheduler.abort(submit.request_id)
        scheduler.drain_events()
        scheduler.verify()
    assert decoded and taken and not scheduler.num_unfinished


def test_zmq_requests(pytestconfig: pytest.Config) -> None:
    """Of the native API: a verb or a DecodeError; its parameters are whole or a RequestError that names a field."""
    decoder, defaults, served, refused = MessageDecoder(ApiRequest), RequestDefaults(fake_info(), 0), 0, 0
    for rng in draws(pytestconfig, 0.25, "verb"):
        verb = rng.choice(VERBS)
        if rng.random() < 0.7:
            verb = damaged_value(verb, rng)
        try:
            data = msgspec.msgpack.encode(verb)
        except (OverflowError, UnicodeEncodeError):
            continue
        if rng.random() < 0.3:
            data = damaged_bytes(data, rng)
        message = allowed(lambda d=data: decoder.decode(d), (DecodeError,), data)
        if isinstance(message, SubmitVerb):
            resolved = allowed(lambda m=message: defaults.resolve(_params(m.params), 5, 0), (RequestError,), message)
            served, refused = served + (resolved is not None), refused + (resolved is None)
    assert served and refused


def test_configuration(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """JSON of a child process, and files that people write: a configuration or a ConfigError of one line."""
    whole = msgspec.to_builtins(EngineConfig(kv_blocks=7, policy="refill", min_coda_batch=2))
    text, file = to_toml(EngineConfig(kv_blocks=7, gate="own", exit_threshold=0.5)), tmp_path / "fuzz.toml"
    read = 0
    for rng in draws(pytestconfig, 0.1, "config"):
        damaged = json.dumps(damaged_value(whole, rng), default=str)
        allowed(lambda d=damaged: EngineConfig.from_json(d), (ConfigError,), damaged)
        data = damaged_bytes(text.encode(), rng)
        file.write_bytes(data)
        read += allowed(lambda: EngineConfig.from_values(read_toml(file, FIELDS)), (ConfigError,), data) is not None
    assert read


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
