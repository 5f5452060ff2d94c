"""``depthbatch bench device-clock``: how well the simulated device keeps its profile's time.

A second process plays the scheduler over a real socket and sends core steps, one or two in flight. Reported is how long
after a stage's end on the device's clock its result was sent (``late_us``), and how long the device stood still between
stages (``gap_us``): with two in flight nothing but the device's own bookkeeping could make a gap.
"""

import argparse
import multiprocessing
import tempfile
import time

import numpy as np
import zmq

from depthbatch.benchmarks.record import add_output_argument, write_json
from depthbatch.common.arguments import positive, width
from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import Stage
from depthbatch.common.messages import (
    WIRE_VERSION,
    Shutdown,
    StageBatch,
    StageResult,
    WorkerCommand,
    WorkerMessage,
    WorkerReady,
)
from depthbatch.common.transport import WORKER_ENDPOINT, Router, endpoint
from depthbatch.worker.process import WorkerLink, WorkerLoop
from depthbatch.worker.simulated import SimulatedRunner, find_profile, sharpen_timers, simulated_info


def send_core_steps(
    run_dir: str, count: int, in_flight: int, rows: int, results: "multiprocessing.Queue[float]"
) -> None:
    """The scheduler's side: keeps ``in_flight`` core steps at the worker, reports the gaps between them in seconds."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = Router(context, endpoint(run_dir, WORKER_ENDPOINT), WorkerMessage)
    slots = range(1, rows + 1)
    frame = np.array([slots, [300] * rows, [1] * rows, slots], np.int32)
    sent, done, last_end = 0, 0, None
    peer = b""
    while done < count:
        router.socket.poll(1000)
        received = router.receive()
        if received is None:
            continue
        peer = received.peer
        if isinstance(received.message, StageResult):
            if last_end is not None:
                results.put(received.message.start_s - last_end)
            last_end = received.message.end_s
            done += 1
        elif not isinstance(received.message, WorkerReady):
            continue
        while sent < count and sent - done < in_flight:
            sent += 1
            router.send(peer, StageBatch(sent, Stage.CORE, rows, rows), frame.data)
    router.send(peer, Shutdown())
    router.close()
    context.term()


def measure(profile_name: str, count: int, in_flight: int, rows: int) -> dict[str, float]:
    """Runs the worker's own loop in this process; percentiles in microseconds."""
    config = EngineConfig(device=f"simulated:{profile_name}", max_num_seqs=rows)
    profile = find_profile(profile_name)
    info = simulated_info(config, profile)
    runner = SimulatedRunner(profile, info, rows)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as run_dir:
        gaps: multiprocessing.Queue[float] = spawn.Queue()
        scheduler = spawn.Process(target=send_core_steps, args=(run_dir, count, in_flight, rows, gaps))
        scheduler.start()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        link = WorkerLink(context, endpoint(run_dir, WORKER_ENDPOINT), WorkerCommand)
        try:
            link.send(WorkerReady(0, info, WIRE_VERSION))
            cpu_s = time.process_time()
            started_s = time.monotonic()
            WorkerLoop(link, runner).run()
            busy_share = (time.process_time() - cpu_s) / (time.monotonic() - started_s)
            gap_s = [gaps.get() for _ in range(count - 1)]
            scheduler.join()
        finally:  # whatever fails, nothing is left running and the context can end
            scheduler.kill()
            link.close()
            context.term()
    late_us = np.array(runner.lateness_s) * 1e6
    return {
        "in_flight": in_flight,
        "stages": count,
        "stage_ms": 1e3 * profile.stage_seconds(Stage.CORE, rows, rows * 301),
        "late_us_p50": round(float(np.percentile(late_us, 50)), 1),
        "late_us_p99": round(float(np.percentile(late_us, 99)), 1),
        "gap_us_p50": round(float(np.percentile(gap_s, 50)) * 1e6, 1),
        "gap_us_p99": round(float(np.percentile(gap_s, 99)) * 1e6, 1),
        "cpu_share": round(busy_share, 4),
    }


def add_device_clock_arguments(parser: argparse.ArgumentParser) -> None:
    """Profile and size."""
    parser.add_argument("profile", metavar="PROFILE", help="device profile: a file, or the name of a shipped one")
    parser.add_argument("--stages", type=positive, default=500)
    parser.add_argument("--rows", type=width, default=64)
    add_output_argument(parser)


def run_device_clock(args: argparse.Namespace) -> int:
    """With two stages in flight, then with one. Raises ConfigError."""
    if args.stages < 2:
        raise ConfigError(f"stages must be at least 2, not {args.stages}")
    sharpen_timers()
    write_json([measure(args.profile, args.stages, in_flight, args.rows) for in_flight in (2, 1)], args.output)
    return 0
