"""The load generator measures what it says: by hand-made times, and against small servers of both kinds."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq

from depthbatch.benchmarks import clients
from depthbatch.benchmarks.clients import Endpoint, NativeClient, OpenAIClient
from depthbatch.benchmarks.load import RequestTimes, add_serve_arguments, parse_goodput, run_serve, send_all, summarise
from depthbatch.benchmarks.synthetic import arrival_times
from depthbatch.benchmarks.workload import Workload, WorkloadRequest
from depthbatch.common.errors import ConfigError
from depthbatch.deploy.cli.main import OneLineParser

# --- arrivals


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_burstiness(burstiness: float) -> None:
    """Mean gap 1 / rate and squared coefficient of variation 1 / burstiness, within six standard errors."""
    gaps = np.diff(arrival_times(40_000, 5.0, burstiness, seed=1))
    assert gaps.mean() == pytest.approx(0.2, rel=6 / np.sqrt(40_000 * burstiness))
    assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(1 / burstiness, rel=0.12)


def test_arrivals_at_once_and_bad_rates() -> None:
    assert arrival_times(3, float("inf")).tolist() == [0, 0, 0]
    assert arrival_times(3, 2.0)[0] == 0
    for rate, burstiness in ((0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, 0.0)):
        with pytest.raises(ConfigError):
            arrival_times(3, rate, burstiness)


# --- figures


def test_figures_by_hand() -> None:
    """Definitions of ``vllm bench serve`` on two requests whose figures can be done in the head."""
    first = RequestTimes(10, sent_s=1.0, output_tokens=3, piece_s=[1.5, 1.6, 1.9])
    second = RequestTimes(20, sent_s=2.0, output_tokens=1, piece_s=[2.1])
    broken = RequestTimes(5, sent_s=3.0, error="refused")
    figures = summarise([first, second, broken], 2.0, {"ttft": 0.2}, (50.0, 99.0))
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 4)
    assert figures["request_throughput"] == 1.0 and figures["output_throughput"] == 2.0
    assert figures["request_goodput"] == 0.5  # only the second has its first token within 0.2 s
    assert figures["mean_ttft_ms"] == pytest.approx(300) and figures["p50_ttft_ms"] == pytest.approx(300)
    assert figures["mean_tpot_ms"] == pytest.approx(200)  # (0.9 - 0.5) / 2, of the first alone
    assert figures["mean_itl_ms"] == pytest.approx(200) and figures["p99_itl_ms"] == pytest.approx(298)
    assert figures["mean_e2el_ms"] == pytest.approx(500)
    assert figures["normalized_latency_s"] == pytest.approx((0.9 / 3 + 0.1) / 2)


def test_figures_without_any_success() -> None:
    figures = summarise([RequestTimes(1, 0.0, error="x")], 1.0, {})
    assert figures["completed"] == 0 and figures["mean_ttft_ms"] == 0.0 and figures["request_goodput"] is None


@pytest.mark.parametrize("bad", ["ttft", "ttft:x", "speed:1", "ttft:-1"])
def test_bad_goodput_targets(bad: str) -> None:
    with pytest.raises(ConfigError, match="goodput"):
        parse_goodput([bad])


def test_goodput_targets() -> None:
    assert parse_goodput(["ttft:500", "tpot:50.5"]) == {"ttft": 0.5, "tpot": 0.0505}


# --- HTTP

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]


class FakeOpenAI:
    """Answers ``/v1/models`` and streams ``max_tokens`` events. Records bodies and the most requests at a time."""

    def __init__(self, chunked: bool = True, fail_on: str = "") -> None:
        self.bodies: list[dict[str, object]] = []
        self.running = self.most_running = 0
        self._chunked = chunked
        self._fail_on = fail_on

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            body = b'{"data": [{"id": "fake"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        else:
            length = int(next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))[15:])
            self.bodies.append(json.loads(await reader.readexactly(length)))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            await self._stream(writer, int(self.bodies[-1]["max_tokens"]))  # type: ignore[call-overload]
            self.running -= 1
        await writer.drain()
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, tokens: int) -> None:
        if self._fail_on == "status":
            writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nfull")
            return
        writer.write(b"HTTP/1.1 200 OK\r\n" + (b"Transfer-Encoding: chunked\r\n\r\n" if self._chunked else b"\r\n"))
        events = [{"choices": [{"text": "x"}]}] * tokens + [{"choices": [], "usage": {"completion_tokens": tokens}}]
        text = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
        if self._fail_on == "cut":
            text = text[: len(text) // 2]
        for at in range(0, len(text), 37):  # pieces that respect no line
            part = text[at : at + 37]
            writer.write(b"%x\r\n%s\r\n" % (len(part), part) if self._chunked else part)
            await writer.drain()
            await asyncio.sleep(0)
        if self._chunked and self._fail_on != "cut":
            writer.write(b"0\r\n\r\n")


@contextmanager
def running(server: FakeOpenAI) -> Iterator[str]:
    """The server in a thread of its own; yields its address."""
    ready, address = threading.Event(), []
    loop = asyncio.new_event_loop()

    async def start() -> None:
        listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        address.append(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        ready.set()

    def serve() -> None:
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(5)
    yield address[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)


WORKLOAD = Workload(tuple(WorkloadRequest(5, 4 + i) for i in range(8)))


@pytest.mark.parametrize("chunked", [True, False])
def test_openai_server_is_measured_in_full(chunked: bool) -> None:
    """Every event counts once, however the bytes are cut; usage gives the tokens; the prompt goes out as ids."""
    server = FakeOpenAI(chunked)
    with running(server) as url:
        client = OpenAIClient(Endpoint(url + "/v1"), "fake", {"exit_threshold": 0.5})
        times = asyncio.run(send_all(client, WORKLOAD, [0.0] * 8, None, 100))
    assert [t.output_tokens for t in times] == [r.output_tokens for r in WORKLOAD.requests]
    assert [len(t.piece_s) for t in times] == [r.output_tokens for r in WORKLOAD.requests]
    assert all(t.ok and t.ttft_s > 0 for t in times)
    assert all(len(body["prompt"]) == 5 and body["exit_threshold"] == 0.5 for body in server.bodies)  # type: ignore[arg-type]


def test_concurrency_limit_holds() -> None:
    server = FakeOpenAI()
    with running(server) as url:
        asyncio.run(send_all(OpenAIClient(Endpoint(url), "m", {}), WORKLOAD, [0.0] * 8, 2, 100))
    assert server.most_running <= 2


@pytest.mark.parametrize(("fail_on", "message"), [("status", "HTTP 503: full"), ("cut", "cut off")])
def test_failures_are_counted_not_measured(fail_on: str, message: str) -> None:
    server = FakeOpenAI(fail_on=fail_on)
    with running(server) as url:
        times = asyncio.run(send_all(OpenAIClient(Endpoint(url), "m", {}), WORKLOAD, [0.0] * 8, None, 100))
    assert all(not t.ok and message in str(t.error) for t in times)


def test_command_writes_the_keys_of_vllm(tmp_path: Path) -> None:
    """Another server's dashboards read these names."""
    parser = OneLineParser()
    add_serve_arguments(parser)
    with running(FakeOpenAI()) as url:
        options = ["--url", url, "--workload", "alpaca", "--requests", "5", "--request-rate", "200"]
        args = parser.parse_args([*options, "--goodput", "ttft:60000", "--output", str(tmp_path / "o.json")])
        assert run_serve(args) == 0
    result = json.loads((tmp_path / "o.json").read_text())
    assert result["model_id"] == "fake" and result["completed"] == 5
    assert result["request_goodput"] == result["request_throughput"]
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", f"p99_{name}_ms"} <= set(result)
    assert {"output_throughput", "total_token_throughput", "normalized_latency_s", "burstiness"} <= set(result)


def test_server_that_is_not_there_is_named() -> None:
    parser = OneLineParser()
    add_serve_arguments(parser)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9"):
        run_serve(parser.parse_args(["--url", "http://127.0.0.1:9"]))
    with pytest.raises(ConfigError, match="not an http"):
        Endpoint("ftp://x")


def test_native_server_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the load waited for ever, since zmq connects to what may come."""
    parser = OneLineParser()
    add_serve_arguments(parser)
    monkeypatch.setattr(clients, "ANSWER_S", 0)
    with pytest.raises(ConfigError, match=r"nobody: no answer within 0 s"):
        run_serve(parser.parse_args(["--url", f"ipc://{tmp_path}/nobody"]))


# --- native API


def answer_natively(address: str, count: int, bodies: list[dict[str, object]]) -> None:
    """A ROUTER that answers ``count`` submissions; odd ids with an error."""
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(address)
    for _ in range(count):
        peer, data = socket.recv_multipart()
        message = msgpack.unpackb(data)
        bodies.append(message)

        def send(**fields: object) -> None:
            socket.send_multipart([peer, msgpack.packb({"id": message["id"], **fields})])  # noqa: B023

        if message["id"] % 2:
            send(type="error", message="no room")
            continue
        for _ in range(message["params"]["max_tokens"] // 2):
            send(type="tokens", token_ids=[1, 2], text="", exit_depths=[1, 2])
        send(type="finished", finish_reason="length")
    socket.close(1000)


def test_native_api_counts_tokens_and_replays_depths(tmp_path: Path) -> None:
    address, bodies = f"ipc://{tmp_path}/api", []  # type: ignore[var-annotated]
    thread = threading.Thread(target=answer_natively, args=(address, 4, bodies))
    thread.start()
    workload = Workload(tuple(WorkloadRequest(3, 6, exit_depths=(2, 3)) for _ in range(4)))

    async def run() -> list[RequestTimes]:
        client = NativeClient(address)
        try:
            return await send_all(client, workload, [0.0] * 4, None, 10)
        finally:
            await client.close()

    times = asyncio.run(run())
    thread.join(5)
    assert sorted(t.output_tokens for t in times if t.ok) == [6, 6]
    assert [t.error for t in times if not t.ok] == ["ServerError: no room"] * 2
    assert all(body["params"]["exit_depths"] == [2, 3] for body in bodies)  # type: ignore[index]
