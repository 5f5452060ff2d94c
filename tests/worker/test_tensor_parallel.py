"""Ranks that share a model: shares put together are the whole, tokens and depths are those of one rank, and when a rank
dies the worker does, and nothing else."""

import argparse
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError, ModelError
from depthbatch.common.frames import Stage
from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.deploy.cli import info
from depthbatch.deploy.cli.info import add_info_arguments, run_info
from depthbatch.frontend.llm import LLM
from depthbatch.frontend.params import RequestDefaults, SamplingParams
from depthbatch.worker import ranks
from depthbatch.worker.build import build_runner
from depthbatch.worker.device import KVPlan, resolve_device
from depthbatch.worker.models.checkpoint import Checkpoint, CheckpointSource
from depthbatch.worker.models.loader import load_model, open_model_dir
from depthbatch.worker.models.tensor_parallel import TensorParallel
from fakes.checkpoints import FIDELITY, HUGINN_TINY, OURO_TINY
from fakes.lockstep import Disturbance, LockstepEngine
from fakes.model_batch import Batch
from fakes.thread_ranks import ThreadedLockstep, ThreadGroup

FAMILIES = [OURO_TINY, HUGINN_TINY, FIDELITY / "nanbeige-tiny", FIDELITY / "retro-llama-tiny"]


@pytest.mark.parametrize("path", FAMILIES, ids=lambda path: path.name)
def test_shares_put_together_are_the_whole(path: Path) -> None:
    """Every tensor, also those of several parts (Huginn's Wqkv holds q, k and v, its fc gate and up): each rank reads
    its own rows or columns, none is read twice or not at all, and what is not declared is whole on every rank."""
    model_dir = open_model_dir(str(path))
    table = model_dir.family.tensors(model_dir.config)
    stored = load_file(path / "model.safetensors")
    checkpoint = Checkpoint(path)
    both = [TensorParallel(rank, 2) for rank in range(2)]
    sources = [CheckpointSource(checkpoint, torch.float32, torch.device("cpu"), table.splits, rank) for rank in both]
    for name in table.required:
        shares = [source.take(name) for source in sources]
        if (split := table.splits.get(name)) is None:
            assert all(torch.equal(share, stored[name]) for share in shares)
            continue
        whole = torch.full_like(stored[name], torch.nan)
        for rank, share in zip(both, shares, strict=True):
            assert share.is_contiguous() and share.numel() * 2 == whole.numel()
            parts = torch.split(share, [count * split.unit // 2 for count in split.counts], split.dim)
            for part, place in zip(parts, split.slices(rank), strict=True):
                whole[(*[slice(None)] * split.dim, place)] = part
        assert torch.equal(whole, stored[name]), name


@pytest.mark.parametrize("path", FAMILIES, ids=lambda path: path.name)
def test_families_compute_the_same_on_two_ranks(path: Path) -> None:
    """Logits of two packed prompts at full depth; all ranks end with the same states. One all-reduce for the attention
    and one for the MLP of each layer and loop, and no more."""
    prompts = [[5, 17, 25, 3], [9, 8, 7, 6, 5, 4, 3, 2, 1, 77]]
    whole = load_model(str(path), r_max=2)
    expected = Batch(whole, KVLayout.DEPTH_INDEXED, 2).prefill(prompts)
    group = ThreadGroup(2)

    def work(parallel: TensorParallel) -> torch.Tensor:
        model = load_model(str(path), r_max=2, parallel=parallel)
        assert model.spec.num_heads * 2 == whole.spec.num_heads
        return Batch(model, KVLayout.DEPTH_INDEXED, 2).prefill(prompts)

    first, second = group.run(work)
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(first, second)
    spec = whole.spec
    assert group.collectives == 2 * (spec.prelude_layers + 2 * spec.core_layers + spec.coda_layers)


def test_degrees_that_do_not_divide_are_refused() -> None:
    """In one line that names those that do; so is what cannot be shared at all, and what has only one rank."""
    for model, size, message in (
        ("demo", 3, "tensor_parallel_size 3: this ouro model runs on 1, 2 or 4 ranks"),
        ("demo-huginn", 8, "tensor_parallel_size 8: this huginn model runs on 1, 2 or 4 ranks"),
        (str(FIDELITY / "nanbeige-tiny"), 4, "this nanbeige model runs on 1 or 2 ranks"),
        (str(FIDELITY / "dory-tiny"), 2, "tensor_parallel_size 2: this dory model runs on 1 rank$"),
        (str(FIDELITY / "retro-olmo-tiny"), 3, "tensor_parallel_size 3: this retrofitted model runs on 1 rank$"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_runner(EngineConfig.from_values({"model": model, "tensor_parallel_size": size, "device": "cpu"}))
    with pytest.raises(ConfigError, match="tensor_parallel_size 2: a simulated device is one rank"):
        EngineConfig.from_values({"device": "simulated:h100-ouro-1.4b", "tensor_parallel_size": 2})


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, also where ``auto`` would choose GPUs, and by ``info``, before anything is taken; and so is a torch
    without NCCL. Each rank has the GPU of its number."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for device in ("auto", "cuda"):
        with pytest.raises(
            ConfigError, match="tensor_parallel_size 2: each rank needs a GPU of its own, and 1 can be seen"
        ):
            build_runner(EngineConfig.from_values({"tensor_parallel_size": 2, "device": device}))
        with pytest.raises(ConfigError, match="each rank needs a GPU of its own"):
            run_info(info_arguments("demo", "--tensor-parallel-size", "2", "--device", device))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="tensor_parallel_size 2: this torch has no NCCL"):
        resolve_device("cuda", 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert [resolve_device("auto", 2, rank=rank) for rank in range(2)] == [torch.device("cuda", n) for n in range(2)]
    assert resolve_device("auto") == torch.device("cuda")


def test_info_says_where_ranks_have_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    """How many there may be, and of GPUs that nothing is known yet."""
    assert run_info(info_arguments("demo", "--device", "cpu", "--tensor-parallel-size", "2")) == 0
    told = capsys.readouterr().out
    assert "tensor parallel  1, 2 or 4 ranks\n" in told and "(on cpu, 2 ranks, " in told
    assert "not run yet" in info._reservation((1, 2, 4), "cuda")
    assert not info._reservation((1,), "cuda") and not info._reservation((1, 2), "cpu")


def info_arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_info_arguments(parser)
    return parser.parse_args(words)


PROMPTS = [[49, 50, 43, 51, 48, 61], [110, 120, 33], [52, 54, 43, 53, 61], list(range(60, 80))]
OUTPUTS = 9


def params_of(gates: tuple[Gate, ...]) -> list[SamplingParams]:
    """A request of every gate: greedy, sampled with a seed, with a penalty; and one with a grammar and logprobs."""
    shapes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.0, "repetition_penalty": 1.3},
    ]
    own: dict[Gate, dict[str, Any]] = {
        Gate.NONE: {"gate": "none"},
        Gate.FIXED: {"num_loops": 3},
        Gate.REPLAY: {"exit_depths": [2, 4, 3, 4, 2, 3]},
    }
    return [
        SamplingParams(
            max_tokens=OUTPUTS,
            ignore_eos=True,
            **(own.get(gate) or {"gate": gate.label, "exit_threshold": (0.3, 0.6, 0.9)[i % 3]}),
            **shapes[i % 3],
        )
        for i, gate in enumerate(gates)
    ] + [SamplingParams(max_tokens=OUTPUTS, temperature=1.0, seed=7, regex="[0-9]{3,6}", logprobs=1)]


def run(engine: LockstepEngine, disturbances: Sequence[Disturbance] = ()) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and depths of a request of every gate."""
    info = engine.built.info
    defaults, every = RequestDefaults(info, seed=0), params_of(info.gates)
    prompts = [PROMPTS[i % 4] for i in range(len(every))]
    requests = [(prompt, defaults.resolve(own, len(prompt), 0)) for prompt, own in zip(prompts, every, strict=True)]
    answers = engine.run(requests, disturbances)
    return [answer.tokens for answer in answers], [answer.depths for answer in answers]


@pytest.mark.parametrize(
    ("model", "layout", "policy", "more"),
    [
        ("demo", "single", "cb", {}),
        ("demo", "first_then_shared", "refill", {"preemption": "offload"}),
        ("demo", "last_exited", "auto", {}),
        ("demo", "last_exited", "refill", {"speculation": 2}),
        ("demo", "depth_indexed", "no-refill", {"prefix_caching": "on"}),
        ("demo-huginn", "single", "refill", {"state_init": "seeded"}),
        ("demo-huginn", "last_exited", "auto", {"max_num_batched_tokens": 8}),
    ],
)
def test_tokens_and_depths_are_those_of_one_rank(
    model: str, layout: str, policy: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every gate of the layout, mixed in one batch of fewer slots than requests, sequences preempted and the worker lost
    on the way. What goes to other ranks beside the layers' sums is one int32 vector, and only of a stage that samples."""
    values = {"model": model, "kv_layout": layout, "policy": policy, "max_num_seqs": 5, "min_free_slots": 1}
    config = EngineConfig.from_values({**values, "kv_blocks": 40, "max_loops": 4, **more})
    tokens, depths = run(LockstepEngine(config))
    group = ThreadGroup(2)
    group.stand_in(monkeypatch)
    together = ThreadedLockstep(config, group)
    before = len(group.broadcasts)
    assert run(together) == (tokens, depths)
    assert len({depth for own in depths for depth in own}) > 1
    sampling = sum(ran.header.stage in (Stage.PREFILL, Stage.CODA) for ran in together.history)
    assert before < len(group.broadcasts) <= before + sampling
    assert set(group.broadcasts) == {(torch.int32, 1)}
    disturbed = [Disturbance(15, "preempt", 1), Disturbance(40, "worker"), Disturbance(70, "preempt", 2)]
    assert run(together, disturbed) == (tokens, depths)


OPTIONS = {"max_num_seqs": 5, "min_free_slots": 1, "kv_blocks": 80, "threads": 1, "device": "cpu"}


def other_rank(llm: LLM) -> int:
    """The process of rank 1."""
    worker = llm.health().processes["worker"].pid
    children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    [pid] = [pid for pid in children if "depthbatch.worker.rank" in Path(f"/proc/{pid}/cmdline").read_text()]
    return int(pid)


def running(pid: int) -> bool:
    """Whether the process lives; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Told:
    """A rank's channel that has found the others."""

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes, self.sent = free_bytes, list[bytes]()

    def receive(self) -> bytes:
        return msgspec.json.encode(ranks.Free(self.free_bytes))

    def send(self, message: bytes) -> None:
        self.sent.append(message)


@pytest.mark.parametrize(("device", "blocks"), [("cpu", 600 // 3), ("cuda", 600)])
def test_kv_memory_is_planned_once_for_the_least_that_a_rank_has(device: str, blocks: int) -> None:
    """Divided by the ranks on a CPU, where they share the machine, not on GPUs; every rank gets rank 0's plan."""
    others = {1: Told(900), 2: Told(600)}
    processes: Any = SimpleNamespace(channels=others)
    leader = ranks.Leader(EngineConfig.from_values({"tensor_parallel_size": 3}), processes)
    plan = leader.plan(lambda free_bytes: KVPlan(free_bytes, 16, 1, 64), 700, torch.device(device))
    assert plan.num_blocks == blocks
    for told in others.values():
        assert [msgspec.json.decode(message, type=KVPlan) for message in told.sent] == [plan]


@pytest.mark.parametrize(("model", "kills"), [("demo", {6: 1, 30: 0}), ("demo-huginn", {})])
def test_kill_9_of_any_rank_changes_nothing(model: str, kills: dict[int, int]) -> None:
    """Row "a rank of a sharded model dies: the others wait for it in a collective, for ever". Real processes over gloo:
    tokens and depths of every gate are those of one rank; when rank 1 and then rank 0 is killed in the middle of streams,
    they go on with the same ones on a new pair of ranks, and of the old pair nothing is left."""
    alone = LockstepEngine(EngineConfig.from_values(OPTIONS | {"model": model}))
    every = params_of(alone.built.info.gates)
    with LLM(model, quiet=True, tensor_parallel_size=2, **OPTIONS) as llm:
        assert llm.info == alone.built.info
        tokens, depths = ([list[int]() for _ in every] for _ in range(2))
        killed, gone = 0, list[int]()
        for count, (index, delta) in enumerate(llm.stream([PROMPTS[i % 4] for i in range(len(every))], every)):
            tokens[index] += delta.token_ids
            depths[index] += delta.exit_depths
            if count in kills:
                pair = llm.health().processes["worker"].pid, other_rank(llm)
                os.kill(pair[kills[count]], signal.SIGKILL)
                gone += pair
                killed += 1
        assert (tokens, depths) == run(alone)
        assert killed == len(kills) and not any(map(running, gone))
        gone = [llm.health().processes["worker"].pid, other_rank(llm)]
        said = (llm._client.run_dir / "worker.log").read_text()
    assert said.count("rank 1 died (killed by SIGKILL), and the worker with it") == sum(kills.values())
    assert not any(map(running, gone))


def test_what_a_rank_cannot_load_is_the_workers_error(tmp_path: Path) -> None:
    """Broken numbers in rank 1's share alone: it tells rank 0, whose error it is, and nothing is left of it."""
    model = tmp_path / "model"
    shutil.copytree(OURO_TINY, model)
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.o_proj.weight"][:, -1] = torch.nan
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"o_proj\.weight' holds NaN"):
        build_runner(EngineConfig.from_values(OPTIONS | {"model": str(model), "tensor_parallel_size": 2}))
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    assert not any("depthbatch.worker.rank" in Path(f"/proc/{pid}/cmdline").read_text() for pid in children)
