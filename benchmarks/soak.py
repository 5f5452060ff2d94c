"""``depthbatch bench soak``: a server of its own at a share of its capacity for a long time, minute by minute.

Capacity is what the server completes a second when it always has enough to do. Then requests with the lengths of a workload arrive at
random at a share of that rate. For each minute: what arrived in it and how long it took, and at its end memory, descriptors and
processor time of every process. At the end nothing may be left of any request, and what the server counted must be what its clients got. JSON to
stdout or --output, a line a minute to stderr. Client and server share the machine's cores.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from depthbatch.benchmarks.clients import Endpoint, OpenAIClient
from depthbatch.benchmarks.load import RequestTimes, send_all, summarise
from depthbatch.benchmarks.record import add_output_argument, write_json
from depthbatch.benchmarks.service_figures import VOCAB_SIZE, Address, processor_seconds, serving
from depthbatch.benchmarks.synthetic import LENGTH_LAWS, arrival_times, draw_lengths
from depthbatch.benchmarks.workload import Workload, WorkloadRequest
from depthbatch.common.arguments import positive, seconds, seed, width
from depthbatch.common.errors import ConfigError

WARM_SHARE = 1 / 6  # of the minutes, after which memory should not grow any more
FIGURES = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "output_throughput")


def requests_of(name: str, count: int, most_tokens: int, seed: int) -> Workload:
    """So many requests with the lengths of a workload, those that fit into ``most_tokens``. Raises ConfigError when of a few
    hundred none does."""
    rng, requests = np.random.default_rng(seed), list[WorkloadRequest]()
    while len(requests) < count:
        prompts, outputs = draw_lengths(name, count + 300, rng)
        fits = prompts + outputs <= most_tokens
        if not fits.any():
            raise ConfigError(f"no request of {name} fits into --most-tokens {most_tokens}")
        pairs = zip(prompts[fits].tolist(), outputs[fits].tolist(), strict=True)
        requests += [WorkloadRequest(prompt, output) for prompt, output in pairs]
    return Workload(tuple(requests[:count]))


def counters(metrics: str) -> dict[str, float]:
    """Sums over labels of every series of a ``/metrics`` page, by name without the prefix."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            name = sample.name.partition(":")[2] or sample.name
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def use_of(pid: int) -> dict[str, float]:
    """Of a process: resident memory in MiB, open descriptors, processor seconds since its start."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = int(status.partition("VmRSS:")[2].split()[0])
    return {
        "resident_mib": kib / 1024,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "processor_s": processor_seconds(pid),
    }


class Soak:
    """One server under load; everything on one event loop."""

    def __init__(self, server: Address, args: argparse.Namespace) -> None:
        self._endpoint = Endpoint(server.http)
        self._args = args
        self.completed = self.failed = self.lost_tokens = 0
        self.errors: set[str] = set()

    async def capacity(self) -> float:
        """Requests completed a second with twice W of them at a time."""
        args = self._args
        requests = requests_of(args.workload, args.capacity_requests, args.most_tokens, args.seed)
        start_s = time.perf_counter()
        await self._send(requests, float("inf"), 2 * args.max_num_seqs, args.seed)
        return float(args.capacity_requests / (time.perf_counter() - start_s))

    async def run(self, rate: float) -> list[dict[str, Any]]:
        """A row for each minute (``--minute-s`` seconds) of its arrivals; a minute's last answers may come in the next one."""
        args, minutes, rows = self._args, list[asyncio.Task[list[RequestTimes]]](), []
        before = await self.processes()
        start_s = time.monotonic()
        for minute in range(args.minutes):
            count = max(1, round(rate * args.minute_s))
            requests = requests_of(args.workload, count, args.most_tokens, args.seed + 1 + minute)
            minutes.append(asyncio.create_task(self._send(requests, rate, None, args.seed + 1 + minute)))
            await asyncio.sleep(start_s + (minute + 1) * args.minute_s - time.monotonic())
            now = await self.processes()
            rows.append({"minute": minute + 1, "processes": _since(before, now, args.minute_s)})
            before = now
            if minute:
                await self._add_figures(rows[-2], minutes[-2])
        await self._add_figures(rows[-1], minutes[-1])
        return rows

    async def _add_figures(self, row: dict[str, Any], sent: "asyncio.Task[list[RequestTimes]]") -> None:
        figures = summarise(await sent, self._args.minute_s, {})
        row |= {"completed": figures["completed"], "failed": figures["failed"]} | {n: figures[n] for n in FIGURES}
        print(
            f"minute {row['minute']}: {row['completed']} completed, {row['failed']} failed, p99 of the first token "
            f"{row['p99_ttft_ms']:.0f} ms, "
            + ", ".join(f"{name} {use['resident_mib']:.1f} MiB" for name, use in row["processes"].items()),
            file=sys.stderr,
        )

    async def _send(
        self, requests: Workload, rate: float, concurrency: int | None, arrival_seed: int
    ) -> list[RequestTimes]:
        client = OpenAIClient(self._endpoint, self._args.model, {})
        try:
            arrivals = arrival_times(len(requests.requests), rate, 1.0, arrival_seed).tolist()
            times = await send_all(client, requests, arrivals, concurrency, VOCAB_SIZE, quiet=True)
        finally:
            await client.close()
        for request, seen in zip(requests.requests, times, strict=True):
            self.completed += seen.ok
            self.failed += not seen.ok
            self.lost_tokens += request.output_tokens - seen.output_tokens
        self.errors |= {seen.error for seen in times if seen.error is not None}
        return times

    async def processes(self) -> dict[str, dict[str, float]]:
        """Memory, descriptors and processor time of each process of the server, and its restarts so far."""
        health = await self._endpoint.get_json("/health")
        return {
            name: use_of(process["pid"]) | {"restarts": process["restarts"]}
            for name, process in health["processes"].items()
        }

    async def counters(self) -> dict[str, float]:
        """The server's own figures once nothing runs any more."""
        while (now := counters(await self._endpoint.get_text("/metrics")))["num_requests_running"]:
            await asyncio.sleep(0.1)
        return now


def _since(
    before: Mapping[str, Mapping[str, float]], now: Mapping[str, Mapping[str, float]], period_s: float
) -> dict[str, dict[str, float]]:
    """Processor time as a share of a core over the period, the rest as it is now."""
    return {
        name: {k: v for k, v in use.items() if k != "processor_s"}
        | {"cores": (use["processor_s"] - before[name]["processor_s"]) / period_s}
        for name, use in now.items()
    }


def memory_growth(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of each process, from the end of the warm minutes to the last minute, as a share of the former."""
    warm, last = rows[int(WARM_SHARE * len(rows))]["processes"], rows[-1]["processes"]
    return {name: last[name]["resident_mib"] / use["resident_mib"] - 1 for name, use in warm.items()}


def add_soak_arguments(parser: argparse.ArgumentParser) -> None:
    """How long, at what share of capacity, with which lengths; options of the server."""
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help="directory, repo id or 'demo'")
    parser.add_argument("--minutes", type=positive, default=60)
    parser.add_argument("--minute-s", type=seconds, default=60.0, help="seconds of one; fewer for a trial")
    parser.add_argument("--share", type=seconds, default=0.8, help="of the measured capacity")
    parser.add_argument("--workload", choices=tuple(LENGTH_LAWS), default="alpaca", help="whose lengths requests have")
    parser.add_argument("--most-tokens", type=positive, default=256, help="of a request; longer ones are not drawn")
    parser.add_argument("--capacity-requests", type=positive, default=1000, help="for the measurement of capacity")
    parser.add_argument("--max-num-seqs", type=width, default=32, help="W of the server")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--serve-option", action="append", default=[], metavar="--OPTION=VALUE", help="may be repeated")
    add_output_argument(parser)


async def measure(server: Address, args: argparse.Namespace) -> dict[str, Any]:
    """All of it, on a server that is ready."""
    soak = Soak(server, args)
    capacity = await soak.capacity()
    before, completed = await soak.counters(), soak.completed
    rows = await soak.run(args.share * capacity)
    after = await soak.counters()
    return {
        "command": f"depthbatch bench soak {args.model}",
        "cores": os.cpu_count(),
        "max_num_seqs": args.max_num_seqs,
        "serve_options": args.serve_option,
        "workload": args.workload,
        "minutes": args.minutes,
        "minute_s": args.minute_s,
        "capacity_requests_per_s": capacity,
        "arrivals_per_s": args.share * capacity,
        "completed": soak.completed - completed,
        "counted_by_server": after["request_success_total"] - before["request_success_total"],
        "failed": soak.failed,
        "errors": sorted(soak.errors),
        "lost_tokens": soak.lost_tokens,
        "restarts": {name: use["restarts"] for name, use in (await soak.processes()).items()},
        "left": {name: after[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")},
        "memory_growth": memory_growth(rows),
        "rows": rows,
    }


def run_soak(args: argparse.Namespace) -> int:
    """Exit status 1 when a request failed, a token was lost, a process had to be started again or something is left. Raises
    ConfigError, EngineDeadError."""
    if not args.minute_s or not args.share:
        raise ConfigError("--minute-s and --share must be above 0")
    with serving(args.model, ["--max-num-seqs", str(args.max_num_seqs), *args.serve_option]) as server:
        figures = asyncio.run(measure(server, args))
    write_json(figures, args.output)
    growth = ", ".join(f"{name} {100 * share:+.2f} %" for name, share in figures["memory_growth"].items())
    print(
        f"{figures['completed']} completed ({figures['counted_by_server']:.0f} counted by the server), "
        f"{figures['failed']} failed, {figures['lost_tokens']} tokens lost; memory {growth}",
        file=sys.stderr,
    )
    wrong = figures["failed"] or figures["lost_tokens"] or any(figures["restarts"].values())
    return int(bool(wrong or any(figures["left"].values()) or figures["completed"] != figures["counted_by_server"]))
