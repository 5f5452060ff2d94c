"""Everything at once, by seed: mixed requests, disconnects, aborts, timeouts, preemption, processes that die at named points.

``--chaos-s`` says for how many seconds (an hour by ``--chaos-s 3600``), ``--chaos-seed`` which ones, and
``--chaos-preemption`` how victims get their K/V back (recompute or offload).
"""

import asyncio
import contextlib
import gc
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from depthbatch.frontend.async_engine import AsyncEngine
from depthbatch.frontend.params import SamplingParams
from fakes.faults import Fault, install

AT_A_TIME = 16
KILL_EVERY_S = 20.0  # of further kills in long runs: fewer than an engine gives up on
OPTIONS = {
    "model": "demo",
    "device": "cpu",
    "threads": 1,
    "max_num_seqs": 8,
    "min_free_slots": 1,
    "max_num_batched_tokens": 48,
    "kv_blocks": 24,
    "speculation": "auto",
}
BASE = {"max_tokens": 30, "ignore_eos": True, "temperature": 0.0}
POOL: list[tuple[str, dict[str, object]]] = [
    ("46+5=", {}),
    ("46+5=", {"temperature": 1.0, "seed": 3, "max_tokens": 60}),
    ("say cuk6en=", {"speculation": False, "max_tokens": 50}),
    ("516,517,", {"gate": "own", "exit_threshold": 0.9, "temperature": 1.0, "seed": 5}),
    ("kx qz xt ha zf t7 aj j6 f2 ?az= " * 3, {"gate": "delayed", "exit_threshold": 0.7, "max_tokens": 40}),
    ("72+23=", {"num_loops": 2, "logprobs": 2}),
    ("72+23=", {"exit_depths": (2, 4, 3, 2), "presence_penalty": 0.5}),
    ("12+30=", {"gate": "none", "temperature": 0.7, "seed": 9, "top_k": 20, "max_tokens": 70}),
    ("12+30=", {"regex": "[0-9]{3,20}", "ignore_eos": False}),
    ("say 4ab=", {"choice": ("twelve", "thirteen"), "ignore_eos": False, "speculation": False}),
    ("516,517,518,519,520,521,522,523,", {"bad_words": ("5",), "max_tokens": 45}),
    ("99+1=", {"ignore_eos": False, "prompt_logprobs": 0}),
]


class Answer(NamedTuple):
    """What a request got."""

    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    finish_reason: str | None


def params_of(index: int, **more: object) -> SamplingParams:
    return SamplingParams(**{**BASE, **POOL[index][1], **more})


async def ask(engine: AsyncEngine, index: int, name: str, leave_after: int = 1 << 30, **more: object) -> Answer:
    """Runs a request of the pool to its end, or until so many tokens have come."""
    tokens, depths, reason = list[int](), list[int](), None
    async with contextlib.aclosing(engine.generate(POOL[index][0], params_of(index, **more), name)) as deltas:
        async for delta in deltas:
            tokens += delta.token_ids
            depths += delta.exit_depths
            reason = delta.finish_reason
            if len(tokens) >= leave_after:
                break
    return Answer(tuple(tokens), tuple(depths), reason)


class Chaos:
    """Requests with random fates, checked against what each gets when nothing disturbs it."""

    def __init__(self, engine: AsyncEngine, undisturbed: list[Answer], rng: random.Random) -> None:
        self.engine = engine
        self.undisturbed = undisturbed
        self.fates: Counter[str] = Counter()
        self._rng = rng
        self._names = 0

    async def run(self, until_s: float, least: int) -> None:
        """New requests as long as the clock says, and until there were ``least``; then the last ones are waited for."""
        running: set[asyncio.Task[None]] = set()
        while running or time.monotonic() < until_s or self._names < least:
            while len(running) < AT_A_TIME and (time.monotonic() < until_s or self._names < least):
                running.add(asyncio.create_task(self._one()))
            done, running = await asyncio.wait(running, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _one(self) -> None:
        rng, self._names = self._rng, self._names + 1
        index, name, fate = rng.randrange(len(POOL)), f"r{self._names}", rng.random()
        whole = self.undisturbed[index]
        if fate < 0.15:
            answer = await ask(self.engine, index, name, leave_after=rng.randint(1, 12))
            kind = "left"
        elif fate < 0.30:
            aborting = asyncio.create_task(self._abort(name, rng.uniform(0.0, 0.6)))
            answer = await ask(self.engine, index, name)
            await aborting
            kind = "aborted" if answer.finish_reason == "abort" else "answered"
        elif fate < 0.42:
            answer = await ask(self.engine, index, name, timeout_s=rng.uniform(0.02, 0.6))
            kind = "timed out" if answer.finish_reason == "timeout" else "answered"
        else:
            answer, kind = await ask(self.engine, index, name), "answered"
        self.fates[kind] += 1
        count = len(answer.tokens)
        assert (answer.tokens, answer.depths) == (whole.tokens[:count], whole.depths[:count]), (POOL[index], kind)
        assert kind != "answered" or answer == whole, POOL[index]

    async def _abort(self, name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self.engine.abort(name)


async def idle(engine: AsyncEngine) -> dict[str, float]:
    """The scheduler's figures once nothing runs; nothing may be left of any request, here or there."""
    while (stats := await engine.stats())["num_requests_running"] or stats["num_requests_waiting"]:
        await asyncio.sleep(0.02)
    assert stats["kv_cache_usage_perc"] == 0.0
    assert not engine._mailboxes and not engine._named and not engine._client._requests
    return stats


def ended(stats: dict[str, float], reason: str = "") -> float:
    return sum(v for name, v in stats.items() if name.startswith("request_success_total") and reason in name)


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmRSS")).split()[1])


def test_chaos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """Rows of docs/failures.md together, in an order that nobody has thought of. Every answer that is whole equals the
    undisturbed one, every other is its beginning; figures of both sides agree; nothing is left of any request, no
    descriptor, and within 2 % no memory."""
    seconds, seed = pytestconfig.getoption("--chaos-s"), pytestconfig.getoption("--chaos-seed")
    preemption = pytestconfig.getoption("--chaos-preemption")
    rng = random.Random(seed)
    deadly = [
        Fault("worker.result", "kill", after=rng.randint(600, 900)),
        Fault("worker.stage", "MemoryError", after=rng.randint(300, 500)),
        Fault("scheduler.publish", "kill", after=rng.randint(300, 500)),
        Fault("scheduler.dispatch", "kill", after=rng.randint(300, 500)),
    ]
    rng.shuffle(deadly)
    (faults_at := tmp_path / "faults").mkdir()
    armed = tmp_path / "armed"
    faults = install(monkeypatch, faults_at, *deadly, armed=armed)

    async def main() -> None:
        async with AsyncEngine(quiet=True, **OPTIONS, preemption=preemption) as engine:
            undisturbed = [await ask(engine, index, "alone") for index in range(len(POOL))]
            chaos = Chaos(engine, undisturbed, rng)
            pids = {name: process.pid for name, process in engine.health().processes.items()}
            await chaos.run(time.monotonic() + seconds / 5, 60)  # warm
            await idle(engine)
            gc.collect()
            before = {name: (resident_kib(pid), open_files(pid)) for name, pid in pids.items()}
            stats, fates = await idle(engine), chaos.fates.copy()
            await chaos.run(time.monotonic() + seconds / 5, 140)
            after = await idle(engine)
            assert ended(after) - ended(stats) == chaos.fates.total() - fates.total()
            cut = (chaos.fates - fates).total() - (chaos.fates - fates)["answered"]
            aborted = ended(after, "abort") - ended(stats, "abort")
            assert cut / 2 < aborted <= cut, "a few may have ended before they heard of it"
            assert after["num_preemptions_total"] > 0 and len(chaos.fates) == 4
            assert (after["kv_restore_bytes_total"] > 0) == (preemption == "offload")
            gc.collect()
            for name, pid in pids.items():
                kib, files = before[name]
                matchers = OPTIONS["max_num_seqs"] if name == "worker" else 0  # a slot's last one stays until its next
                assert abs(open_files(pid) - files) <= matchers, name
                assert resident_kib(pid) <= 1.02 * kib, name
            armed.touch()
            killing = asyncio.create_task(kill_now_and_then(engine, rng))
            end_s = time.monotonic() + 3 * seconds / 5
            least = chaos.fates.total() + 80
            await chaos.run(end_s, least)
            while faults.struck < len(deadly):
                least += AT_A_TIME
                await chaos.run(end_s, least)
            killing.cancel()
            stats, total = await idle(engine), 0
            for index, answer in enumerate(undisturbed):
                assert await ask(engine, index, "again") == answer
                total += len(answer.tokens)
            after = await idle(engine)
            assert ended(after) - ended(stats) == len(POOL)
            assert after["generation_tokens_total"] - stats["generation_tokens_total"] == total
            restarts = {name: process.restarts for name, process in engine.health().processes.items()}
            assert restarts["scheduler"] >= 2 and restarts["worker"] >= 4
            assert open_files(os.getpid()) == before["frontend"][1]
            gc.collect()
            assert resident_kib(os.getpid()) <= 1.02 * before["frontend"][0]
        print(
            f"seed {seed}: {dict(chaos.fates)}, restarts {restarts}, {int(after['num_preemptions_total'])} preemptions"
        )

    asyncio.run(main())


async def kill_now_and_then(engine: AsyncEngine, rng: random.Random) -> None:
    """In long runs, once the named points have struck."""
    await asyncio.sleep(3 * KILL_EVERY_S)
    while True:
        await asyncio.sleep(rng.uniform(KILL_EVERY_S, 2 * KILL_EVERY_S))
        process = engine.health().processes[rng.choice(("worker", "worker", "scheduler"))]
        if process.pid:
            os.kill(process.pid, signal.SIGKILL)
