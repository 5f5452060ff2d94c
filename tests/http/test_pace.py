"""Above capacity a turn of the event loop stays short, so that probes and streams do not wait. Turns are counted, not timed."""

import asyncio
import socket
import subprocess
import sys
import threading

from starlette.types import Receive, Scope, Send

from depthbatch.frontend.http.edge import STARTS_PER_TURN, UNPACED_PATHS, Edge, Turnstile
from depthbatch.frontend.tokenizer import Tokenizer
from fakes.http_server import LiveServer

LIMIT_S = 10.0


async def turns_of(turnstile: Turnstile, requests: int, cancelled: tuple[int, ...] = ()) -> list[list[int]]:
    """Which of ``requests`` got through in each turn."""
    through: list[list[int]] = [[]]

    async def request(number: int) -> None:
        await turnstile.enter()
        through[-1].append(number)

    tasks = [asyncio.create_task(request(number)) for number in range(requests)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        through.append([])
        for number in cancelled:
            tasks[number].cancel()
    return [turn for turn in through if turn]


def test_requests_start_a_few_a_turn_in_order() -> None:
    """Bug: all requests that had arrived in a turn started in the next, turns grew to seconds, and /health with them."""
    turns = asyncio.run(turns_of(Turnstile(3), 10))
    assert [number for turn in turns for number in turn] == list(range(10))
    assert max(len(turn) for turn in turns) == 3


def test_who_has_left_takes_no_place() -> None:
    """Cancelled while waiting: the places of a turn go to those who still wait."""
    turns = asyncio.run(turns_of(Turnstile(2), 8, cancelled=(2, 3, 5)))
    assert turns == [[0, 1], [4, 6], [7]]


def test_probes_pass_those_who_wait() -> None:
    """Row "health probe queued behind the work": a hundred requests wait to start; each probe that comes after them reaches
    its route in its first turn."""
    reached: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["path"])

    async def ask() -> None:
        edge = Edge(app, (), 1000)

        def request(path: str) -> asyncio.Task[None]:
            scope = {"type": "http", "path": path, "headers": []}
            return asyncio.create_task(edge(scope, None, None))  # type: ignore[arg-type]

        tasks = [request("/v1/completions") for _ in range(100)]
        tasks += [request(path) for path in sorted(UNPACED_PATHS)]
        await asyncio.sleep(0)
        assert reached == ["/v1/completions"] * STARTS_PER_TURN + sorted(UNPACED_PATHS)
        await asyncio.gather(*tasks)
        assert len(reached) == len(tasks)

    asyncio.run(ask())


def test_many_connections_are_taken_a_turn(tokenizer: Tokenizer) -> None:
    """Bug: libuv takes one connection a turn of the loop, so that a probe waited in the kernel's queue, seconds, behind a
    flood of new ones. Forty come while the loop is held up; it then takes them within a few turns."""
    connections = 40
    arrived = threading.Event()
    turns: list[int] = []

    async def hold_up_then_count() -> None:
        assert arrived.wait(LIMIT_S)
        turn = 0
        while len(server.server.server_state.connections) < connections:
            turn += 1
            await asyncio.sleep(0)
        turns.append(turn)

    with LiveServer(tokenizer) as server:
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        counting = asyncio.run_coroutine_threadsafe(hold_up_then_count(), server.loop)
        opened = [socket.create_connection(address, timeout=LIMIT_S) for _ in range(connections)]
        arrived.set()
        counting.result(LIMIT_S)
        for connection in opened:
            connection.close()
    assert turns[0] < 10


def test_open_requests_are_not_gone_through_again_and_again() -> None:
    """Bug: with 5,000 requests open, Python's collector went through all their objects, half a second each time, whenever a
    quarter more had come. Half a million objects are made and kept here; only the young are collected."""
    script = """
import gc
from depthbatch.common.os_process import tune_garbage_collection
tune_garbage_collection()
full = []
gc.callbacks.append(lambda phase, info: full.append(1) if info["generation"] == 2 else None)
kept = [[i] for i in range(500_000)]
assert gc.get_freeze_count() > 0 and gc.isenabled()
print(len(full))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
