"""What random damage is done to, how, and what has to hold of every input, damaged or not.

A target is called with an input and gives True where it got through; what it may raise is handled in it, so that anything that it
raises is a bug. ``test_fuzz.py`` draws inputs at random, ``guided.py`` by what code they reach.
"""

import asyncio
import json
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec

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
from depthbatch.frontend.http.app import create_app
from depthbatch.frontend.http.generation import Service
from depthbatch.frontend.http.settings import HttpConfig
from depthbatch.frontend.http.texts import Texts
from depthbatch.frontend.params import RequestDefaults
from depthbatch.frontend.zmq_api import ApiRequest, SubmitVerb, _params
from depthbatch.scheduler.core import Scheduler
from fakes.chat_tokenizer import byte_tokenizer
from fakes.http_server import FakeProbe
from fakes.serving_engine import FakeEngine, fake_info
from fakes.small_engine import BASE

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


class MessagesTarget:
    """Row "pickle over ZMQ, type names from the wire, 0.0.0.0 binds": what decodes is a message of its own direction and
    encodes to itself again; a request that decodes is taken by the scheduler or refused, and leaves nothing behind. The first byte says
    which direction."""

    def __init__(self) -> None:
        self._decoders = [(MessageDecoder(union), union.__args__) for union, _ in UNIONS]
        changes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 40, "buckets": (4,)}
        config = replace(BASE, async_scheduling="lookahead", **changes)
        self.scheduler = Scheduler(config)
        self.taken = 0

    def samples(self) -> list[bytes]:
        return [
            bytes([direction]) + msgspec.msgpack.encode(message)
            for direction, (_, messages) in enumerate(UNIONS)
            for message in messages
        ]

    def damaged(self, data: bytes, rng: random.Random) -> bytes:
        return data[:1] + damaged_bytes(data[1:], rng)

    def __call__(self, data: bytes) -> bool:
        decoder, kinds = self._decoders[data[0] % len(self._decoders)] if data else self._decoders[0]
        try:
            message = decoder.decode(data[1:])
        except DecodeError:
            return False
        assert isinstance(message, kinds)
        again = decoder.decode(msgspec.msgpack.encode(message))
        assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(message)
        for submit in message.requests if isinstance(message, SubmitAll) else [message]:
            if isinstance(submit, Submit) and self.scheduler.submit(submit, 0.0) is None:
                self.taken += 1
                self.scheduler.abort(submit.request_id)
        self.scheduler.drain_events()
        self.scheduler.verify()
        return True


class VerbsTarget:
    """Of the native API: a verb or a DecodeError; its parameters are whole or a RequestError that names a field."""

    def __init__(self) -> None:
        self._decoder, self._defaults = MessageDecoder(ApiRequest), RequestDefaults(fake_info(), 0)
        self.refused = 0

    def samples(self) -> list[bytes]:
        return [msgspec.msgpack.encode(verb) for verb in VERBS]

    def damaged(self, data: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.7:
            try:
                data = msgspec.msgpack.encode(damaged_value(msgspec.msgpack.decode(data), rng))
            except (OverflowError, ValueError):  # not msgpack, or nothing that msgpack can hold
                return damaged_bytes(data, rng)
        return damaged_bytes(data, rng) if rng.random() < 0.3 else data

    def __call__(self, data: bytes) -> bool:
        try:
            message = self._decoder.decode(data)
        except DecodeError:
            return False
        if not isinstance(message, SubmitVerb):
            return False
        try:
            self._defaults.resolve(_params(message.params), 5, 0)
        except RequestError:
            self.refused += 1
            return False
        return True


class ConfigurationTarget:
    """JSON of a child process, and files that people write: a configuration or a ConfigError of one line."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._file = Path(self._directory.name) / "fuzz.toml"

    def samples(self) -> list[bytes]:
        return [
            json.dumps(msgspec.to_builtins(EngineConfig(kv_blocks=7, policy="refill", min_coda_batch=2))).encode(),
            to_toml(EngineConfig(kv_blocks=7, gate="own", exit_threshold=0.5)).encode(),
        ]

    def damaged(self, data: bytes, rng: random.Random) -> bytes:
        try:
            return json.dumps(damaged_value(json.loads(data), rng), default=str).encode()
        except ValueError:
            return damaged_bytes(data, rng)

    def __call__(self, data: bytes) -> bool:
        try:
            if data.startswith(b"{"):
                EngineConfig.from_json(data.decode(errors="replace"))
            else:
                self._file.write_bytes(data)
                EngineConfig.from_values(read_toml(self._file, FIELDS))
        except ConfigError as error:
            assert len(str(error).splitlines()) == 1, error
            return False
        return True


class HttpTarget:
    """Bodies, in this process: no answer is a 5xx, each that is not 2xx has the one shape of errors, nothing is left. The first byte says
    to which route."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._runner.run(self._start())

    async def _start(self) -> None:
        tokenizer, config = byte_tokenizer(), HttpConfig()
        self._engine = FakeEngine(tokenizer)
        self._service = Service(self._engine, Texts(tokenizer, {}, ThreadPoolExecutor(1)), config, "fake")
        app = create_app(self._service, FakeProbe(self._service))
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x")

    def samples(self) -> list[bytes]:
        return [bytes([route]) + json.dumps(body).encode() for route, (_, body) in enumerate(BODIES)]

    def damaged(self, data: bytes, rng: random.Random) -> bytes:
        body = data[1:]
        try:
            body = json.dumps(damaged_value(json.loads(body), rng), default=str).encode()
        except (ValueError, RecursionError):
            return data[:1] + damaged_bytes(body, rng)
        return data[:1] + (damaged_bytes(body, rng) if rng.random() < 0.3 else body)

    def __call__(self, data: bytes) -> bool:
        return self._runner.run(self._post(BODIES[data[0] % len(BODIES)][0] if data else "/abort", data[1:]))

    async def _post(self, path: str, body: bytes) -> bool:
        answer = await self._client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code < 500, answer.text
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, answer.text
        assert not self._engine.running and not self._service.limit.in_flight
        return answer.status_code == 200


TARGETS = {"messages": MessagesTarget, "verbs": VerbsTarget, "configuration": ConfigurationTarget, "http": HttpTarget}
