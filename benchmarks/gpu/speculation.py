"""The GPU check's section on speculation by depth: exactness on captured graphs, then speed at few and many streams.

Dummy weights know nothing early, so requests are sampled so warm that drafts are right about as often as asked: draft
and final readout share their random number, and the warmer the draw, the less do logits say in it.
"""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from depthbatch.benchmarks.gpu.sections import (
    Result,
    Setup,
    fidelity_config,
    fidelity_requests,
    overlapped,
    serve,
    synchronize,
)
from depthbatch.benchmarks.gpu.shapes import Shape, write_config
from depthbatch.common.config import EngineConfig
from depthbatch.common.gates import Gate
from depthbatch.common.messages import RequestParams, Submit
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.worker.build import BuiltRunner

LANES = 3
STREAMS = (1, 8, 64)
WARM = 10.0  # temperature at which the tiny models' drafts are right about every second time
WARMTHS = (0.0, 1.0, 4.0, 16.0)  # temperatures of the speed runs: from drafts that are wrong to drafts that are right
FIDELITY = {"ouro": "ouro-tiny", "huginn": "huginn-tiny"}


def speculation(setup: Setup, model: str) -> Iterator[tuple[str, Result]]:
    """Raises AssertionError where an fp32 answer with drafts is not the one without."""
    yield f"{model}.speculation.exact", exactness(setup, FIDELITY[model])
    shape = setup.shape(model)
    start_s = time.perf_counter()
    config = speed_config(setup, shape, model)
    built = overlapped(setup, config, None)
    synchronize(setup)
    yield f"{model}.speculation.capture", {"seconds": time.perf_counter() - start_s, "rows": built.info.buckets[-1]}
    run(setup, built, config, requests(shape, 2, built.info.vocab_size, 0.0, True))  # first use of each size
    for streams in sorted({min(streams, config.max_num_seqs) for streams in STREAMS}):
        yield f"{model}.speculation.speed.{streams}", speeds(setup, shape, built, config, streams)


def exactness(setup: Setup, model: str) -> Result:
    """Tokens and depths with drafts against those without, from one captured runner each."""
    answers, counts = [], (0, 0)
    for lanes in ("off", LANES):
        config = fidelity_config(setup, model, "float32", "sdpa")
        config = msgspec.structs.replace(config, kv_layout="last_exited", speculation=lanes)
        built = overlapped(setup, config, "sdpa")
        scheduler = Scheduler(SchedulerConfig.resolve(config, built.info))
        submits = [
            msgspec.structs.replace(
                submit, params=msgspec.structs.replace(submit.params, temperature=WARM, repetition_penalty=1.0)
            )
            for submit in fidelity_requests(built)
        ]
        answers.append(serve(scheduler, built.runner, submits))
        counts = drafts(scheduler)
    off, on = ({key: answer[:2] for key, answer in each.items()} for each in answers)
    result = {"tokens": sum(len(tokens) for tokens, _ in off.values()), "right": counts[0], "wrong": counts[1]}
    if off != on or not min(counts):
        raise AssertionError(f"not the answers without drafts, or no drafts of both kinds: {result}")
    return result


def drafts(scheduler: Scheduler) -> tuple[int, int]:
    """Right and wrong ones so far."""
    chains = scheduler.admission.chains
    return (0, 0) if chains is None else (int(chains.right.sum()), int(chains.wrong.sum()))


def speed_config(setup: Setup, shape: Shape, model: str) -> EngineConfig:
    longest = 2 * (shape.prompt_tokens + shape.output_tokens)
    return EngineConfig(
        model=write_config(shape, setup.work / f"{model}.speculation"),
        load_format="dummy",
        dtype=shape.dtype,
        policy="refill",
        kv_layout="last_exited",
        max_num_seqs=shape.served_width,
        max_model_len=longest,
        max_num_batched_tokens=max(longest, shape.served_width * shape.prompt_tokens),
        speculation=LANES,
    )


def speeds(setup: Setup, shape: Shape, built: BuiltRunner, config: EngineConfig, streams: int) -> Result:
    """Tokens a second without drafts and with them, by the warmth of the draws and so by the share that is right. The
    same captured runner serves both, so that the requests are all that differs."""
    vocab_size, result = built.info.vocab_size, {}
    for warmth in WARMTHS:
        plain, _ = run(setup, built, config, requests(shape, streams, vocab_size, warmth, False))
        drafted, (right, wrong) = run(setup, built, config, requests(shape, streams, vocab_size, warmth, True))
        result[f"{warmth:g}"] = {
            "off_tokens_per_s": plain,
            "on_tokens_per_s": drafted,
            "speedup": drafted / plain,
            "accepted": right / max(1, right + wrong),
        }
    return result


def run(setup: Setup, built: BuiltRunner, config: EngineConfig, submits: list[Submit]) -> tuple[float, tuple[int, int]]:
    """Tokens a second, prefill included, and what came of the drafts."""
    scheduler = Scheduler(SchedulerConfig.resolve(config, built.info))
    synchronize(setup)
    start_s = time.perf_counter()
    answers = serve(scheduler, built.runner, submits)
    took_s = time.perf_counter() - start_s
    return sum(len(answer.tokens) for answer in answers.values()) / took_s, drafts(scheduler)


def requests(shape: Shape, streams: int, vocab_size: int, warmth: float, speculates: bool) -> list[Submit]:
    """One a stream, all alike but for prompt, seed and depths: these are drawn from the shape's shares."""
    rng = np.random.default_rng(5)
    made: list[Any] = []
    for index in range(streams):
        depths = rng.choice(len(shape.depths), shape.output_tokens - 1, p=shape.depths) + 1
        params = RequestParams(
            max_tokens=shape.output_tokens,
            gate=Gate.REPLAY,
            max_loops=len(shape.depths),
            exit_depths=bytes(depths.astype(np.uint8)),
            temperature=warmth,
            seed=index,
            speculation=speculates,
        )
        prompt = rng.integers(1, vocab_size, shape.prompt_tokens).astype(np.int32)
        made.append(Submit(index, prompt.tobytes(), params))
    return made
