"""Streams that a client takes up again after kill -9 of any process of ``depthbatch serve``. On the simulated device, whose
tokens are a function of (seed, position)."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from fakes.serve_process import DEVICE, ResumingClient, ServeProcess, wait_until

BODY = {"prompt": [[5, 6, 7], [8, 9]], "n": 2, "seed": 3, "max_tokens": 48, "temperature": 1.0}
PLAIN = {
    "prompt": [5, 6],
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}
BODY |= {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with ServeProcess("--device", DEVICE) as server:
        yield server


def test_streams_outlive_every_process(server: ServeProcess) -> None:
    """Row "the server's front process dies: every stream is cut". Eight clients with four choices each; kill -9 of the
    frontend, and of all three processes at once: every client that comes back with
    its Last-Event-ID has, joined, the tokens, depths, texts, ends and usage of an undisturbed stream."""
    whole = ResumingClient(server, "whole", **BODY)
    whole.run()
    assert {len(choice["token_ids"]) for choice in whole.joined()[0].values()} == {48} and len(whole.joined()[0]) == 4
    clients = [ResumingClient(server, f"c{number}", **BODY) for number in range(8)]
    with ThreadPoolExecutor(len(clients)) as threads:
        running = [threads.submit(client.run) for client in clients]
        for tokens, victims in ((8, ("frontend",)), (24, ("worker", "scheduler", "frontend"))):
            wait_until(lambda tokens=tokens: _tokens(clients[0]) > 4 * tokens, "the streams are there")
            pids = server.pids()
            for name in victims:
                os.kill(pids[name], signal.SIGKILL)
            server.wait_ready()
        for future in running:
            future.result()
    assert all(client.joined() == whole.joined() for client in clients)
    assert sum(client.breaks for client in clients) >= 8


def _tokens(client: ResumingClient) -> int:
    return sum(len(choice["token_ids"]) for choice in client.joined()[0].values())


def _token_ids(text: str) -> list[int]:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [token for event in events for token in event["choices"][0]["token_ids"]]


def ask(server: ServeProcess, last_id: str, **changes: Any) -> httpx.Response:
    return httpx.post(
        server.url + "/v1/completions",
        json={**PLAIN, **changes},
        headers={"Last-Event-ID": last_id},
        timeout=30,
    )


def test_what_cannot_be_resumed_is_told(server: ServeProcess) -> None:
    """Ids that are none, of nobody, of another request, and beyond the end: one line each that names the header. Bug: a request
    that names another answer than its Last-Event-ID got that one, under a name that it had not asked for. An answer that has ended is sent again from any token on."""
    url = server.url + "/v1/completions"
    text = httpx.post(url, json=PLAIN, headers={"X-Request-Id": "mine"}).text
    ids = [line[4:] for line in text.splitlines() if line.startswith("id: ")]
    assert ids[-1] == "mine/9"  # eight tokens and the end
    for after in range(9):
        again = ask(server, f"mine/{after}")
        assert again.status_code == 200 and _token_ids(again.text) == _token_ids(text)[after:], after
        assert "id: mine/9\n" in again.text and '"finish_reason":"length"' in again.text
    assert ask(server, "mine/9").text == "data: [DONE]\n\n"
    for last_id, changes, status, message in (
        ("mine", {}, 400, "'mine' is no event id"),
        ("mine/-1", {}, 400, "no event id"),
        ("mine/" + "1," * 20 + "1", {}, 400, "no event id"),
        ("mine/10", {}, 400, "10 is more than the 9 that choice 0"),
        ("mine/1,1", {}, 400, "has 1 choices, not 2"),
        ("mine/3", {"max_tokens": 9}, 400, "with another body"),
        ("mine/3", {"stream": False}, 400, "only with stream"),
        ("yours/3", {}, 404, "no answer to 'yours' is here; this server keeps streams for 60 s"),
    ):
        answer = ask(server, last_id, **changes)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, "Last-Event-ID") and message in error["message"], error
    for headers, changes, where in (
        ({"X-Request-Id": "other"}, {}, "X-Request-Id"),
        ({}, {"request_id": "other"}, "request_id"),
        ({"X-Request-Id": "mine"}, {"request_id": "other"}, "request_id"),
    ):
        answer = httpx.post(url, json={**PLAIN, **changes}, headers={"Last-Event-ID": "mine/3", **headers})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "Last-Event-ID"
        assert error["message"] == f"Last-Event-ID: it is of 'mine', but {where} says 'other'"
    named = {"X-Request-Id": "of-a-proxy", "Last-Event-ID": "mine/3"}
    assert httpx.post(url, json={**PLAIN, "request_id": "mine"}, headers=named).status_code == 200
    answer = httpx.post(url, json=PLAIN, headers={"X-Request-Id": "white space"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "X-Request-Id"


def test_a_name_is_asked_for(server: ServeProcess) -> None:
    """Nothing is kept of requests without a name of their client's: their events have no ids; and nothing of a plain answer."""
    body = {"prompt": [5, 6], "max_tokens": 2, "stream": True}
    assert "id: " not in httpx.post(server.url + "/v1/completions", json=body).text
    httpx.post(server.url + "/v1/completions", json={**body, "stream": False, "request_id": "plain"})
    assert ask(server, "plain/0").status_code == 404
    named = httpx.post(server.url + "/v1/completions", json={**body, "request_id": "by-body"}).text
    assert "id: by-body/1\n" in named and '"id":"by-body"' in named
