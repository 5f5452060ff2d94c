"""Ranks as threads of this process: the collectives meet at a barrier, every rank has its own model, KV memory and slots.

Each thread does what its rank would do, so a whole tensor-parallel engine runs in lock-step within a second.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from depthbatch.common.config import EngineConfig
from depthbatch.common.frames import Int32Array
from depthbatch.common.messages import PLAIN, StageBatch
from depthbatch.worker.build import BuiltRunner, assemble
from depthbatch.worker.device import KVPlan
from depthbatch.worker.host_kv import HostKV
from depthbatch.worker.models.interface import LoopedModel
from depthbatch.worker.models.loader import load_model
from depthbatch.worker.models.tensor_parallel import TensorParallel
from depthbatch.worker.ranks import Ranks
from depthbatch.worker.runner.plain import PlainRunner
from depthbatch.worker.runner.ranked import FollowingStages, LeadingRunner, LeadingStages
from fakes.lockstep import LockstepEngine

WAIT_S = 30.0


class ThreadGroup:
    """torch.distributed's collectives between ``size`` threads; the rank of each is what it was started as."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.collectives = 0
        self.broadcasts: list[tuple[torch.dtype, int]] = []
        self._barrier = threading.Barrier(size)
        self._given: list[Tensor] = [torch.empty(0)] * size
        self._local = threading.local()

    def enter(self, rank: int) -> None:
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


class ThreadRank(Ranks):
    """One rank; ``followers`` are the queues of stages that rank 0 tells."""

    def __init__(self, parallel: TensorParallel, plans: SimpleQueue[KVPlan], followers: list[SimpleQueue[Any]]) -> None:
        self.parallel, self._plans, self._followers = parallel, plans, followers
        self.stages = FollowingStages if parallel.rank else LeadingStages

    def plan(self, make: Callable[[int], KVPlan], free_bytes: int) -> KVPlan:
        if self.parallel.rank:
            return self._plans.get(timeout=WAIT_S)
        plan = make(free_bytes)
        for _ in self._followers:
            self._plans.put(plan)
        return plan

    def runner(
        self, stages: Any, limits: Any, device: torch.device, grammars: Any, host_kv: HostKV | None
    ) -> PlainRunner:
        if self.parallel.rank:
            return PlainRunner(stages, limits, device, host_kv=host_kv)
        return LeadingRunner(stages, limits, device, grammars, host_kv, self._tell, lambda: None)

    def _tell(self, header: StageBatch, frame: Int32Array, slot_params: Int32Array | None) -> None:
        assert header.variant == PLAIN, "another rank is to decide something"
        for queue in self._followers:
            queue.put((header, frame.copy(), None if slot_params is None else slot_params.copy()))


class ThreadedLockstep(LockstepEngine):
    """The lock-step engine whose worker is several ranks; ``group`` is in the place of torch.distributed."""

    def __init__(self, config: EngineConfig, group: ThreadGroup) -> None:
        self.group = group
        super().__init__(config)

    def _new_worker(self) -> BuiltRunner:
        plans: SimpleQueue[KVPlan] = SimpleQueue()
        queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(1, self.group.size)]

        def follow(rank: int) -> None:
            self.group.enter(rank)
            runner = self._assemble(rank, plans, queues).runner
            while True:
                runner.launch(*queues[rank - 1].get())

        for rank in range(1, self.group.size):
            threading.Thread(target=follow, args=(rank,), daemon=True).start()
        self.group.enter(0)
        return self._assemble(0, plans, queues)

    def _assemble(self, rank: int, plans: SimpleQueue[KVPlan], queues: list[SimpleQueue[Any]]) -> BuiltRunner:
        parallel = TensorParallel(rank, self.group.size, self.group.all_reduce)
        with torch.inference_mode(False):
            model = load_share(self.config, parallel)
        return assemble(self.config, model, self._device, ranks=ThreadRank(parallel, plans, queues))


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
