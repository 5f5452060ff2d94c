"""Run by test_ray.py in the clients' environment, where Ray is: two engines on Ray Serve, 64 streams, kills and scaling.

Prints one JSON object with what happened; it asserts nothing.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import httpx
import ray
from ray import serve

from depthbatch.deploy.ray_app import app

PORT = int(sys.argv[1])
URL = f"http://127.0.0.1:{PORT}/v1/completions"
PROMPTS = [f"{a}+{b}=" for a in range(10, 18) for b in range(20, 28)]  # 64
OPTIONS = {
    "model": "demo",
    "num_cpus": "0.1",
    "max_num_seqs": "64",
    "kv_blocks": "1024",
    "threads": "1",
    "gate": "delayed",
}


def body(number: int) -> dict:
    return {
        "prompt": PROMPTS[number], "max_tokens": 96, "temperature": 0.8, "seed": number, "ignore_eos": True, "stream": True,
        "return_token_ids": True, "return_exit_depths": True,
    }  # fmt: skip


async def stream(client: httpx.AsyncClient, number: int, reached: list[int]) -> dict:
    """Tokens, depths, text and end of one stream; errors as they come."""
    got: dict = {"token_ids": [], "exit_depths": [], "text": "", "ends": [], "errors": []}
    async with client.stream("POST", URL, json=body(number)) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                got["errors"].append(event["error"]["message"])
                continue
            for part in event["choices"]:
                for name in ("token_ids", "exit_depths", "text"):
                    got[name] += part[name]
                got["ends"] += [part["finish_reason"]] * (part["finish_reason"] is not None)
            reached[number] = len(got["token_ids"])
    return got


async def streams(disturb) -> list[dict]:
    """64 at once; ``disturb`` is called once a third of all tokens is there."""
    reached = [0] * len(PROMPTS)
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
        tasks = [asyncio.create_task(stream(client, number, reached)) for number in range(len(PROMPTS))]
        while sum(reached) < 96 * len(PROMPTS) / 3 and not all(task.done() for task in tasks):
            await asyncio.sleep(0.02)
        await disturb()
        return await asyncio.gather(*tasks)


def engine_pids() -> list[dict[str, int]]:
    """Of each engine's replica, scheduler and worker, by their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        if _command(path.name).startswith("ray::ServeReplica:default:Engine"):
            pids = {"replica": int(path.name)}
            for children in path.glob("task/*/children"):
                for child in children.read_text().split():
                    names = [name for name in ("scheduler", "worker") if f"depthbatch.{name}" in _command(child)]
                    pids |= dict.fromkeys(names, int(child))
            found.append(pids)
    return found


def _command(pid: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


async def running(want: int, limit_s: float = 60) -> int:
    """Waits for so many engines; how many there are."""
    deadline_s = time.monotonic() + limit_s
    while True:
        states = serve.status().applications["default"].deployments["Engine"].replica_states
        count = states.get("RUNNING", 0) if len(states) == 1 else -1  # else some come or go
        if count == want or time.monotonic() > deadline_s:
            return count
        await asyncio.sleep(0.2)


async def main() -> dict:
    async def nothing() -> None:
        pass

    report: dict = {"whole": await streams(nothing)}
    for victim in ("replica", "worker", "scheduler"):
        report[f"{victim}_engines"] = await running(2)
        pids = engine_pids()

        async def kill(pid: int = pids[0][victim]) -> None:
            os.kill(pid, signal.SIGKILL)

        report[victim] = await streams(kill)
    return report


async def scaled() -> dict:
    """64 streams at one engine, which is too many for it; then four at a time, which are too few for two."""
    counts = [await running(1)]

    async def wait_for_two() -> None:
        counts.append(await running(2))

    up = await streams(wait_for_two)
    down = asyncio.create_task(running(1))
    rest = []
    while not down.done():
        rest += await streams_of(4)
    return {"up": up, "down": rest, "replicas": [*counts, down.result()]}


async def streams_of(count: int) -> list[dict]:
    async with httpx.AsyncClient(timeout=120) as client:
        return await asyncio.gather(*(stream(client, number, [0] * len(PROMPTS)) for number in range(count)))


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", object_store_memory=100 << 20)
    serve.start(http_options={"port": PORT})
    serve.run(app({**OPTIONS, "min_replicas": "2"}), logging_config={"log_level": "ERROR"})
    try:
        out = asyncio.run(main())
        few = {"max_replicas": "2", "target_ongoing_requests": "16", "upscale_delay_s": "0.5", "downscale_delay_s": "2"}
        serve.run(app({**OPTIONS, **few}), logging_config={"log_level": "ERROR"})
        out["scaling"] = asyncio.run(scaled())
    finally:
        serve.shutdown()
        ray.shutdown()
    json.dump(out, sys.stdout)
