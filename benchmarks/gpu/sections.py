"""The measurements of the GPU check. Each takes a Setup and gives what goes into the JSON, or raises.

A section runs in a process of its own, since a device fault ends a process's use of the device for good. Without a GPU
(dry run) the same code runs over HostAccelerator.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from depthbatch.benchmarks.flops import count_flops, stage_flops
from depthbatch.benchmarks.gpu.host_accelerator import HostAccelerator
from depthbatch.benchmarks.gpu.shapes import Shape, bucket_for, power_of_two_sizes, shapes, workload_of, write_config
from depthbatch.common.config import EngineConfig
from depthbatch.common.frames import ROW_AUX, ROW_FIELDS, ROW_LANE, ROW_POSITION, ROW_SLOT, Stage
from depthbatch.common.messages import PLAIN, RequestParams, StageBatch, Submit, TokenEvent, Variant
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.worker.attention.flash_library import find_flash_library
from depthbatch.worker.attention.select import default_block_size
from depthbatch.worker.build import BuiltRunner, assemble
from depthbatch.worker.models.loader import load_model, open_model_dir
from depthbatch.worker.runner.overlapped import FULL, SAMPLED, Form, OverlappedRunner
from depthbatch.worker.runner.stage_input import bucket_sizes
from depthbatch.worker.runner.stage_io import LaunchedStage, StageRunner
from depthbatch.worker.runner.stage_tensors import PrefillInput, logprob_columns
from depthbatch.worker.runner.stages import PrefillAttention

Result = dict[str, Any]
ENGINES = (  # label, policy, async_scheduling
    ("cb", "cb", "lookahead"),
    ("refill", "refill", "lookahead"),
    ("no-refill", "no-refill", "lookahead"),
    ("refill-async", "refill", "async"),
    ("refill-off", "refill", "off"),
)


class Skipped(Exception):
    """A section that this machine cannot run; its text says why."""


class Setup(NamedTuple):
    """Where and what."""

    dry_run: bool
    work: Path  # a folder for configurations
    fidelity: Path  # the folder of the fidelity models

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry_run else "cuda")

    def shape(self, model: str) -> Shape:
        return shapes(self.dry_run)[model]


def synchronize(setup: Setup) -> None:
    if not setup.dry_run:
        torch.cuda.synchronize()


def milliseconds(setup: Setup, work: Callable[[], object], repeats: int = 20) -> float:
    """Median of three means over ``repeats`` runs; on a GPU between events, so launches overlap as in service."""
    means = []
    work()
    for _ in range(3):
        synchronize(setup)
        if setup.dry_run:
            start_s = time.perf_counter()
            work()
            means.append((time.perf_counter() - start_s) * 1e3)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        means.append(float(start.elapsed_time(end)) / repeats)
    return float(np.median(means))


def environment(setup: Setup) -> Iterator[tuple[str, Result]]:
    """What runs where, and how fast memory and matrix products are: the bounds for all else."""
    facts: Result = {"torch": torch.__version__, "device": "cpu"}
    if not setup.dry_run:
        facts |= {
            "device": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
            "memory_bytes": torch.cuda.mem_get_info()[1],
            "flash": type(find_flash_library()).__name__,
        }
    yield "environment", facts
    yield "bandwidth", {"copy_bytes_per_s": copy_bandwidth(setup)}


def copy_bandwidth(setup: Setup) -> float:
    """Bytes read and written a second by a copy larger than any cache."""
    count = (1 << 20) if setup.dry_run else (4 << 30)
    source = torch.zeros(count, dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    return 2 * count / (milliseconds(setup, lambda: target.copy_(source)) / 1e3)


def overlapped(setup: Setup, config: EngineConfig, backend: str | None) -> BuiltRunner:
    """A runner with captured stages."""
    device = setup.device
    model = load_model(config.model, config.dtype, device, config.load_format, config.seed, config.max_loops)
    built = assemble(config, model, device, backend)
    if isinstance(built.runner, OverlappedRunner):
        return built
    stages, limits = built.runner.stages, built.runner.limits
    return BuiltRunner(OverlappedRunner(stages, limits, HostAccelerator(), config.max_num_batched_tokens), built.info)


# --- fidelity


class Answer(NamedTuple):
    """What a request got."""

    tokens: list[int]
    depths: list[int]
    prompt_logprobs: list[float]


def serve(scheduler: Scheduler, runner: StageRunner, submits: list[Submit]) -> dict[int, Answer]:
    """Launches whatever the scheduler allows ahead, reads when it allows no more."""
    answers = {submit.request_id: Answer([], [], []) for submit in submits}
    for submit in submits:
        rejected = scheduler.submit(submit)
        if rejected is not None:
            raise RuntimeError(rejected.reason)
    in_flight: deque[LaunchedStage] = deque()
    while scheduler.num_unfinished:
        stage = scheduler.next_stage(time.monotonic())
        if stage is not None:
            in_flight.append(runner.launch(stage.header, stage.frame, stage.slot_params))
            continue
        for event in scheduler.complete(runner.read(in_flight.popleft()), time.monotonic()):
            _note(answers[event.request_id], event, logprob_columns(runner.limits))
    return answers


def _note(answer: Answer, event: TokenEvent, columns: int) -> None:
    answer.tokens.extend(event.token_ids)
    answer.depths.extend(event.exit_depths)
    answer.prompt_logprobs.extend(np.frombuffer(event.prompt_logprobs, np.float32).reshape(-1, columns)[:, 0].tolist())


def fidelity_requests(built: BuiltRunner, count: int = 8) -> list[Submit]:
    """Prompts of 3 to 60 tokens with the model's own gate; some sampled, one with penalties."""
    rng = np.random.default_rng(3)
    made = []
    for index in range(count):
        params = RequestParams(
            max_tokens=6 + index,
            gate=built.info.default_gate,
            exit_threshold=0.4,
            min_loops=2,
            max_loops=built.info.r_max,
            temperature=0.8 if index % 3 == 0 else 0.0,
            top_k=20 if index % 6 == 0 else 0,
            seed=index,
            repetition_penalty=1.3 if index == 4 else 1.0,
            prompt_logprobs=True,
        )
        prompt = rng.integers(1, 290, 3 + 11 * index % 60).astype(np.int32)
        made.append(Submit(index, prompt.tobytes(), params))
    return made


def fidelity_config(setup: Setup, model: str, dtype: str, backend: str) -> EngineConfig:
    flash = backend == "flash"
    return EngineConfig(
        model=str(setup.fidelity / model),
        dtype=dtype,
        policy="refill",  # auto goes by the clock
        max_num_seqs=4,
        max_num_batched_tokens=96,
        max_model_len=128,
        kv_blocks=60,
        block_size=default_block_size(setup.device, torch.bfloat16) if flash else 16,
        async_scheduling="lookahead",
    )


def _answers(built: BuiltRunner, config: EngineConfig) -> dict[int, Answer]:
    return serve(Scheduler(SchedulerConfig.resolve(config, built.info)), built.runner, fidelity_requests(built))


def fidelity(setup: Setup) -> Iterator[tuple[str, Result]]:
    """The fidelity models on captured graphs against the plain CPU runner: fp32 must give the same tokens and depths
    and logprobs within 1e-3; bf16 is held to the CPU's bf16 logprobs within 0.5, and its agreement is told."""
    halves = [] if setup.dry_run else ["triton"] + (["flash"] if find_flash_library() else [])
    combinations = [("float32", b) for b in ("sdpa", *([] if setup.dry_run else ["triton"]))]
    combinations += [("bfloat16", b) for b in ("sdpa", *halves)]
    for model in ("ouro-tiny", "huginn-tiny"):
        for dtype, backend in combinations:
            yield f"fidelity.{model}.{dtype}.{backend}", _compare(setup, model, dtype, backend)


def _compare(setup: Setup, model: str, dtype: str, backend: str) -> Result:
    cpu = torch.device("cpu")
    config = fidelity_config(setup, model, dtype, backend)
    plain_config = msgspec.structs.replace(config, block_size=16, async_scheduling="off")
    loaded = load_model(plain_config.model, dtype, cpu)
    want = _answers(assemble(plain_config, loaded, cpu, "sdpa"), plain_config)
    got = _answers(overlapped(setup, config, backend), config)
    total = sum(len(answer.tokens) for answer in want.values())
    same = sum(
        (a, b) == (c, d)
        for key in want
        for a, b, c, d in zip(want[key].tokens, want[key].depths, got[key].tokens, got[key].depths, strict=True)
    )
    differences = [np.abs(np.subtract(want[key].prompt_logprobs, got[key].prompt_logprobs)).max() for key in want]
    result = {"tokens": total, "same": same, "max_logprob_difference": float(max(differences))}
    exact = dtype == "float32"
    if (exact and same != total) or not max(differences) < (1e-3 if exact else 0.5):
        raise AssertionError(f"not the CPU's answers: {result}")
    return result


# --- steps


def steps(setup: Setup, model: str) -> Iterator[tuple[str, Result]]:
    """Captures everything at the shape's W, then times captured stages and prefills."""
    shape = setup.shape(model)
    config = step_config(setup, model)
    start_s = time.perf_counter()
    built = overlapped(setup, config, None)
    synchronize(setup)
    runner = built.runner
    assert isinstance(runner, OverlappedRunner)
    captured: Result = {
        "seconds": time.perf_counter() - start_s,
        "graphs": len(runner._graphs),
        "pieces": sum(len(pieces) for pieces in runner._pieces._pieces.values()),
        "backend": type(runner.stages.backend).__name__,
    }
    if not setup.dry_run:
        captured |= {"reserved_bytes": torch.cuda.memory_reserved(), "allocated_bytes": torch.cuda.memory_allocated()}
    yield f"{model}.capture", captured
    yield f"{model}.core_step", core_steps(setup, shape, config, built)
    yield f"{model}.stages", boundary_stages(setup, shape, runner)
    yield f"{model}.buckets", compare_buckets(setup, shape, runner)
    yield f"{model}.launch", launches(setup, shape, runner)
    yield f"{model}.prefill", prefills(setup, shape, runner)


def step_config(setup: Setup, model: str) -> EngineConfig:
    shape = setup.shape(model)
    folder = write_config(shape, setup.work / model)
    block = default_block_size(setup.device, torch.bfloat16)
    longest = max(*shape.contexts, *shape.prefill_tokens)
    return EngineConfig(
        model=folder,
        load_format="dummy",
        dtype=shape.dtype,
        max_num_seqs=shape.width,
        max_num_batched_tokens=longest,
        max_model_len=longest,
        kv_blocks=max(_blocks(shape, rows, context, block) for rows in shape.batches for context in shape.contexts),
    )


MAX_KV_TOKENS = 33_000  # of 0.8 MB each: Ouro's four planes


def _fits(rows: int, context: int) -> bool:
    return rows * context <= MAX_KV_TOKENS


def _blocks(shape: Shape, rows: int, context: int, block: int) -> int:
    """Blocks of ``rows`` sequences, or of the longest prompt."""
    needed = rows * -(-context // block) if _fits(rows, context) else 0
    return max(needed, -(-max(shape.prefill_tokens) // block))


def place_rows(runner: OverlappedRunner, stage: Stage, bucket: int, rows: int, context: int) -> None:
    """Gives ``rows`` sequences blocks of their own and a token at the end of ``context``, in loop 2."""
    stages = runner.stages
    size = stages.backend.geometry.block_size
    per_row = -(-context // size)
    table = torch.zeros_like(stages.slots.block_table)
    table[1 : rows + 1, :per_row] = 1 + torch.arange(rows * per_row, device=table.device).view(rows, per_row)
    frame = np.zeros((ROW_FIELDS, bucket), np.int32)
    frame[ROW_SLOT, :rows] = frame[ROW_LANE, :rows] = np.arange(1, rows + 1)
    frame[ROW_POSITION, :rows], frame[ROW_AUX, :rows] = context - 1, 0 if stage is Stage.PRELUDE else 2
    with torch.inference_mode():
        stages.slots.block_table.copy_(table)
        runner._buffers[stage, bucket].fill(frame)
    if table.is_cuda:
        torch.cuda.synchronize()  # the lanes of the runner do not wait for this stream


def core_steps(setup: Setup, shape: Shape, config: EngineConfig, built: BuiltRunner) -> Result:
    """Milliseconds of a captured core step beside the time its bytes take at the copy bandwidth."""
    runner = built.runner
    assert isinstance(runner, OverlappedRunner)
    bandwidth = copy_bandwidth(setup)
    directory = open_model_dir(config.model, config.load_format)
    spec = runner.stages.model.spec
    weights = count_flops(directory.family.tensors(directory.config)).core / 2 * spec.dtype.itemsize
    a_token = spec.core_layers * 2 * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize  # one plane
    result: Result = {"bandwidth_bytes_per_s": bandwidth, "weight_bytes": weights}
    for rows in shape.batches:
        for context in shape.contexts:
            if not _fits(rows, context):
                continue
            bucket = bucket_for(runner.limits.buckets, rows)
            place_rows(runner, Stage.CORE, bucket, rows, context)
            took_ms = milliseconds(setup, runner._graphs[Form(Stage.CORE, Variant.GATES), bucket])
            bound_ms = (weights + rows * context * a_token) / bandwidth * 1e3
            result[f"B{rows}.L{context}"] = {"ms": took_ms, "bound_ms": bound_ms, "ratio": took_ms / bound_ms}
    return result


def boundary_stages(setup: Setup, shape: Shape, runner: OverlappedRunner) -> Result:
    """Milliseconds of prelude and of coda in its forms, at the most rows but one."""
    rows = shape.batches[-2] if len(shape.batches) > 1 else shape.batches[-1]
    bucket, context = bucket_for(runner.limits.buckets, rows), shape.contexts[0]
    place_rows(runner, Stage.PRELUDE, bucket, rows, context)
    place_rows(runner, Stage.CODA, bucket, rows, context)
    forms = {
        "prelude": Form(Stage.PRELUDE),
        "core": Form(Stage.CORE),
        "coda.greedy": Form(Stage.CODA),
        "coda.sampled": Form(Stage.CODA, Variant.SAMPLE),
        "coda.filtered": Form(Stage.CODA, SAMPLED),
        "coda.full": Form(Stage.CODA, FULL),
    }
    place_rows(runner, Stage.CORE, bucket, rows, context)
    return {"rows": rows} | {name: milliseconds(setup, runner._graphs[form, bucket]) for name, form in forms.items()}


def compare_buckets(setup: Setup, shape: Shape, runner: OverlappedRunner) -> Result:
    """The core step at every captured bucket, and what that makes of steps of 8 and of powers of two: the mean over
    row counts 1..W of the time of the bucket that each takes."""
    context = shape.contexts[0]
    by_bucket = {}
    for bucket in runner.limits.buckets:
        place_rows(runner, Stage.CORE, bucket, bucket, context)
        by_bucket[bucket] = milliseconds(setup, runner._graphs[Form(Stage.CORE, Variant.GATES), bucket], repeats=8)
    width = max(runner.limits.buckets)
    result: Result = {"ms": {str(bucket): took for bucket, took in by_bucket.items()}}
    for name, sizes in (("steps_of_8", bucket_sizes(width)), ("powers_of_two", power_of_two_sizes(width))):
        usable = tuple(size for size in sizes if size in by_bucket)
        mean = float(np.mean([by_bucket[bucket_for(usable, rows)] for rows in range(1, width + 1)]))
        result[name] = {"graphs_a_form": len(usable), "mean_ms": mean}
    return result


def launches(setup: Setup, shape: Shape, runner: OverlappedRunner, count: int = 200) -> Result:
    """Core steps through launch and read, two in flight: the host's time a launch, the device's time a step and its gap."""
    rows, context = min(shape.served_width, shape.width), shape.contexts[0]
    bucket = bucket_for(runner.limits.buckets, rows)
    place_rows(runner, Stage.CORE, bucket, rows, context)
    frame = runner._buffers[Stage.CORE, bucket].frame.cpu().numpy().copy()
    count = 6 if setup.dry_run else count
    host_s, done, in_flight = [], [], deque[LaunchedStage]()
    for index in range(count):
        header = StageBatch(index, Stage.CORE, bucket, rows, variant=Variant.GATES)
        start_s = time.perf_counter()
        in_flight.append(runner.launch(header, frame))
        host_s.append(time.perf_counter() - start_s)
        if len(in_flight) == 2:
            done.append(runner.read(in_flight.popleft()))
    done.extend(runner.read(stage) for stage in in_flight)
    gaps = [after.start_s - before.end_s for before, after in pairwise(done)]
    return {
        "rows": rows,
        "host_us_a_launch": float(np.median(host_s)) * 1e6,
        "device_ms_a_step": float(np.median([stage.end_s - stage.start_s for stage in done])) * 1e3,
        "gap_us": float(np.median(gaps)) * 1e6,
    }


def prefills(setup: Setup, shape: Shape, runner: OverlappedRunner) -> Result:
    """One prompt, as pieces and operator by operator; wall time, since launching is what pieces save."""
    result: Result = {"piece_counts": list(runner._pieces.counts)}
    for tokens in shape.prefill_tokens:
        chunks = PrefillInput.dummy(tokens, setup.device)
        times = {}
        for name, context in (("pieces_ms", runner._pieces.context), ("eager_ms", PrefillAttention)):
            took = []
            for _ in range(3):
                synchronize(setup)
                start_s = time.perf_counter()
                with torch.inference_mode():
                    runner.stages.prefill(chunks, PLAIN, context)
                synchronize(setup)
                took.append((time.perf_counter() - start_s) * 1e3)
            times[name] = float(np.median(took))
        result[str(tokens)] = times
    return result


# --- engines


def engines(setup: Setup, model: str) -> Iterator[tuple[str, Result]]:
    """The real processes: idle share in the three modes; cb, no-refill and refill with replayed exits."""
    from depthbatch.benchmarks.throughput import measure

    gc.collect()
    shape = setup.shape(model)
    workload = workload_of(shape)
    block = default_block_size(setup.device, torch.bfloat16)
    base = EngineConfig(
        model=write_config(shape, setup.work / model),
        load_format="dummy",
        dtype=shape.dtype,
        device=setup.device.type,
        max_num_seqs=shape.served_width,
        max_model_len=workload.longest,
        kv_blocks=shape.served_width * -(-workload.longest // block),
    )
    flops, baseline = stage_flops(base), None
    for label, policy, mode in ENGINES:
        record = measure(msgspec.structs.replace(base, policy=policy, async_scheduling=mode), workload, flops)
        baseline = record if policy == "cb" else baseline
        if baseline is not None:
            record.compare_with(baseline)
        yield f"{model}.engine.{label}", record.as_json()
