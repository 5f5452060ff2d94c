"""``depthbatch bench frontends``: how many tokens a second the processes around the device can pass on.

The device is simulated and takes no time, so what is left is scheduler, worker process, frontends, and the client, which reads
bytes and counts events. For each number of frontends: tokens a second, and the processor time of each process a token, from which
follows who is the limit and where the scheduler would be. All of them share the machine's cores. JSON to stdout or --output, a
table to stderr.
"""

import argparse
import json
import multiprocessing
import os
import selectors
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from depthbatch.benchmarks.record import add_output_argument, write_json
from depthbatch.benchmarks.service_figures import processor_seconds, serving
from depthbatch.common.arguments import positive
from depthbatch.common.errors import ConfigError, EngineDeadError
from depthbatch.worker.device_profile import CoreCost, DeviceProfile, LinearCost, StageFlops

CHUNK_BYTES = 1 << 16
WAIT_S = 120.0
EVENT, ERROR, DONE, BODY = b"data: {", b'data: {"error"', b"data: [DONE]", b"\r\n\r\n"
TAIL_BYTES = 64  # more than stands between the last event and the end of an answer


def free_device(r_max: int) -> DeviceProfile:
    """A device on which nothing takes time."""
    nothing = LinearCost(0.0, 0.0)
    flops = StageFlops(core=1.0, boundary=1.0)
    return DeviceProfile("free", r_max, 1, CoreCost(0.0, 0.0, 0.0), nothing, nothing, nothing, flops)


def _check_status(head: bytes) -> None:
    """Raises ConfigError or EngineDeadError unless it is 200."""
    if head.startswith(b"HTTP/1.1 200"):
        return
    if head.startswith(b"HTTP/1.1 4"):
        raise ConfigError(f"the server refuses the request: {head.partition(BODY)[2].decode(errors='replace')}")
    raise EngineDeadError(f"no answer, but {head[:200]!r}")


class Read(NamedTuple):
    seconds: float  # from the first byte sent until all answers are complete
    events: int  # server-sent ones; where tokens come faster than they are passed on, several share one


def read_streams(url: str, streams: int, tokens: int, burst: int) -> Read:
    """All answers, to their end. ``burst``: connections that are opened before any is read. Raises ConfigError on an answer
    that refuses the request, EngineDeadError on any other that is not 200, and where streams have broken off."""
    address = urlsplit(url)
    body = json.dumps(
        {"prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    buffer = bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    tails: dict[socket.socket, bytes] = {}  # the last bytes of each answer
    failed: set[socket.socket] = set()
    events = broken = 0
    start_s = time.perf_counter()
    with selectors.EpollSelector() as selector:
        for number in range(streams):
            connection = socket.create_connection((address.hostname, address.port), WAIT_S)
            connection.sendall(head + body)
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ)
            if number % burst == burst - 1:
                time.sleep(0.001)
        while selector.get_map():
            ready = selector.select(WAIT_S)
            if not ready:
                raise EngineDeadError(f"no byte within {WAIT_S:g} s")
            for key, _ in ready:
                connection = key.fileobj  # type: ignore[assignment]
                try:
                    count = connection.recv_into(buffer)
                except ConnectionError:
                    count = 0
                tail = tails.get(connection)
                if tail is None:
                    _check_status(bytes(view[: min(count, 400)]))
                    tail = b""
                data = tail + view[:count]
                events += data.count(EVENT) - tail.count(EVENT)
                if ERROR in data:
                    failed.add(connection)
                tails[connection] = data[-TAIL_BYTES:]
                if not count:
                    broken += DONE not in data or connection in failed
                    selector.unregister(connection)
                    connection.close()
    if broken:
        raise EngineDeadError(f"{broken} of {streams} streams broke off before their end")
    return Read(time.perf_counter() - start_s, events)


def pids_of(run_dir: Path, frontends: int) -> dict[str, list[int]]:
    """Of a server's processes, by kind."""
    names = {"frontend": ["frontend", *(f"frontend-{n}" for n in range(1, frontends))]}
    names |= {name: [name] for name in ("scheduler", "worker")}
    return {kind: [int((run_dir / f"{name}.pid").read_text()) for name in own] for kind, own in names.items()}


def measure_one(args: argparse.Namespace, frontends: int) -> dict[str, Any]:
    """One server with so many frontends; the median of the rounds. Raises ConfigError, EngineDeadError."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="dbf") as directory:
        profile, run_dir = Path(directory) / "free.json", Path(directory) / "run"
        profile.write_bytes(msgspec.json.encode(free_device(args.r_max)))
        options = ["--device", f"simulated:{profile}", "--frontends", str(frontends), "--run-dir", str(run_dir)]
        options += ["--max-num-seqs", str(args.max_num_seqs), "--kv-layout", "last_exited", "--max-model-len", "2048"]
        options += args.serve_option
        context = multiprocessing.get_context("spawn")
        with serving("demo", options) as server, ProcessPoolExecutor(1, context) as pool:
            pool.submit(read_streams, server.http, args.max_num_seqs, 8, args.burst).result()  # warm
            pids = {**pids_of(run_dir, frontends), "client": [pool.submit(os.getpid).result()]}
            for _ in range(args.rounds):
                before = {kind: sum(map(processor_seconds, own)) for kind, own in pids.items()}
                read = pool.submit(read_streams, server.http, args.max_num_seqs, args.tokens, args.burst).result()
                tokens = args.max_num_seqs * args.tokens
                used = {kind: sum(map(processor_seconds, own)) - before[kind] for kind, own in pids.items()}
                rows.append(
                    {"tokens_per_s": tokens / read.seconds, "tokens_per_event": tokens / read.events}
                    | {f"{kind}_us_per_token": 1e6 * seconds / tokens for kind, seconds in used.items()}
                )
    median: Callable[[str], float] = lambda name: statistics.median(row[name] for row in rows)  # noqa: E731
    figures = {name: median(name) for name in rows[0]}
    return {
        "frontends": frontends,
        **figures,
        "scheduler_limit_tokens_per_s": 1e6 / figures["scheduler_us_per_token"],
        "tokens_per_s_by_round": [row["tokens_per_s"] for row in rows],
    }


def add_frontends_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes, and options of the server."""
    parser.add_argument("--frontends", type=positive, nargs="+", default=[1, 2], help="numbers of frontends to measure")
    parser.add_argument("--max-num-seqs", type=positive, default=512, help="W, and streams at once")
    parser.add_argument("--tokens", type=positive, default=400, help="of each stream")
    parser.add_argument("--r-max", type=positive, default=4)
    parser.add_argument("--rounds", type=positive, default=3, help="on each server; the median counts")
    parser.add_argument("--burst", type=positive, default=64, help="connections that are opened without a pause")
    parser.add_argument("--serve-option", action="append", default=[], metavar="--OPTION=VALUE", help="may be repeated")
    add_output_argument(parser)


def run_frontends(args: argparse.Namespace) -> int:
    """Raises ConfigError, EngineDeadError."""
    rows = [measure_one(args, frontends) for frontends in args.frontends]
    write_json(
        {
            "command": "depthbatch bench frontends",
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "max_num_seqs": args.max_num_seqs,
            "serve_options": args.serve_option,
            "rows": rows,
        },
        args.output,
    )
    print(
        "frontends  tokens/s  tokens an event   us of processor a token: frontends  scheduler  worker  client",
        file=sys.stderr,
    )
    for row in rows:
        used = "  ".join(
            f"{row[f'{kind}_us_per_token']:9.1f}" for kind in ("frontend", "scheduler", "worker", "client")
        )
        print(
            f"{row['frontends']:9d}  {row['tokens_per_s']:8.0f}  {row['tokens_per_event']:15.1f}   {used}",
            file=sys.stderr,
        )
    return 0
