"""``depthbatch bench kv-memory WHAT``: what the prefix cache gives and costs, and how fast K/V go to host memory.

``hits``: requests that begin with the same tokens, all at once, through the real processes without the cache and with it:
TTFT, tokens/s. ``misses``: what the cache adds to the scheduler core where requests have nothing in common, in virtual time,
with and without it in turns. ``copies``: blocks to host memory and back against one plain copy of as
many bytes, in turns. The model has the demo's size and made-up weights.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from depthbatch.benchmarks.plain_loop import Shape
from depthbatch.benchmarks.record import add_output_argument, write_json
from depthbatch.benchmarks.simulate import run_policy
from depthbatch.benchmarks.workload import Workload, WorkloadRequest
from depthbatch.common.arguments import positive, width
from depthbatch.common.config import EngineConfig
from depthbatch.frontend.async_engine import AsyncEngine
from depthbatch.frontend.params import SamplingParams
from depthbatch.worker.simulated import find_profile

SHAPE = Shape(layers=1, hidden=128, heads=4, intermediate=512, vocab=264, loops=4)
LENGTH = 4096  # tokens of the longest sequence
OWN_TOKENS = 50  # of a prompt, behind what it shares
MISS_TOKENS = 400  # of a prompt that shares nothing
COPIED_BLOCKS = 4096


def add_kv_memory_arguments(parser: argparse.ArgumentParser) -> None:
    """What, each with options of its own."""
    what = parser.add_subparsers(metavar="WHAT", required=True)
    hits = what.add_parser("hits", help="prompts that begin with the same tokens", allow_abbrev=False)
    hits.add_argument("--device", default="cpu", help="cpu, or simulated:PROFILE")
    hits.add_argument("--prefix-tokens", type=positive, default=2000, help="tokens that all prompts begin with")
    misses = what.add_parser("misses", help="what the cache costs where nothing is alike", allow_abbrev=False)
    misses.add_argument("--profile", default="h100-ouro-1.4b", help="the device profile")
    copies = what.add_parser("copies", help="K/V to host memory and back", allow_abbrev=False)
    for one in (hits, misses):
        one.add_argument("--requests", type=positive, default=200)
        one.add_argument("--output-tokens", type=positive, default=20)
        one.add_argument("--w", type=width, default=32, help="W: most active sequences")
    for one in (misses, copies):
        one.add_argument("--rounds", type=positive, default=12)
    for one, run in ((hits, measure_hits), (misses, measure_misses), (copies, measure_copies)):
        add_output_argument(one)
        one.set_defaults(measure=run)


def run_kv_memory(args: argparse.Namespace) -> int:
    """Measures one of WHAT. Raises ConfigError, EngineDeadError."""
    with dummy_model() as directory:
        write_json(args.measure(args, directory), args.output)
    return 0


@contextmanager
def dummy_model() -> Iterator[str]:
    """A directory with the shape's config.json alone."""
    with tempfile.TemporaryDirectory() as directory:
        config = SHAPE.config() | {"max_position_embeddings": LENGTH, "torch_dtype": "float32"}
        Path(directory, "config.json").write_text(json.dumps(config))
        yield directory


def engine_config(directory: str, **options: Any) -> EngineConfig:
    """Of the model in ``directory``, a plane a loop."""
    return EngineConfig(model=directory, load_format="dummy", kv_layout="last_exited", **options)


def params(output_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)


# --- hits


def measure_hits(args: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Both caches' figures and their ratios."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, SHAPE.vocab, args.prefix_tokens).tolist()
    prompts = [[*shared, *rng.integers(3, SHAPE.vocab, OWN_TOKENS).tolist()] for _ in range(args.requests)]
    runs = {
        caching: asyncio.run(
            serve(
                engine_config(
                    directory,
                    device=args.device,
                    max_num_seqs=args.w,
                    max_model_len=LENGTH,
                    prefix_caching=caching,
                ),
                prompts,
                args.output_tokens,
            )
        )
        for caching in ("off", "on")
    }
    ratios = {name: runs["on"][name] / runs["off"][name] for name in runs["on"] if name != "cached_tokens"}
    setting = {name: getattr(args, name) for name in ("device", "requests", "prefix_tokens", "output_tokens", "w")}
    return setting | {"own_tokens": OWN_TOKENS} | runs | {"on_over_off": ratios}


async def serve(config: EngineConfig, prompts: list[list[int]], output_tokens: int) -> dict[str, float]:
    """All prompts at once: TTFT from then on in seconds, tokens a second, prompt tokens found in the cache."""
    async with AsyncEngine.from_config(config, quiet=True) as engine:
        async for _ in engine.generate([5] * 4, params(2)):
            pass
        begin_s = time.perf_counter()

        async def one(prompt: list[int]) -> tuple[float, int]:
            first_s, cached = 0.0, 0
            async for delta in engine.generate(prompt, params(output_tokens)):
                first_s = first_s or time.perf_counter() - begin_s
                cached += delta.num_cached_tokens
            return first_s, cached

        firsts, cached = zip(*await asyncio.gather(*map(one, prompts)), strict=True)
        duration_s = time.perf_counter() - begin_s
    return {
        "mean_ttft_s": statistics.mean(firsts),
        "p99_ttft_s": float(np.percentile(firsts, 99)),
        "tokens_per_s": len(prompts) * output_tokens / duration_s,
        "cached_tokens": sum(cached),
    }


# --- misses


def measure_misses(args: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Processor time of the scheduler core with the cache and without, in virtual time, in turns; the least of each
    counts. What the cache adds, as a share of the device's time, is what it would cost if nothing of it were overlapped."""
    profile, rng = find_profile(args.profile), np.random.default_rng(0)
    prompts = rng.integers(0, profile.vocab_size, (args.requests, MISS_TOKENS))
    requests = (WorkloadRequest(MISS_TOKENS, args.output_tokens, prompt_ids=tuple(row)) for row in prompts.tolist())
    workload = Workload(tuple(requests))
    core_s: dict[str, list[float]] = {"off": [], "on": []}
    device_s, hits = 0.0, 0
    for _ in range(args.rounds):
        for caching, spent in core_s.items():
            begin_s = time.process_time()
            run = run_policy(profile, workload, args.w, policy="refill", prefix_caching=caching)
            spent.append(time.process_time() - begin_s)
            device_s = run.duration_s
            hits += 0 if run.stats.prefix_cache is None else run.stats.prefix_cache.hits
    added_s = min(core_s["on"]) - min(core_s["off"])
    return {
        "profile": profile.name,
        "requests": args.requests,
        "prompt_tokens": MISS_TOKENS,
        "output_tokens": args.output_tokens,
        "w": args.w,
        "hits": hits,
        "core_s": {name: min(values) for name, values in core_s.items()},
        "added_us_per_request": 1e6 * added_s / args.requests,
        "share_of_device_time": added_s / device_s,
    }


# --- copies


def measure_copies(args: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Bytes a second to host memory and back, of blocks that lie together and of blocks in any order, over those of one
    plain copy."""
    import torch

    from depthbatch.worker.attention.backend import AttentionBackend
    from depthbatch.worker.build import build_runner
    from depthbatch.worker.host_kv import HostKV

    config = engine_config(directory, device="cpu", kv_blocks=COPIED_BLOCKS, max_model_len=16)
    stages = build_runner(config).runner.stages
    backend: AttentionBackend = stages.backend
    blocks = COPIED_BLOCKS
    host = HostKV(backend, blocks)
    size = sum(cache[:planes].nbytes for cache, planes in zip(backend.k_cache, backend.geometry.planes, strict=True))
    total = 2 * size * blocks  # K and V
    source, target = (torch.zeros(total, dtype=torch.uint8) for _ in range(2))
    none, rows = np.empty((0, 2), np.int32), np.arange(blocks, dtype=np.int32)
    orders = {"together": rows + 1, "scattered": np.random.default_rng(0).permutation(rows).astype(np.int32) + 1}
    seconds: dict[str, list[float]] = {}
    for index in range(args.rounds + 1):  # the first one touches all memory
        timed = {"plain": _seconds(lambda: target.copy_(source))}
        for name, order in orders.items():
            out, back = np.stack([order, rows], axis=1), np.stack([rows, order], axis=1)
            timed[f"out, {name}"] = _seconds(lambda out=out: host.move(out, none))  # type: ignore[misc]
            timed[f"back, {name}"] = _seconds(lambda back=back: host.move(none, back))  # type: ignore[misc]
        if index:
            for name, taken_s in timed.items():
                seconds.setdefault(name, []).append(taken_s)
    best = {name: min(values) for name, values in seconds.items()}
    return {
        "block_bytes": 2 * size,
        "blocks": blocks,
        "gib_per_s": {name: total / (1 << 30) / value for name, value in best.items()},
        "over_plain_copy": {name: best["plain"] / value for name, value in best.items() if name != "plain"},
    }


def _seconds(work: Any) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s
