"""Two ranks on two GPUs against one: the same tokens and depths, also when a rank is killed; what a sum takes; how fast.

Without a GPU (dry run) the same code runs over gloo.
"""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from depthbatch.benchmarks.all_reduce import all_reduce_times
from depthbatch.benchmarks.flops import stage_flops
from depthbatch.benchmarks.gpu.sections import Result, Setup, Skipped
from depthbatch.benchmarks.gpu.shapes import workload_of, write_config
from depthbatch.benchmarks.throughput import measure
from depthbatch.common.config import EngineConfig
from depthbatch.frontend.llm import LLM
from depthbatch.frontend.params import SamplingParams

RANKS = 2
MODELS = {"demo": {0: 1, 40: 0}, "demo-huginn": dict[int, int]()}  # the rank killed after so many pieces of the streams
OUTPUTS = 32
Answers = tuple[list[list[int]], list[list[int]]]  # tokens and depths


def ranks(setup: Setup) -> Iterator[tuple[str, Result]]:
    """Raises Skipped with fewer GPUs than ranks, AssertionError where two ranks give other answers than one."""
    if not setup.dry_run and (count := torch.cuda.device_count()) < RANKS:
        raise Skipped(f"{count} GPU can be seen, {RANKS} ranks need {RANKS}")
    for model, kills in MODELS.items():
        yield f"ranks.exact.{model}", exactness(setup, model, kills)
    shape = setup.shape("ouro")
    hidden = shape.config["hidden_size"]
    times = all_reduce_times(RANKS, hidden, shape.dtype, shape.batches, setup.device.type)
    yield "ranks.all_reduce", {"hidden": hidden} | {str(rows): took._asdict() for rows, took in times.items()}
    workload = workload_of(shape)
    config = EngineConfig(
        model=write_config(shape, setup.work / "ouro"),
        load_format="dummy",
        dtype=shape.dtype,
        device=setup.device.type,
        max_num_seqs=shape.served_width,
        max_model_len=workload.longest,
        async_scheduling="lookahead",
    )
    flops, speeds = stage_flops(config), {}
    for count in (1, RANKS):
        record = measure(msgspec.structs.replace(config, tensor_parallel_size=count), workload, flops)
        speeds[str(count)] = record.as_json()
    yield "ranks.speed", speeds


def exactness(setup: Setup, model: str, kills: Mapping[int, int]) -> Result:
    """Greedy and sampled streams at every gate of the model in fp32."""
    options: dict[str, Any] = {
        "dtype": "float32",
        "device": setup.device.type,
        "max_num_seqs": 4,
        "max_model_len": 128,
        "kv_blocks": 64,
    }
    with LLM(model, quiet=True, **options) as llm:
        gates = [gate.label for gate in llm.info.gates if gate.takes_threshold]
        want = answers(llm, gates, {})
    with LLM(model, quiet=True, tensor_parallel_size=RANKS, **options) as llm:
        got, killed = answers(llm, gates, kills), len(kills)
        restarts = llm.health().processes["worker"].restarts
    result = {
        "tokens": sum(map(len, want[0])),
        "depths": sorted({d for own in want[1] for d in own}),
        "restarts": restarts,
    }
    if got != want or restarts != killed:
        same = sum(
            a == b for ours, theirs in zip(got[0], want[0], strict=True) for a, b in zip(ours, theirs, strict=False)
        )
        raise AssertionError(f"not the answers of one rank after {killed} kills: {result}, {same} tokens the same")
    return result


def answers(llm: LLM, gates: Sequence[str], kills: Mapping[int, int]) -> Answers:
    """Of eight streams, which run while the ranks die that ``kills`` names."""
    prompts = [[49 + 7 * index + step for step in range(3 + 5 * index)] for index in range(8)]
    params = [
        SamplingParams(
            max_tokens=OUTPUTS,
            ignore_eos=True,
            temperature=float(index % 2),
            seed=index,
            gate=gates[index % len(gates)],
            exit_threshold=0.5,
        )
        for index in range(len(prompts))
    ]
    tokens, depths = ([list[int]() for _ in prompts] for _ in range(2))
    for count, (index, delta) in enumerate(llm.stream(prompts, params)):
        tokens[index] += delta.token_ids
        depths[index] += delta.exit_depths
        if count in kills:
            os.kill(rank_pids(llm)[kills[count]], signal.SIGKILL)
    return tokens, depths


def rank_pids(llm: LLM) -> list[int]:
    """Of rank 0, which is the worker, and of the others, by rank."""
    worker = llm.health().processes["worker"].pid
    children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
    return [worker, *sorted(pid for pid, command in commands.items() if "depthbatch.worker.rank" in command)]
