"""Kills the frontend of a running server at random moments while /health is asked all along.

By hand: ``python tests/fakes/soak.py --kills 20``. Each probe is a connection of its own and ends in one of
three ways: an answer, a refusal, a reset. One that ends in none of them within its limit hangs, which is what is
looked for: a socket that the kernel accepts for and nobody reads.
"""

import argparse
import contextlib
import os
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from depthbatch.frontend.restarts import MAX_RESTARTS, RESTART_WINDOW_S
from fakes.serve_process import DEVICE, ServeProcess, is_alive, wait_until

REQUEST = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


class Probe(NamedTuple):
    """How one question ended, and after how many seconds."""

    end: str  # "200", "503", "refused", "reset", "hung"
    seconds: float


def probe_health(port: int, limit_s: float) -> Probe:
    """One question."""
    start_s = time.monotonic()
    try:
        with socket.create_connection(("127.0.0.1", port), limit_s) as connection:
            connection.sendall(REQUEST)
            line = connection.makefile("rb").readline()
            end = line.split()[1].decode() if line else "reset"
    except ConnectionRefusedError:
        end = "refused"
    except (ConnectionResetError, BrokenPipeError):
        end = "reset"
    except TimeoutError:
        end = "hung"
    return Probe(end, time.monotonic() - start_s)


class Prober:
    """Asks every ``period_s`` from a thread of its own, inside the ``with`` block."""

    def __init__(self, port: int, limit_s: float, period_s: float = 0.05) -> None:
        self.probes: list[Probe] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(port, limit_s, period_s))

    def _run(self, port: int, limit_s: float, period_s: float) -> None:
        while not self._stop.wait(period_s):
            self.probes.append(probe_health(port, limit_s))

    def __enter__(self) -> "Prober":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def soak(server: ServeProcess, kills: int, limit_s: float, seed: int = 0) -> list[Probe]:
    """Kills the frontend ``kills`` times, in start-up as well as in service; ends when it answers again."""
    draw = random.Random(seed)
    path = Path(server.supervisor_socket().removeprefix("unix://")).with_name("frontend.pid")
    killed, times_s = 0, deque[float](maxlen=MAX_RESTARTS - 1)  # with that many in a window, the next is none too many
    with Prober(server.port, limit_s) as prober:
        for _ in range(kills):
            killed = int(path.read_text())
            with contextlib.suppress(ProcessLookupError):
                os.kill(killed, signal.SIGKILL)
            wait_until(lambda pid=killed: int(path.read_text()) != pid, "supervisord starts another")
            times_s.append(time.monotonic())
            time.sleep(draw.choice((draw.uniform(0, 1), draw.uniform(1, 4))))
            if len(times_s) == times_s.maxlen:
                time.sleep(max(0.0, times_s[0] + RESTART_WINDOW_S - time.monotonic()))
        wait_until(lambda: probe_health(server.port, limit_s).end == "200", "the server answers again", 120)
        time.sleep(0.5)
    assert not is_alive(killed)
    return prober.probes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with ServeProcess("--device", DEVICE) as server:
        try:
            probes = soak(server, args.kills, args.limit_s, args.seed)
        finally:
            print(server.log)
    print(Counter(probe.end for probe in probes))
    print(f"{len(probes)} probes, slowest {max(probe.seconds for probe in probes):.3f} s")
    if any(probe.end == "hung" for probe in probes):
        sys.exit(1)


if __name__ == "__main__":
    main()
