"""Ranks as threads of this process: the collectives meet at a barrier, every rank has its own model, KV memory and slots.

Each thread does what its rank would do, so a whole tensor-parallel engine runs in lock-step within a second.
"""

import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import pytest
import torch
from torch import Tensor

from depthbatch.common.config import EngineConfig
from depthbatch.common.frames import Int32Array
from depthbatch.common.messages import PLAIN, StageBatch
from depthbatch.worker import ranks as worker_ranks
from depthbatch.worker.build import BuiltRunner, assemble
from depthbatch.worker.models.interface import LoopedModel
from depthbatch.worker.models.loader import load_model
from depthbatch.worker.models.tensor_parallel import TensorParallel
from depthbatch.worker.rank_processes import Channel
from depthbatch.worker.ranks import Follower, Leader, Ranks
from depthbatch.worker.runner import ranked
from depthbatch.worker.runner.overlapped import OverlappedRunner
from depthbatch.worker.runner.plain import PlainRunner
from depthbatch.worker.runner.ranked import LeadingRunner
from depthbatch.worker.runner.stage_io import LaunchedStage
from fakes.lockstep import LockstepEngine

WAIT_S = 30.0
Runner = PlainRunner | OverlappedRunner
GROUPS: "WeakValueDictionary[int, ThreadGroup]" = WeakValueDictionary()


class ThreadGroup:
    """torch.distributed's collectives between ``size`` threads; the rank of each is what it was started as."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.collectives = 0
        self.broadcasts: list[tuple[torch.dtype, int]] = []
        self._barrier = threading.Barrier(size)
        self._given: list[Tensor] = [torch.empty(0)] * size
        self._local = threading.local()
        GROUPS[id(self)] = self

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        """Takes the place of torch.distributed."""
        patch.setattr(ranked, "dist", self)
        patch.setattr(worker_ranks, "join", lambda store, parallel, device: None)

    def enter(self, rank: int) -> None:
        """Says which rank the calling thread is."""
        self._local.rank = rank

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in its place. A rank whose tensor has another shape breaks here."""
        torch.ops.depthbatch_ranks.all_reduce_(x, id(self), self._local.rank)
        return x

    def broadcast(self, x: Tensor, source: int) -> None:
        torch.ops.depthbatch_ranks.broadcast_(x, source, id(self), self._local.rank)

    def add_up(self, x: Tensor, rank: int) -> None:
        x.copy_(torch.stack(self._exchange(x, rank)).sum(0))

    def take(self, x: Tensor, source: int, rank: int) -> None:
        x.copy_(self._exchange(x, rank)[source])
        if rank == 0:
            self.broadcasts.append((x.dtype, x.dim()))

    def _exchange(self, x: Tensor, rank: int) -> list[Tensor]:
        self._given[rank] = x.clone()
        self._barrier.wait(WAIT_S)
        given = list(self._given)
        self._barrier.wait(WAIT_S)
        if rank == 0:
            self.collectives += 1
        return given

    def run(self, work: Callable[[TensorParallel], Any]) -> list[Any]:
        """``work`` of every rank at the same time; what each gives."""
        results: list[Any] = [None] * self.size

        def run(rank: int) -> None:
            self.enter(rank)
            results[rank] = work(TensorParallel(rank, self.size, self.all_reduce))

        others = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(1, self.size)]
        for thread in others:
            thread.start()
        run(0)
        for thread in others:
            thread.join(WAIT_S)
        return results


# Operators, so that a tape (tape_accelerator.py) holds them as a graph holds NCCL's.
_library = torch.library.Library("depthbatch_ranks", "DEF")
_library.define("all_reduce_(Tensor(a!) x, int group, int rank) -> ()")
_library.define("broadcast_(Tensor(a!) x, int source, int group, int rank) -> ()")
_library.impl("all_reduce_", lambda x, group, rank: GROUPS[group].add_up(x, rank), "CPU")
_library.impl("broadcast_", lambda x, source, group, rank: GROUPS[group].take(x, source, rank), "CPU")


class ThreadedLockstep(LockstepEngine):
    """The lock-step engine whose worker is several ranks; ``group`` is in the place of torch.distributed.

    The ranks are the production's, over its socket pairs, but for the processes.
    """

    def __init__(self, config: EngineConfig, group: ThreadGroup) -> None:
        self.group = group
        super().__init__(config)

    def _new_worker(self) -> BuiltRunner:
        return build_ranks(self.config, self.group, self._device)


def build_ranks(
    config: EngineConfig,
    group: ThreadGroup,
    device: torch.device,
    backend: str | None = None,
    of_rank: Callable[[BuiltRunner, int], Runner] = lambda built, rank: built.runner,
) -> BuiltRunner:
    """Rank 0's; the others run as threads until it is gone. ``of_rank`` may put another runner around a rank's stages."""
    config = msgspec.structs.replace(config, tensor_parallel_size=group.size)
    ends = {rank: socket.socketpair() for rank in range(1, group.size)}

    def follow(rank: int, end: socket.socket) -> None:
        group.enter(rank)
        follower = Follower(Channel(end), rank, group.size)
        follower.run(_deciding_nothing(of_rank(_assemble(config, follower, device, backend), rank)))

    channels = {}
    for rank, (ours, theirs) in ends.items():
        threading.Thread(target=follow, args=(rank, theirs), daemon=True).start()
        channels[rank] = Channel(ours)
    processes: Any = SimpleNamespace(channels=channels, wait_for_the_watch=lambda: None)
    group.enter(0)
    leader = Leader(config, processes)
    built = _assemble(config, leader, device, backend)
    assert isinstance(built.runner, LeadingRunner)
    runner = of_rank(built._replace(runner=built.runner.runner), 0)
    return built._replace(runner=leader.runner(runner))


def _deciding_nothing(runner: Runner) -> Runner:
    """Runs only what asks for no decision."""
    launch = runner.launch

    def checked(header: StageBatch, *frames: Int32Array) -> LaunchedStage:
        decisions = "allow_lists", "adjustments", "bad_sequences", "targets"
        assert header.variant == PLAIN and not any(getattr(header.extra, name, b"") for name in decisions)
        return launch(header, *frames)

    setattr(runner, "launch", checked)  # noqa: B010  (a method of one object)
    return runner


def _assemble(config: EngineConfig, ranks: Ranks, device: torch.device, backend: str | None) -> BuiltRunner:
    with torch.inference_mode(False):
        model = load_share(config, ranks.parallel)
    return assemble(config, model, device, backend, ranks)


def load_share(config: EngineConfig, parallel: TensorParallel) -> LoopedModel:
    """The rank's share of the configuration's model."""
    return load_model(
        config.model,
        config.dtype,
        load_format=config.load_format,
        seed=config.seed,
        r_max=config.max_loops,
        state_init=config.state_init,
        parallel=parallel,
    )
