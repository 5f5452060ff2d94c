"""``depthbatch bench service``: what the HTTP service costs and stands, in one run on one server.

Starts ``depthbatch serve`` and measures, side by side: the latency per token that HTTP adds to the native ZMQ API; the
frontend's processor time per token by either; many streams at once, with the frontend's file descriptors; /health while
requests arrive at twice the rate that the server can serve. JSON to stdout or --output, a table to stderr. Client and server share the machine's cores.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import numpy as np

from depthbatch.benchmarks.clients import Endpoint, NativeClient, OpenAIClient
from depthbatch.benchmarks.load import RequestTimes, send_all
from depthbatch.benchmarks.record import add_output_argument, write_json
from depthbatch.benchmarks.synthetic import arrival_times
from depthbatch.benchmarks.workload import Workload, WorkloadRequest
from depthbatch.common.arguments import positive, seconds, width
from depthbatch.common.errors import USER_ERROR, ConfigError, EngineDeadError

START_S = 120.0
VOCAB_SIZE = 256  # prompt ids are drawn below this
PROBE_EVERY_S = 0.02


class Address(NamedTuple):
    """A running server."""

    http: str
    native: str


@contextmanager
def serving(model: str, options: Sequence[str]) -> Iterator[Address]:
    """``depthbatch serve`` on any free port. When it does not start, raises with what it said: ConfigError where its options are
    wrong, else EngineDeadError."""
    with tempfile.NamedTemporaryFile("w+") as log:
        command = [sys.executable, "-m", "depthbatch", "serve", model, "--port", "0", *options]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield _wait_until_ready(process, Path(log.name))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", log: Path) -> Address:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        found = re.search(r"ready at (\S+) \(native API at (\S+)\)", log.read_text())
        if found is not None:
            return Address(found[1], found[2])
        time.sleep(0.05)
    said = (log.read_text().splitlines() or ["no output"])[-1].removeprefix("depthbatch: error: ")
    kind = ConfigError if process.poll() == USER_ERROR else EngineDeadError
    raise kind(f"the server did not start: {said}")


def workload(requests: int, prompt_tokens: int, output_tokens: int) -> Workload:
    return Workload((WorkloadRequest(prompt_tokens, output_tokens),) * requests)


async def load(
    address: str, model: str, requests: Workload, rate: float = float("inf"), concurrency: int | None = None
) -> list[RequestTimes]:
    """Times of every request, by either API; ``rate``: arrivals a second."""
    client = NativeClient(address) if address.startswith("ipc") else OpenAIClient(Endpoint(address), model, {})
    try:
        arrivals = arrival_times(len(requests.requests), rate, 1.0, 0).tolist()
        return await send_all(client, requests, arrivals, concurrency, VOCAB_SIZE)
    finally:
        await client.close()


# --- latency per token


def added_latency(server: Address, model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Both APIs in turn, round by round, so that what else the machine does falls on both."""
    rows = []
    for concurrency in args.concurrency:
        requests = workload(max(concurrency, args.requests), args.prompt_tokens, args.output_tokens)
        rounds: dict[str, list[float]] = {"http": [], "zmq": []}
        for _ in range(args.rounds):
            for name, address in (("http", server.http), ("zmq", server.native)):
                times = asyncio.run(load(address, model, requests, concurrency=concurrency))
                rounds[name].append(statistics.median(1e3 * t.tpot_s for t in times if t.ok and t.tpot_s is not None))
        added = [http - zmq for http, zmq in zip(rounds["http"], rounds["zmq"], strict=True)]
        rows.append(
            {
                "concurrency": concurrency,
                "http_tpot_ms": statistics.median(rounds["http"]),
                "zmq_tpot_ms": statistics.median(rounds["zmq"]),
                "added_ms_per_token": statistics.median(added),
                "added_ms_by_round": added,
            }
        )
    return rows


# --- processor time per token


def processor_time(server: Address, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Of the frontend, all its threads, per output token: both APIs in turn. The start of a request is in it, spread
    over its tokens. What else the machine does falls on the wall clock, not on this one."""
    pid = _health(server)["processes"]["frontend"]["pid"]
    requests = workload(args.processor_streams, args.prompt_tokens, args.processor_tokens)
    rounds: dict[str, list[float]] = {"http": [], "zmq": []}
    for _ in range(args.rounds):
        for name, address in (("http", server.http), ("zmq", server.native)):
            before_s = processor_seconds(pid)
            times = asyncio.run(load(address, model, requests))
            used_s = processor_seconds(pid) - before_s
            rounds[name].append(1e6 * used_s / sum(t.output_tokens for t in times))
    return {
        "streams": args.processor_streams,
        "tokens_of_each": args.processor_tokens,
        "http_us_per_token": statistics.median(rounds["http"]),
        "zmq_us_per_token": statistics.median(rounds["zmq"]),
        "us_per_token_by_round": rounds,
    }


def processor_seconds(pid: int) -> float:
    """User and system time of all threads of a process, in the kernel's ticks (10 ms)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name before may hold spaces
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- many streams


async def _count_descriptors(pid: int, counts: list[int]) -> None:
    while True:
        counts.append(len(os.listdir(f"/proc/{pid}/fd")))
        await asyncio.sleep(0.05)


async def _burst(server: Address, model: str, requests: Workload, pid: int) -> tuple[list[RequestTimes], list[int]]:
    counts: list[int] = []
    counter = asyncio.create_task(_count_descriptors(pid, counts))
    try:
        return await load(server.http, model, requests), counts
    finally:
        counter.cancel()


def many_streams(server: Address, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """All streams at once, twice. Descriptors before, at most while they were open, and after."""
    pid = _health(server)["processes"]["frontend"]["pid"]
    requests = workload(args.streams, args.prompt_tokens, args.stream_tokens)
    asyncio.run(load(server.http, model, workload(8, 4, 4)))  # what is opened once is open now
    bursts = []
    for _ in range(2):
        before = _settled_descriptors(pid)
        start_s = time.perf_counter()
        times, counts = asyncio.run(_burst(server, model, requests, pid))
        bursts.append(
            {
                "streams": args.streams,
                "complete": sum(t.ok and t.output_tokens == args.stream_tokens for t in times),
                "failed": sorted({t.error for t in times if t.error is not None}),
                "tokens": sum(t.output_tokens for t in times),
                "tokens_expected": args.streams * args.stream_tokens,
                "duration_s": time.perf_counter() - start_s,
                "descriptors_before": before,
                "descriptors_most": max(counts),
                "descriptors_after": _settled_descriptors(pid),
            }
        )
    return {"lost_tokens": sum(b["tokens_expected"] - b["tokens"] for b in bursts), "bursts": bursts}


def _settled_descriptors(pid: int) -> int:
    """Once connections that the clients have closed are closed here, too: when the count has stood for half a second."""
    count, since_s = -1, time.monotonic()
    while time.monotonic() - since_s < 0.5:
        now = len(os.listdir(f"/proc/{pid}/fd"))
        if now != count:
            count, since_s = now, time.monotonic()
        time.sleep(0.05)
    return count


# --- health under overload


def probe_health(url: str, duration_s: float) -> list[tuple[int, float]]:
    """Status and milliseconds of /health, asked every PROBE_EVERY_S on a connection of its own each."""
    answers = []
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        start_s = time.perf_counter()
        try:
            with urlopen(url + "/health", timeout=10) as answer:
                answer.read()
                status = answer.status
        except OSError as error:
            status = getattr(error, "code", 0)
        answers.append((status, 1e3 * (time.perf_counter() - start_s)))
        time.sleep(PROBE_EVERY_S)
    return answers


def health_at_twice_capacity(server: Address, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Capacity is what the server completes a second when it always has enough to do; then twice that rate arrives."""
    full = workload(args.capacity_requests, args.prompt_tokens, args.stream_tokens)
    start_s = time.perf_counter()
    asyncio.run(load(server.http, model, full, concurrency=2 * args.max_num_seqs))
    capacity = args.capacity_requests / (time.perf_counter() - start_s)
    over = workload(round(2 * capacity * args.overload_s), args.prompt_tokens, args.stream_tokens)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(probe_health, server.http, 0.1).result()  # its start is not part of the measurement
        probing = pool.submit(probe_health, server.http, args.overload_s)
        times = asyncio.run(load(server.http, model, over, rate=2 * capacity))
        answers = probing.result()
    milliseconds = [ms for _, ms in answers]
    return {
        "capacity_requests_per_s": capacity,
        "arrivals_per_s": 2 * capacity,
        "overload_s": args.overload_s,
        "completed": sum(t.ok for t in times),
        "refused": sum(not t.ok for t in times),
        "probes": len(answers),
        "statuses": {str(status): [s for s, _ in answers].count(status) for status in {s for s, _ in answers}},
        "p50_ms": float(np.percentile(milliseconds, 50)),
        "p99_ms": float(np.percentile(milliseconds, 99)),
        "max_ms": max(milliseconds),
    }


def _health(server: Address) -> Any:
    with urlopen(server.http + "/health", timeout=10) as answer:
        return json.load(answer)


def add_service_figures_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, sizes of each measurement, options of the server."""
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help="directory, repo id or 'demo'")
    parser.add_argument(
        "--concurrency", type=positive, nargs="+", default=[1, 16, 64], help="streams at a time, for latency"
    )
    parser.add_argument("--rounds", type=positive, default=3, help="of both APIs, for latency")
    parser.add_argument("--requests", type=positive, default=16, help="of a round, at least the concurrency")
    parser.add_argument("--prompt-tokens", type=positive, default=8)
    parser.add_argument("--output-tokens", type=positive, default=64, help="of a request, for latency")
    parser.add_argument("--processor-streams", type=positive, default=32, help="at a time, for processor time")
    parser.add_argument("--processor-tokens", type=positive, default=512, help="of each of them")
    parser.add_argument("--streams", type=positive, default=1000, help="at once")
    parser.add_argument("--stream-tokens", type=positive, default=16, help="of each, there and under overload")
    parser.add_argument("--capacity-requests", type=positive, default=1000)
    parser.add_argument("--overload-s", type=seconds, default=15.0)
    parser.add_argument("--max-num-seqs", type=width, default=64, help="W of the server")
    parser.add_argument("--serve-option", action="append", default=[], metavar="--OPTION=VALUE", help="may be repeated")
    add_output_argument(parser)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All four, in turn, on one server. Raises EngineDeadError."""
    options = ["--max-num-seqs", str(args.max_num_seqs), *args.serve_option]
    with serving(args.model, options) as server:
        asyncio.run(load(server.http, args.model, workload(args.max_num_seqs, args.prompt_tokens, 4)))  # warm
        return {
            "command": f"depthbatch bench service {args.model}",
            "cores": os.cpu_count(),
            "load_average_before": os.getloadavg()[0],
            "max_num_seqs": args.max_num_seqs,
            "added_latency": added_latency(server, args.model, args),
            "processor_time": processor_time(server, args.model, args),
            "streams": many_streams(server, args.model, args),
            "health": health_at_twice_capacity(server, args.model, args),
        }


def print_figures(figures: dict[str, Any]) -> None:
    """The four on stderr."""
    for row in figures["added_latency"]:
        http, zmq, added = (row[name] for name in ("http_tpot_ms", "zmq_tpot_ms", "added_ms_per_token"))
        name = f"{row['concurrency']} streams, ms per token"
        print(f"{name:<28}HTTP {http:.3f}  ZMQ {zmq:.3f}  added {added:+.3f}", file=sys.stderr)
    used = figures["processor_time"]
    name = f"{used['streams']} streams, processor"
    text = "HTTP {http_us_per_token:.1f}, ZMQ {zmq_us_per_token:.1f} us of the frontend's time per token".format(**used)
    print(f"{name:<28}{text}", file=sys.stderr)
    for burst in figures["streams"]["bursts"]:
        counts = "{descriptors_before}, {descriptors_most}, {descriptors_after}".format(**burst)
        name = f"{burst['streams']} streams at once"
        print(f"{name:<28}{burst['complete']} complete, descriptors before, most, after: {counts}", file=sys.stderr)
    health = figures["health"]
    text = "p50 {p50_ms:.1f}, p99 {p99_ms:.1f}, max {max_ms:.1f} ms of {probes}, statuses {statuses}".format(**health)
    print(f"{'/health at twice capacity':<28}{text}", file=sys.stderr)


def run_service_figures(args: argparse.Namespace) -> int:
    """Measures on a server of its own. Raises EngineDeadError."""
    figures = measure(args)
    write_json(figures, args.output)
    print_figures(figures)
    return 0
