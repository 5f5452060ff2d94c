"""Ranks as threads of this process: the collectives meet at a barrier, every rank has its own model, KV memory and slots.

Each thread does what its rank would do, so a whole tensor-parallel engine runs in lock-step within a second.
"""

import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from depthbatch.common.config import EngineConfig
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
from fakes.lockstep import LockstepEngine

WAIT_S = 30.0
Runner = PlainRunner | OverlappedRunner


class ThreadGroup:
    """torch.distributed's collectives between ``size`` threads; the rank of each is what it was started as."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.collectives = 0
        self.broadcasts: list[tuple[torch.dtype, int]] = []
        self._barrier = threading.Barrier(size)
        self._given: list[Tensor] = [torch.empty(0)] * size
        self._local = threading.local()

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        """Takes the place of torch.distributed."""
        patch.setattr(ranked, "dist", self)
        patch.setattr(worker_ranks, "join", lambda store, parallel, device: None)

    def enter(self, rank: int) -> None:
        """Says which rank the calling thread is."""
        self._local.rank = rank

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in its place. A rank whose tensor has another shape breaks here."""
        total = torch.stack(self._exchange(x)).sum(0)
        return x.copy_(total)

    def broadcast(self, x: Tensor, source: int) -> None:
        x.copy_(self._exchange(x)[source])
        if self._local.rank == 0:
            self.broadcasts.append((x.dtype, x.dim()))

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._given[self._local.rank] = x.clone()
        self._barrier.wait(WAIT_S)
        given = list(self._given)
        self._barrier.wait(WAIT_S)
        if self._local.rank == 0:
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
        follower.run(of_rank(_assemble(config, follower, device, backend), rank))

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
