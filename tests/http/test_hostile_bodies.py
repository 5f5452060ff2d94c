"""Bodies that no client of good will sends, to every route that takes one: each is a 400 as JSON, and the server goes on."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from depthbatch.common.errors import SHOWN_CHARS, shown
from depthbatch.frontend.http.schemas import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from depthbatch.frontend.tokenizer import Tokenizer
from fakes.http_server import LiveServer
from fakes.serving_engine import MAX_MODEL_LEN

MESSAGES = '[{"role": "user", "content": "x"}]'
ROUTES = {  # the field that says what it is about, with a good value
    "/v1/completions": ("prompt", '"x"'),
    "/v1/chat/completions": ("messages", MESSAGES),
    "/tokenize": ("prompt", '"x"'),
    "/detokenize": ("tokens", "[65]"),
    "/abort": ("request_id", '"x"'),
}
LARGE = 100_000
HOSTILE_VALUES = {  # JSON texts in place of that value
    "NaN": "NaN",
    "infinity": "-Infinity",
    "a float beyond floats": "1e999",
    "a number of 100,000 digits": "9" * LARGE,
    "deep lists": "[" * LARGE + "]" * LARGE,
    "deep objects": '{"a":' * LARGE + "1" + "}" * LARGE,
    "deep, but parsed": "[" * 900 + "]" * 900,
    "an object": '{"a": 1}',
    "many nulls": "[" + ",".join(["null"] * LARGE) + "]",
    "many objects": "[" + ",".join(['{"a":[]}'] * LARGE) + "]",
    "many of all kinds": "[" + ",".join(['1,"a",null,1.5,[],{},true'] * (LARGE // 7)) + "]",
    "many large numbers": "[" + ",".join(["99999999999999999999"] * LARGE) + "]",
    "a lone surrogate": '"\\ud800"',
    "a lone surrogate in a list": '["\\udfff"]',
    "half of two": '["a", "\\ud83d"]',
}
BROKEN = {
    "invalid UTF-8": b'{"FIELD": "\xc3\x28"}',
    "UTF-16": '{"FIELD": "x"}'.encode("utf-16"),
    "overlong UTF-8": b'{"FIELD": "\xc0\xaf"}',
    "a surrogate in UTF-8": b'{"FIELD": "\xed\xa0\x80"}',
    "control characters": b'{"FIELD": "\x00\x01"}',
    "cut off": b'{"FIELD": "x',
    "two": b'{"FIELD": "x"}{"FIELD": "x"}',
    "nothing": b"",
    "a text": b'"x"',
    "a list": b'[{"FIELD": "x"}]',
    "single quotes": b"{'FIELD': 'x'}",
}


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[LiveServer]:
    with LiveServer(tokenizer) as server:
        yield server


@pytest.fixture(scope="module")
def hostile(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


def post(http: httpx.Client, route: str, body: bytes) -> httpx.Response:
    return http.post(route, content=body, headers={"content-type": "application/json"})


def refused(http: httpx.Client, route: str, body: bytes) -> None:
    answer = post(http, route, body)
    assert answer.status_code == 400, (route, body[:60], answer.status_code, answer.text[:200])
    error = answer.json()["error"]
    assert (
        error["message"] and error["code"] and error["type"] == "invalid_request_error" and len(answer.content) < 1000
    )
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_hostile_values(hostile: httpx.Client, route: str) -> None:
    """In the field that the route is about, and in one that nobody knows where that is enough to break the parser."""
    field, _ = ROUTES[route]
    for value in HOSTILE_VALUES.values():
        body = f'{{"{field}": {value}}}'.encode()
        refused(hostile, route, body)


@pytest.mark.parametrize("route", ROUTES)
def test_broken_bodies(hostile: httpx.Client, route: str) -> None:
    """No JSON, or not in UTF-8."""
    field, _ = ROUTES[route]
    for body in BROKEN.values():
        refused(hostile, route, body.replace(b"FIELD", field.encode()))


@pytest.mark.parametrize("route", ROUTES)
def test_values_elsewhere(hostile: httpx.Client, route: str) -> None:
    """In a field that the route does not know, such values change nothing or are refused; the server goes on."""
    field, good = ROUTES[route]
    for value in HOSTILE_VALUES.values():
        answer = post(hostile, route, f'{{"{field}": {good}, "unheard_of": {value}, "max_tokens": 1}}'.encode())
        assert answer.status_code in (200, 400), answer.text[:200]
        assert answer.status_code == 200 or answer.json()["error"]["code"]
    twice = post(hostile, route, f'{{"{field}": 5.5, "{field}": {good}, "max_tokens": 1}}'.encode())
    assert twice.status_code == 200, "of two keys of one name the last counts, as in every client's own parser"


def test_very_many_unknown_fields_are_refused(hostile: httpx.Client) -> None:
    """Bug: each of a million was looked up and warned of, in which time no other stream got a token. In objects within, too."""
    many = {f"x{number}": 1 for number in range(257)}
    few = dict(list(many.items())[:256])
    for body, param, place in (
        ({"prompt": "x", **many}, None, "the body"),
        ({"prompt": "x", "stream": True, "stream_options": many}, "stream_options", "stream_options"),
    ):
        error = post(hostile, "/v1/completions", json.dumps({**body, "max_tokens": 1}).encode()).json()["error"]
        assert error["message"] == f"{place} has 257 unknown fields, more than 256" and error["param"] == param
    assert (
        post(hostile, "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 1, **few}).encode()).status_code
        == 200
    )


def test_many_names_are_aborted_at_once(
    hostile: httpx.Client, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: one after the other: while another frontend is started again, and does not answer, each took half a second."""
    waiting = 0
    all_there = asyncio.Event()

    async def abort(name: str) -> bool:
        nonlocal waiting
        waiting += 1
        if waiting == 20:
            all_there.set()
        await all_there.wait()
        return name.endswith("7")

    monkeypatch.setattr(server.service, "abort_named", abort)
    names = [f"n{number}" for number in range(20)]
    assert hostile.post("/abort", json={"request_id": names}).json() == {"aborted": ["n7", "n17"]}


def test_no_more_of_a_value_is_looked_at_than_is_shown() -> None:
    """Bug: the error of a list of millions made a text of all of it first, however little of it was told."""
    looked_at = 0

    class Counted:
        def __repr__(self) -> str:
            nonlocal looked_at
            looked_at += 1
            return "c"

    for value in ([Counted()] * 1000, [[Counted()] * 1000], {"a": [[Counted()] * 500] * 9}, [{"a": Counted()}] * 1000):
        looked_at = 0
        assert shown(value) == f"{repr(value)[:SHOWN_CHARS]}..."
        looked_at = 0
        assert shown(value) and looked_at <= SHOWN_CHARS
    for value in ("a" * 79, "a" * 10**6, b"a" * 100, [1, "b", None, {"c": 1.5}], [[[[]]]], {}, {"a" * 100: 1}, 7):
        text = repr(value)
        assert shown(value) == (text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}...")


def test_texts_have_the_length_of_a_prompt(hostile: httpx.Client) -> None:
    """Bug: /tokenize encoded megabytes, and whoever had a prompt to encode waited; /detokenize took a million tokens."""
    text = "x" * 100 * MAX_MODEL_LEN
    for body in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
        error = hostile.post("/tokenize", json=body).json()["error"]
        assert error["code"] == "context_length_exceeded" and error["param"] in body
    assert hostile.post("/tokenize", json={"prompt": text[:99]}).json()["count"] == 99
    answer = hostile.post("/detokenize", json={"tokens": [65] * (MAX_MODEL_LEN + 1)})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tokens"
    assert len(hostile.post("/detokenize", json={"tokens": [65] * MAX_MODEL_LEN}).json()["prompt"]) == MAX_MODEL_LEN


def test_the_engine_answers_after_all_of_it(hostile: httpx.Client) -> None:
    """Runs last in this file."""
    answer = hostile.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
    assert json.loads(hostile.get("/health").text)["status"] == "ok"


@pytest.mark.parametrize(
    ("model", "field"),
    [
        (CompletionRequest, "prompt"), (CompletionRequest, "stop"), (CompletionRequest, "exit_depths"),
        (CompletionRequest, "bad_words"), (CompletionRequest, "allowed_token_ids"), (ChatRequest, "messages"),
        (TokenizeRequest, "messages"), (DetokenizeRequest, "tokens"), (AbortRequest, "request_id"),
    ],
)  # fmt: skip
def test_a_list_fails_with_its_first_bad_element(model: type[BaseModel], field: str) -> None:
    """Bug: 100,000 bad token ids were 100,000 errors, made for seconds in which nothing else ran, to tell one of them."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate({field: [None] * 60})
    assert caught.value.error_count() < 10


FULL_CHAT = {
    "model": "fake",
    "messages": [
        {"role": "user", "content": "x", "name": "n", "tool_calls": [], "unheard_of": "u"},
        {"role": "assistant", "content": [{"type": "text", "text": "x", "unheard_of": "u"}]},
        {"role": "user", "content": "x"},
    ],
    "stop": ["s"],
    "cache_salt": "c",
    "gate": "own",
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "n", "description": "d", "schema": {"type": "string"}},
    },
    "stream_options": {"include_usage": True, "unheard_of": "u"},
    "chat_template_kwargs": {"enable_thinking": True},
    "tool_choice": "none",
    "user": "u",
    "metadata": {"a": ["b", {"c": "d"}]},
    "unheard_of": {"a": ["b", {"c": "d"}]},
}
FULL_COMPLETION = {key: value for key, value in FULL_CHAT.items() if key not in ("messages", "response_format")} | {
    "prompt": "x",
    "structured_outputs": {"choice": ["a", "b"], "unheard_of": "u"},
    "suffix": "",
}
FULL = [
    ("/v1/completions", FULL_COMPLETION),
    (
        "/v1/completions",
        {"prompt": ["x", "y"], "bad_words": ["b"], "logit_bias": {"5": 1.0}, "stream_options": {"u": "u"}},
    ),
    ("/v1/completions/render", FULL_COMPLETION),
    ("/v1/chat/completions", FULL_CHAT),
    ("/v1/chat/completions/render", FULL_CHAT),
    ("/tokenize", {"model": "fake", "messages": FULL_CHAT["messages"], "chat_template_kwargs": {}, "x": "u"}),
    ("/detokenize", {"model": "fake", "tokens": [65], "unheard_of": "u"}),
    ("/abort", {"request_id": ["x", "y"], "unheard_of": "u"}),
]


def with_each_text(value: Any, text: str) -> Iterator[Any]:
    """The value once for every text in it, keys too, with another text there."""
    if isinstance(value, str):
        yield text
    elif isinstance(value, list):
        for at, item in enumerate(value):
            for changed in with_each_text(item, text):
                yield [*value[:at], changed, *value[at + 1 :]]
    elif isinstance(value, dict):
        for key, item in value.items():
            yield {text if name == key else name: it for name, it in value.items()}
            for changed in with_each_text(item, text):
                yield {**value, key: changed}


@pytest.mark.parametrize(("route", "full"), FULL)
def test_half_a_surrogate_pair_in_every_text(
    hostile: httpx.Client, server: LiveServer, route: str, full: dict[str, Any]
) -> None:
    """Bug: 500 where a stream that its client has named held one in a field that nobody knows: what it was asked for by is
    kept, and was encoded. In every text of a body, keys too, it is ignored or refused; the stream is named and plain."""
    server.engine.keeps_answers = True
    generates = route in ("/v1/completions", "/v1/chat/completions")
    for stream in ({}, {"stream": True, "request_id": "n"}) if generates else ({},):
        whole = full | ({"max_tokens": 1} if generates else {}) | stream
        if not stream:
            whole = {name: value for name, value in whole.items() if name != "stream_options"}
        answer = post(hostile, route, json.dumps(whole).encode())
        assert answer.status_code == 200, answer.text
        statuses = set()
        for body in with_each_text(whole, "\ud800"):
            answer = post(hostile, route, json.dumps(body).encode())
            statuses.add(answer.status_code)
            assert answer.status_code < 500 and "internal_error" not in answer.text, (body, answer.text)
            assert answer.status_code == 200 or len(answer.content) < 1000
        assert 400 in statuses


@pytest.mark.parametrize("depth", [50, 150, 200, 300, 600, 900, 990])
def test_a_named_stream_with_a_deep_field(hostile: httpx.Client, server: LiveServer, depth: int) -> None:
    """What the parser takes is not too deep for anything behind it."""
    server.engine.keeps_answers = True
    for deep in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        body = f'{{"prompt": "x", "max_tokens": 1, "stream": true, "request_id": "n", "unheard_of": {deep}}}'
        answer = post(hostile, "/v1/completions", body.encode())
        assert answer.status_code in (200, 400) and "internal_error" not in answer.text, answer.text


HEADERS = (
    *(
        "authorization",
        "x-request-id",
        "last-event-id",
        "content-type",
        "content-encoding",
        "accept",
        "origin",
        "cookie",
    ),
    *("x-forwarded-for", "user-agent", "expect", "access-control-request-method", "range", "if-none-match", "referer"),
)


@pytest.mark.parametrize("name", HEADERS)
def test_bytes_of_any_kind_in_headers(hostile: httpx.Client, name: str) -> None:
    """Half a surrogate pair in UTF-8, no UTF-8 at all, and what is not ASCII: never an error of the server's own."""
    for value in (
        b"\xed\xa0\x80",
        b"\xff\xfe",
        "ü/1".encode(),
        b"a\xe9/1",
        b"",
        b"x" * 5000,
        b"a/" + b"9" * 5000,
    ):
        for method, route in (("GET", "/"), ("GET", "/v1/models"), ("POST", "/v1/completions"), ("OPTIONS", "/abort")):
            headers = [(b"content-type", b"application/json")] * (name != "content-type") + [(name.encode(), value)]
            body = b'{"prompt": "x", "max_tokens": 1, "stream": true}' if method == "POST" else None
            answer = hostile.request(method, route, content=body, headers=headers)
            assert answer.status_code < 500, (name, value, method, route, answer.text)
