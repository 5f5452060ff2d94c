"""Many streams at once over plain asyncio sockets: a client that costs little, so that the server is what is loaded."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"


@dataclass
class Streamed:
    """What one stream brought. ``times_s``: arrival of each event after the start of its request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    times_s: list[float] = field(default_factory=list)
    done: bool = False
    status: int = 0


async def stream(port: int, body: dict[str, Any]) -> Streamed:
    """One streamed completion; whatever goes wrong shows in what is missing."""
    result = Streamed()
    start_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    data = json.dumps({**body, "stream": True, "return_token_ids": True}).encode()
    writer.write(f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    result.status = int((await reader.readline()).split()[1])
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            result.done = True
        elif line.startswith(b"data: {"):
            result.times_s.append(time.perf_counter() - start_s)
            for choice in json.loads(line[6:]).get("choices", ()):
                result.token_ids += choice["token_ids"]
                result.finish_reason = choice["finish_reason"]
    writer.close()
    return result


async def probe_health(port: int, until: asyncio.Event, period_s: float = 0.02) -> list[tuple[int, float]]:
    """Status and seconds of /health, asked on one connection each, until the event is set."""
    answers = []
    while not until.is_set():
        start_s = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        status = int((await reader.readline()).split()[1])
        await reader.read()
        answers.append((status, time.perf_counter() - start_s))
        writer.close()
        await asyncio.sleep(period_s)
    return answers


async def many(port: int, bodies: list[dict[str, Any]]) -> tuple[list[Streamed], list[tuple[int, float]]]:
    """All of them at once, with /health asked meanwhile."""
    finished = asyncio.Event()
    probing = asyncio.create_task(probe_health(port, finished))
    try:
        results = await asyncio.gather(*(stream(port, body) for body in bodies))
    finally:
        finished.set()
    return results, await probing
