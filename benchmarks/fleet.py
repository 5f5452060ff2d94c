"""``depthbatch bench fleet``: many engines behind a router, in virtual time.

Each replica is the production scheduler core on a device that is a profile (as ``bench simulate``), and the router is the
one of frontend/routing.py or a plain one. Requests arrive at random; replicas may die, and what they had begun goes on at
others from its tokens and depths, as frontend/forwarding.py does it. The network, frontends and the router itself take no
virtual time; what the scheduler cores take of this machine's CPU is measured beside it (``scheduler_load``).
"""

import argparse
import heapq
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from depthbatch.benchmarks.fleet_traffic import Traffic, TrafficOptions, make_traffic
from depthbatch.benchmarks.record import add_output_argument, write_json
from depthbatch.benchmarks.trace import BLOCK_SIZE, blank_result
from depthbatch.common.arguments import natural, positive, seconds
from depthbatch.common.config import POLICIES, EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import ROW_POSITION, Stage
from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import EngineInfo, StageResult, TokenEvent
from depthbatch.frontend.routing import LOAD_BOUND, AffinityRouter, Order
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.worker.device_profile import DeviceProfile
from depthbatch.worker.simulated import find_profile

ROUTERS = ("round-robin", "requests", "loops", "prefix")
DEFAULT_KV_GIB = 60.0  # of an 80 GB device beside weights and buffers


@dataclass(frozen=True)
class Fleet:
    """What runs."""

    replicas: int
    router: str = "loops"
    width: int = 64  # W of each
    policy: str = "refill"
    prefix_caching: bool = False
    kv_blocks: int | None = None  # of a replica; None: DEFAULT_KV_GIB
    failures: int = 0  # replicas that die at fail_at_s
    fail_at_s: float = 0.0
    detect_s: float = 1.0  # from a death to the resubmission of its requests
    restart_s: float = 60.0  # from a death to the first stage of the next
    resume: bool = True  # requests go on from their tokens; False: each begins anew

    def __post_init__(self) -> None:
        if self.router not in ROUTERS:
            raise ConfigError(f"router must be one of {', '.join(ROUTERS)}, not {self.router!r}")
        if self.replicas < 1 or not 0 <= self.failures < max(self.replicas, 1):
            raise ConfigError(f"{self.failures} failures of {self.replicas} replicas: one has to be left")

    def with_replicas(self, replicas: int) -> "Fleet":
        return replace(self, replicas=replicas)


class Replica:
    """One engine."""

    def __init__(self, config: SchedulerConfig, profile: DeviceProfile) -> None:
        self._profile = profile
        self.config = config
        self.scheduler = Scheduler(config)
        self.in_flight: deque[StageResult] = deque()
        self.life = 0  # which of its lives it is in; events of former ones mean nothing
        self.up = True
        self.busy_s = 0.0
        self.real_s = 0.0  # CPU time that its scheduler took on this machine
        self.stages = 0
        self._free_s = 0.0

    def schedule(self, now_s: float) -> None:
        """Stages as far ahead as the core allows."""
        start = time.thread_time()
        while (stage := self.scheduler.next_stage(now_s)) is not None:
            header = stage.header
            kind = Stage(header.stage)
            context = int(stage.frame[ROW_POSITION].sum()) + header.rows if kind is Stage.CORE else 0
            seconds = self._profile.stage_seconds(kind, header.rows, context, header.n_tokens)
            begin = max(now_s, self._free_s)
            self._free_s = begin + seconds
            self.busy_s += seconds
            self.stages += 1
            self.in_flight.append(blank_result(stage, begin, self._free_s))
        self.real_s += time.thread_time() - start

    def complete(self, now_s: float) -> list[TokenEvent]:
        start = time.thread_time()
        events = self.scheduler.complete(self.in_flight.popleft(), now_s)
        self.real_s += time.thread_time() - start
        return events

    def die(self) -> None:
        self.up = False
        self.life += 1
        self.in_flight.clear()

    def rise(self, now_s: float) -> None:
        self.up = True
        self.scheduler = Scheduler(self.config)
        self._free_s = now_s


class Result(NamedTuple):
    """What became of each request; virtual seconds."""

    first_s: np.ndarray  # [requests] first token after arrival
    last_s: np.ndarray  # [requests] last token after arrival
    longest_gap_s: np.ndarray  # [requests] between two tokens
    victims: np.ndarray  # [requests] bool: lost its replica
    replicas: list[Replica]
    duration_s: float
    wall_s: float  # real


class Run:
    """One fleet under one traffic."""

    def __init__(self, fleet: Fleet, traffic: Traffic, profile: DeviceProfile) -> None:
        self.fleet, self.traffic = fleet, traffic
        config = scheduler_config(fleet, traffic, profile)
        self.replicas = [Replica(config, profile) for _ in range(fleet.replicas)]
        count = len(traffic.arrivals_s)
        self._count_up()
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._loads = np.zeros(fleet.replicas)  # loops or requests that each still has, as the router counts
        self._sent_load = np.zeros(count)
        self._owner = np.full(count, -1)
        self._next = 0  # of round robin
        self._affinity = AffinityRouter(LOAD_BOUND)
        self._depths: dict[int, bytearray] = {}  # of the tokens of requests that run
        self._first_s, self._last_s = np.zeros(count), np.zeros(count)
        self._gap_s, self._victims = np.zeros(count), np.zeros(count, bool)
        self._left = count

    def run(self, progress: bool = True) -> Result:
        """Until every request has its last token."""
        wall_s, fleet = time.perf_counter(), self.fleet
        arrivals_s, arrived = self.traffic.arrivals_s, 0
        for index in range(fleet.failures):
            self._at(fleet.fail_at_s, partial(self._fail, index))
        hidden = not (progress and sys.stderr.isatty())
        with tqdm(total=self._left, desc=f"{fleet.replicas} x {fleet.router}", unit="req", disable=hidden) as bar:
            while self._left:
                before = self._left
                if arrived < len(arrivals_s) and (not self._events or arrivals_s[arrived] <= self._events[0][0]):
                    self._now_s = float(arrivals_s[arrived])
                    self._submit(arrived)
                    arrived += 1
                else:
                    self._now_s, _, action = heapq.heappop(self._events)
                    action()
                if self._left < before:
                    bar.update(before - self._left)
        return Result(
            self._first_s - arrivals_s,
            self._last_s - arrivals_s,
            self._gap_s,
            self._victims,
            self.replicas,
            self._now_s,
            time.perf_counter() - wall_s,
        )

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (time_s, self._order, action))

    # --- requests

    def _submit(self, request: int) -> None:
        """To the replica that the router names."""
        traffic, generated = self.traffic, self._depths.setdefault(request, bytearray())
        loops = traffic.expected_loops[request] - sum(generated)
        order = Order(traffic.prefixes(request), loops)
        index = self._route(order)
        self._affinity.went(order, index)
        self._owner[request] = index
        self._sent_load[request] = 1.0 if self.fleet.router == "requests" else loops
        self._loads[index] += self._sent_load[request]
        replica = self.replicas[index]
        rejected = replica.scheduler.submit(traffic.submit(request, bytes(generated)), self._now_s)
        if rejected is not None:
            raise ConfigError(f"request {request} cannot be served: {rejected.reason}")
        self._work(index)

    def _route(self, order: Order) -> int:
        """One of those that are up, which some are: not all may fail."""
        up = self._up
        match self.fleet.router:
            case "round-robin":
                self._next += 1
                return up[self._next % len(up)]
            case "prefix":
                best = self._affinity.rank(order, {index: float(self._loads[index]) for index in up})[0]
                assert isinstance(best, int)
                return best
        return up[int(np.argmin(self._loads[up] if len(up) < len(self.replicas) else self._loads))]

    def _count_up(self) -> None:
        self._up = [index for index, replica in enumerate(self.replicas) if replica.up]

    def _work(self, index: int) -> None:
        """Has the replica schedule; its next result is an event."""
        replica = self.replicas[index]
        waited = bool(replica.in_flight)
        replica.schedule(self._now_s)
        if replica.in_flight and not waited:
            self._expect(index)

    def _expect(self, index: int) -> None:
        replica, life = self.replicas[index], self.replicas[index].life
        self._at(replica.in_flight[0].end_s, partial(self._complete, index, life))

    def _complete(self, index: int, life: int) -> None:
        replica = self.replicas[index]
        if replica.life != life:
            return
        now_s = self._now_s
        for event in replica.complete(now_s):
            request = event.request_id
            depths = self._depths[request]
            if not self._first_s[request]:
                self._first_s[request] = now_s
            else:
                self._gap_s[request] = max(self._gap_s[request], now_s - self._last_s[request])
            self._last_s[request] = now_s
            depths.extend(event.exit_depths)
            if event.finish_reason is not None:
                del self._depths[request]
                self._loads[index] -= self._sent_load[request]
                self._left -= 1
        if replica.in_flight:
            self._expect(index)
            replica.schedule(now_s)
        else:
            self._work(index)

    # --- deaths

    def _fail(self, index: int) -> None:
        replica, fleet = self.replicas[index], self.fleet
        lost = [request for request in self._depths if self._owner[request] == index]
        replica.die()
        self._count_up()
        self._loads[index] = 0.0
        for request in lost:
            self._victims[request] = True
            self._owner[request] = -1
            if not fleet.resume:
                self._depths[request] = bytearray()
            self._at(self._now_s + fleet.detect_s, partial(self._submit, request))
        self._at(self._now_s + fleet.restart_s, partial(self._rise, replica))

    def _rise(self, replica: Replica) -> None:
        replica.rise(self._now_s)
        self._count_up()


def scheduler_config(fleet: Fleet, traffic: Traffic, profile: DeviceProfile) -> SchedulerConfig:
    """Of each replica: a plane a loop, so that what is lost comes back by one prefill."""
    block_bytes = profile.bytes_per_kv_token * profile.r_max * BLOCK_SIZE
    info = EngineInfo(
        model="virtual", architecture="virtual", vocab_size=np.iinfo(np.int32).max, r_max=profile.r_max, r_min=1,
        default_gate=Gate.REPLAY, gates=(Gate.NONE, Gate.FIXED, Gate.REPLAY), default_threshold=1.0,
        kv_layout=KVLayout.LAST_EXITED, block_size=BLOCK_SIZE,
        num_blocks=1 + (fleet.kv_blocks or int(DEFAULT_KV_GIB * (1 << 30) / block_bytes)), kv_bytes_per_token=0,
        max_model_len=traffic.longest, boundary_layers=profile.boundary_layers, buckets=(fleet.width,), device="virtual",
        dtype="none", coda_layers=profile.boundary_layers,
    )  # fmt: skip
    options = EngineConfig(
        policy=fleet.policy, max_num_seqs=fleet.width, prefix_caching="on" if fleet.prefix_caching else "off"
    )
    return SchedulerConfig.resolve(options, info)


def quantiles(values: np.ndarray, scale: float = 1.0) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q) * scale) for q in (50, 99)} if values.size else {}


def report(fleet: Fleet, traffic: Traffic, result: Result) -> dict[str, Any]:
    """One row of a sweep."""
    outputs = traffic.output_tokens
    tpot_s = (result.last_s - result.first_s) / np.maximum(outputs - 1, 1)
    replicas, duration_s = result.replicas, result.duration_s
    row: dict[str, Any] = {
        **asdict(fleet),
        **asdict(traffic.options),
        "requests": len(outputs),
        "tokens": int(outputs.sum()),
        "duration_s": duration_s,
        "tokens_per_s": float(outputs.sum() / duration_s),
        "ttft_ms": quantiles(result.first_s, 1e3),
        "tpot_ms": quantiles(tpot_s, 1e3),
        "e2el_s": quantiles(result.last_s),
        "longest_gap_ms": quantiles(result.longest_gap_s, 1e3),
        "device_load": float(np.mean([each.busy_s for each in replicas]) / duration_s),
        "scheduler_load": float(np.max([each.real_s for each in replicas]) / duration_s),
        "scheduler_us_per_stage": 1e6 * sum(each.real_s for each in replicas) / sum(each.stages for each in replicas),
        "wall_s": result.wall_s,
    }
    if fleet.prefix_caching:
        caches = [each.scheduler.stats().prefix_cache for each in replicas]
        row["prefix_hit_rate"] = sum(c.hits for c in caches if c) / max(1, sum(c.queries for c in caches if c))
    if fleet.failures:
        lost = result.victims
        row["victims"] = int(lost.sum())
        row["victims_longest_gap_ms"] = quantiles(result.longest_gap_s[lost], 1e3)
        row["victims_e2el_s"] = quantiles(result.last_s[lost])
    return row


def meets(row: dict[str, Any], ttft_ms: float, tpot_ms: float) -> bool:
    """The goal: p99 of both."""
    return bool(row["ttft_ms"]["p99"] <= ttft_ms and row["tpot_ms"]["p99"] <= tpot_ms)


def fewest_replicas(
    probe: Callable[[int], dict[str, Any]], goal: tuple[float, float], low: int, high: int
) -> dict[str, Any]:
    """The row of the smallest fleet, of ``low`` to ``high`` replicas, that meets the goal. Raises ConfigError."""
    best = probe(high)
    if not meets(best, *goal):
        raise ConfigError(f"{high} replicas do not meet the goal: {best['ttft_ms']}, {best['tpot_ms']}")
    while low < high:
        middle = (low + high) // 2
        row = probe(middle)
        if meets(row, *goal):
            best, high = row, middle
        else:
            low = middle + 1
    return best


def add_fleet_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench fleet``."""
    parser.add_argument(
        "--profile", default="h100-ouro-1.4b", help="device profile: a file, or the name of a shipped one"
    )
    parser.add_argument("--replicas", type=positive, default=10)
    parser.add_argument(
        "--router", action="append", choices=ROUTERS, help="may be given several times (default: loops)"
    )
    parser.add_argument("--requests", type=positive, default=100_000)
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second, of all replicas together")
    parser.add_argument("--workload", default="alpaca", help="lengths: alpaca, sharegpt, arxiv")
    parser.add_argument(
        "--exits", default="0.2", help="thresholds of Ouro's exit distributions, by commas; a request draws one"
    )
    parser.add_argument(
        "--prefixes", type=natural, default=0, help="beginnings that prompts share, popular ones more often; 0 = none"
    )
    parser.add_argument("--prefix-tokens", type=positive, default=1024)
    parser.add_argument("--w", type=positive, default=64, help="W, rows of each replica")
    parser.add_argument("--policy", default="refill", choices=POLICIES)
    parser.add_argument(
        "--kv-blocks", type=positive, default=None, help=f"of a replica (default: {DEFAULT_KV_GIB:g} GiB)"
    )
    parser.add_argument("--failures", type=natural, default=0, help="replicas that die a third into the arrivals")
    parser.add_argument(
        "--detect-s", type=seconds, default=1.0, help="from a death to the resubmission of its requests"
    )
    parser.add_argument("--restart-s", type=seconds, default=60.0, help="from a death to the next life")
    parser.add_argument("--no-resume", action="store_true", help="what a dead replica had begun begins anew")
    parser.add_argument(
        "--goal",
        nargs=2,
        type=float,
        metavar=("TTFT_MS", "TPOT_MS"),
        default=None,
        help="find the fewest replicas whose p99 meet these",
    )
    parser.add_argument("--seed", type=int, default=0)
    add_output_argument(parser)


def run_fleet(args: argparse.Namespace) -> int:
    """Runs each router under the same requests. Raises ConfigError."""
    profile = find_profile(args.profile)
    options = TrafficOptions(args.workload, args.rate, args.exits, args.prefixes, args.prefix_tokens, args.seed)
    traffic = make_traffic(options, args.requests, profile.r_max)
    rows = []
    for router in args.router or ["loops"]:

        def probe(replicas: int, router: str = router) -> dict[str, Any]:
            fleet = Fleet(
                replicas, router, args.w, args.policy, args.prefixes > 0, args.kv_blocks, args.failures,
                float(traffic.arrivals_s[-1]) / 3, args.detect_s, args.restart_s, not args.no_resume,
            )  # fmt: skip
            row = report(fleet, traffic, Run(fleet, traffic, profile).run())
            print(line(row), file=sys.stderr, flush=True)
            return row

        least = args.failures + 1
        found = probe(args.replicas) if args.goal is None else fewest_replicas(probe, args.goal, least, args.replicas)
        rows.append(found)
    write_json(rows if len(rows) > 1 else rows[0], args.output)
    return 0


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    extra = f", hits {row['prefix_hit_rate']:.0%}" if "prefix_hit_rate" in row else ""
    if "victims" in row:
        extra += f", {row['victims']} lost their replica: longest gap p50 {row['victims_longest_gap_ms'].get('p50', 0):.0f} ms"
    return (
        f"{row['replicas']} replicas, {row['router']}: {row['tokens_per_s']:.0f} tokens/s, TTFT p50 {row['ttft_ms']['p50']:.0f} "
        f"p99 {row['ttft_ms']['p99']:.0f} ms, TPOT p50 {row['tpot_ms']['p50']:.1f} p99 {row['tpot_ms']['p99']:.1f} ms, device "
        f"{row['device_load']:.0%}, scheduler {row['scheduler_load']:.0%}, {row['wall_s']:.0f} s of real time{extra}"
    )
