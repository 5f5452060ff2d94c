"""Bounded queue, deadlines, limits at the edge, keys, drain. Waits are on conditions, never on a clock."""

import socket
import threading
import time
from collections.abc import Callable

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from depthbatch.common.errors import ConfigError
from depthbatch.frontend.http.server import bind
from depthbatch.frontend.http.settings import HttpConfig
from depthbatch.frontend.tokenizer import Tokenizer
from fakes.http_server import LiveServer

LIMIT_S = 10.0
LONG = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.005)


class Background:
    """A streaming request in a thread; ``lines`` grows."""

    def __init__(self, server: LiveServer, body: dict, headers: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self.status: int | None = None
        self._thread = threading.Thread(target=self._run, args=(server.url, body, headers), daemon=True)
        self._thread.start()

    def _run(self, url: str, body: dict, headers: dict[str, str] | None) -> None:
        whole = {**body, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=whole, headers=headers, timeout=60) as answer:
            self.status = answer.status_code
            self.lines += (line for line in answer.iter_lines() if line)

    def join(self) -> list[str]:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        return self.lines


def test_full_queue_answers_503_with_retry_after(tokenizer: Tokenizer) -> None:
    """Row "queue grows without bound, every client times out": the place after the last is refused at once, names its
    reason in the metrics, and a place that is freed is given out again. Row "health probe queued behind the work": with
    the one slot and every place of the queue taken, health still answers."""
    with LiveServer(tokenizer, engine={"slots": 1, "step_s": 0.02}, max_requests=3) as server:
        running = [Background(server, LONG) for _ in range(3)]
        wait_until(lambda: server.service.limit.in_flight == 3)
        with httpx.Client(base_url=server.url, timeout=LIMIT_S) as http:
            refused = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "overloaded"
            streamed = http.post("/v1/completions", json={**LONG, "stream": True})
            assert streamed.status_code == 503, "a stream that cannot start has a real status"
            assert http.get("/health").status_code == 200
            assert 'admission_rejections_total{process="frontend",reason="queue_full"} 2.0' in http.get("/metrics").text
            http.post("/abort", json={"request_id": "nothing"})
            server.call(lambda: [server.loop.create_task(server.engine.abort_all())])
            for stream in running:
                stream.join()
            assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
            never = http.post("/v1/completions", json={"prompt": ["x"] * 4, "max_tokens": 1})
            assert never.status_code == 400, "more sequences than places could never run"


@pytest.mark.parametrize("state", ["running", "queued"])
def test_timeout_ends_a_request(tokenizer: Tokenizer, state: str) -> None:
    """Row "queue grows without bound, every client times out": timeout_s holds while waiting as well as while running, frees the slot, and answers 504."""
    with LiveServer(tokenizer, engine={"slots": 1, "step_s": 0.02}) as server:
        if state == "queued":
            Background(server, {**LONG, "request_id": "first"})
            wait_until(lambda: len(server.engine.running) == 1)
        answer = httpx.post(server.url + "/v1/completions", json={**LONG, "timeout_s": 0.2}, timeout=LIMIT_S)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        wait_until(lambda: server.engine.waiting == 0 and len(server.engine.running) == (state == "queued"))
        httpx.post(server.url + "/abort", json={"request_id": "first"})


def test_the_default_timeout_holds(tokenizer: Tokenizer) -> None:
    """--default-timeout-s is that of requests that name none; the native API's test is its twin."""
    with LiveServer(tokenizer, engine={"step_s": 0.02}, default_timeout_s=0.2) as server:
        answer = httpx.post(server.url + "/v1/completions", json=LONG, timeout=LIMIT_S)
        assert answer.status_code == 504 and answer.json()["error"]["message"].startswith("timeout_s: not finished")
        own = {"prompt": "x", "max_tokens": 20, "ignore_eos": True, "timeout_s": 60}
        assert httpx.post(server.url + "/v1/completions", json=own, timeout=60).status_code == 200


def test_timeout_in_mid_stream_is_an_error_event(tokenizer: Tokenizer) -> None:
    """After the first token the status is out: the error comes as an event, then the stream ends."""
    with LiveServer(tokenizer, engine={"step_s": 0.02}) as server:
        stream = Background(server, {**LONG, "timeout_s": 0.3})
        lines = stream.join()
        assert stream.status == 200 and len(lines) > 2
        assert '"code":"timeout"' in lines[-2] and lines[-1] == "data: [DONE]"


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("n", [1, 3])
def test_internal_error_has_its_status(tokenizer: Tokenizer, at: int, n: int) -> None:
    """Row "200 with a broken body after an internal error": a real 500 before the first token, an error event after
    it; the message says nothing of the inside; the other choices are ended."""
    with LiveServer(tokenizer) as server:
        server.engine.fail_at = at
        plain = httpx.post(server.url + "/v1/completions", json={**LONG, "n": n})
        assert plain.status_code == 500 and plain.json()["error"]["code"] == "internal_error"
        assert "fake" not in plain.text
        stream = Background(server, {**LONG, "n": n})
        lines = stream.join()
        if at == 0:
            assert stream.status == 500
        else:
            assert stream.status == 200 and '"internal_error"' in lines[-2]
        wait_until(lambda: not server.engine.running and server.service.limit.in_flight == 0)
        server.engine.fail_at = None
        assert httpx.post(server.url + "/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200


def test_drain_finishes_streams_and_takes_no_more(tokenizer: Tokenizer) -> None:
    """Row "SIGTERM cuts streams": after the signal /ready is 503 at once, new work gets 503 + Retry-After, running
    streams end with their own reason, then the server ends."""
    with LiveServer(tokenizer, engine={"step_s": 0.02}) as server:
        stream = Background(server, {"prompt": "x", "max_tokens": 100, "ignore_eos": True})
        wait_until(lambda: server.engine.tokens_made >= 2)
        server.call(server.server.on_signal)
        with httpx.Client(base_url=server.url, timeout=LIMIT_S) as http:
            assert http.get("/ready").status_code == 503
            refused = http.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503 and "retry-after" in refused.headers
            assert http.get("/health").status_code == 200
        lines = stream.join()
        assert '"finish_reason":"length"' in lines[-2] and lines[-1] == "data: [DONE]"
        assert len(lines) == 101
        assert server.join()


def test_second_signal_aborts(tokenizer: Tokenizer) -> None:
    """The stream ends with reason abort instead of its 500 tokens, and the server ends."""
    with LiveServer(tokenizer, engine={"step_s": 0.05}) as server:
        stream = Background(server, LONG)
        wait_until(lambda: server.engine.tokens_made >= 2)
        server.call(server.server.on_signal)
        server.call(server.server.on_signal)
        lines = stream.join()
        assert '"finish_reason":"abort"' in lines[-2] and len(lines) < 100
        assert server.join()


def test_drain_deadline_aborts(tokenizer: Tokenizer) -> None:
    """A stream longer than drain_s is aborted, not waited for."""
    with LiveServer(tokenizer, engine={"step_s": 0.05}, drain_s=0.2) as server:
        stream = Background(server, LONG)
        wait_until(lambda: server.engine.tokens_made >= 1)
        server.call(server.server.on_signal)
        assert '"finish_reason":"abort"' in stream.join()[-2]
        assert server.join()


def test_keys(tokenizer: Tokenizer) -> None:
    """Row "API key compared with ==": any of the keys opens every route but the probes, which are open; that the
    comparison is hmac's is asserted on the source, since time cannot be."""
    import inspect

    from depthbatch.frontend.http.edge import Edge

    assert "hmac.compare_digest" in inspect.getsource(Edge._client)
    with LiveServer(tokenizer, api_key="first,second") as server, httpx.Client(base_url=server.url) as http:
        body = {"prompt": "x", "max_tokens": 1}
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic first"}, {"authorization": "é"}):
            raw = {key: value.encode("latin-1") for key, value in header.items()}
            answer = http.post("/v1/completions", json=body, headers=raw)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert http.get("/v1/models", headers=raw).status_code == 401
        for key in ("first", "second"):
            headers = {"authorization": f"Bearer {key}"}
            assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert http.get(path).status_code == 200
        for path in ("/health", "/ready"):  # some load balancers probe so
            assert http.head(path).status_code == 200 and not http.head(path).content


def test_names_belong_to_a_key(tokenizer: Tokenizer) -> None:
    """Bug: whoever had any key could abort the requests of every other by their names."""
    with LiveServer(tokenizer, engine={"step_s": 0.02}, api_key="first,second") as server:
        first, second = ({"authorization": f"Bearer {key}"} for key in ("first", "second"))
        with httpx.Client(base_url=server.url, timeout=20) as http:
            body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True, "request_id": "mine"}
            with http.stream("POST", "/v1/completions", json=body, headers=first) as answer:
                lines = answer.iter_lines()
                next(lines)
                asked = {"json": {"request_id": "mine"}}
                assert httpx.post(server.url + "/abort", headers=second, **asked).json() == {"aborted": []}
                assert httpx.post(server.url + "/abort", headers=first, **asked).json() == {"aborted": ["mine"]}
                assert any('"finish_reason":"abort"' in line for line in lines)


def test_large_bodies_are_refused(tokenizer: Tokenizer) -> None:
    """Row "1 GiB body": refused by its length without being read, and by counting when it is chunked."""
    with LiveServer(tokenizer, max_body_bytes=1500) as server, httpx.Client(base_url=server.url) as http:
        port = int(server.url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1073741824\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 413")
        chunked = http.post(
            "/v1/completions", content=iter([b"x" * 600] * 3), headers={"content-type": "application/json"}
        )
        assert chunked.status_code == 413 and chunked.json()["error"]["code"] == "body_too_large"
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("size", [70_000, 1 << 20])
def test_large_headers_are_refused(live: LiveServer, http: httpx.Client, size: int) -> None:
    """Row "1 MiB header": 431, whether as one header, as many, as a long URL, or never finished."""
    many = {f"x-{i}": "a" * 1000 for i in range(size // 1000)}
    assert http.get("/version", headers={"x": "a" * size}).status_code == 431
    assert http.get("/version", headers=many).status_code == 431
    port = int(live.url.rsplit(":", 1)[1])
    for head in (b"GET /version?" + b"a" * size, b"GET /version HTTP/1.1\r\nx: " + b"a" * size):
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
            connection.sendall(head)
            assert connection.recv(100).startswith(b"HTTP/1.1 431")
    assert http.get("/version").status_code == 200


def test_busy_port_is_told_before_anything_else(live: LiveServer) -> None:
    """Row "port taken: found after minutes of loading": bind is the first step and names the address."""
    port = int(live.url.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use"):
        bind(HttpConfig(port=port))


def test_tokenising_does_not_block_the_loop(tokenizer: Tokenizer) -> None:
    """Row "tokenising long prompts never blocks the event loop": the encoder is held in its thread, and health still
    answers, as does a request of token ids."""
    held, encoding = threading.Event(), threading.Event()

    class Slow:
        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer, name)

        def encode(self, *args: object) -> list[int]:
            encoding.set()
            assert held.wait(LIMIT_S)
            return tokenizer.encode(*args)

    with LiveServer(Slow()) as server, httpx.Client(base_url=server.url, timeout=LIMIT_S) as http:
        stream = Background(server, {"prompt": "x", "max_tokens": 1})
        assert encoding.wait(LIMIT_S)
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1}).status_code == 200
        held.set()
        stream.join()


def test_metrics_count_what_was_done(tokenizer: Tokenizer) -> None:
    """Tokens, requests, depths and latencies: the counters equal what the answers said."""
    with LiveServer(tokenizer) as server, httpx.Client(base_url=server.url) as http:
        usages = [
            http.post("/v1/completions", json={"prompt": "abc", "max_tokens": m}).json()["usage"] for m in (1, 5, 60)
        ]
        text = http.get("/metrics").text
        tokens = sum(usage["completion_tokens"] for usage in usages)
        for line in (
            'prompt_tokens_total{process="frontend"} 9.0',
            f'generation_tokens_total{{process="frontend"}} {tokens}.0',
            'request_success_total{finished_reason="length",process="frontend"} 2.0',
            'request_success_total{finished_reason="stop",process="frontend"} 1.0',
            'time_to_first_token_seconds_count{process="frontend"} 3.0',
            f'inter_token_latency_seconds_count{{process="frontend"}} {tokens - 3}.0',
            f'exit_depth_count{{process="frontend"}} {tokens}.0',
            f'exit_depth_sum{{process="frontend"}} {sum(u["loops"] for u in usages)}.0',
        ):
            assert f"depthbatch:{line}" in text


def test_what_the_engine_refuses_was_never_started(tokenizer: Tokenizer) -> None:
    """A request that no engine check lets in (max_tokens over max_model_len, after it had its places) counted as started,
    and then as a success that ended by abort."""
    with LiveServer(tokenizer) as server, httpx.Client(base_url=server.url) as http:
        for stream in (False, True):
            body = {"prompt": "abc", "max_tokens": 5000, "stream": stream}
            assert http.post("/v1/completions", json=body).status_code == 400
        text = http.get("/metrics").text
        assert "request_success_total{" not in text
        assert 'prompt_tokens_total{process="frontend"} 0.0' in text
        assert 'e2e_request_latency_seconds_count{process="frontend"} 0.0' in text


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.binary(max_size=300) | st.binary(max_size=100).map(lambda tail: b"POST /v1/completions HTTP/1.1\r\n" + tail)
)
def test_random_bytes_are_no_request(live: LiveServer, data: bytes) -> None:
    """Row "random bytes on every socket": whatever comes, the connection gets a 4xx or is closed, never a 5xx, and the
    server answers the next client."""
    port = int(live.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
        connection.sendall(data + b"\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(4096)
    assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
    assert httpx.get(live.url + "/version").status_code == 200


def test_one_key_cannot_take_all_places(tokenizer: Tokenizer) -> None:
    """Bug: one client's requests held every place, and everybody else got 503. A key has its share, by default half where
    there are several; others get in beside it, and its places come back. The engine is told whose each request is."""
    keys = {"api_key": "first, second"}
    assert HttpConfig(max_requests=6, **keys).places_per_key == 3 and HttpConfig(max_requests=6).places_per_key == 6
    assert HttpConfig(max_requests=6, max_requests_per_key=9).places_per_key == 6
    with LiveServer(
        tokenizer, engine={"slots": 1, "step_s": 0.02}, max_requests=6, max_requests_per_key=2, **keys
    ) as server:
        url, one = server.url + "/v1/completions", {"prompt": "x", "max_tokens": 1}
        first, second = ({"Authorization": f"Bearer {key}"} for key in ("first", "second"))
        running = [Background(server, {**LONG, "max_tokens": 120}, first) for _ in range(2)]
        wait_until(lambda: server.service.limit.in_flight == 2)
        refused = httpx.post(url, json=one, headers=first, timeout=LIMIT_S)
        assert refused.status_code == 503 and "2 of the 2 places" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert httpx.post(url, json=one, headers=second, timeout=60).status_code == 200
        never = httpx.post(url, json={**one, "prompt": ["x"] * 3}, headers=second, timeout=LIMIT_S)
        assert never.status_code == 400 and "this server takes 2" in never.json()["error"]["message"]
        for request in running:
            request.join()
        assert httpx.post(url, json={**one, "n": 2}, headers=first, timeout=LIMIT_S).status_code == 200
        assert server.engine.clients == [1, 1, 2, 1]


def test_a_request_has_only_so_many_sequences(tokenizer: Tokenizer) -> None:
    """Its prompts times n, whatever room there is."""
    with LiveServer(tokenizer, max_sequences=4) as server:
        url = server.url + "/v1/completions"
        for body, status in (({"n": 2}, 200), ({"n": 3}, 400)):
            answer = httpx.post(url, json={"prompt": ["x", "y"], "max_tokens": 1, **body}, timeout=LIMIT_S)
            assert answer.status_code == status
        assert "this server takes 4" in answer.json()["error"]["message"]
        assert server.engine.clients == [0]
