"""The ranks of a tensor-parallel worker: rank 0 is the worker process, which starts the others and tells them every stage.

Two ways between them. A socket pair a rank carries what the host knows: configuration, KV plan, then header and frames
of each stage, in order; a rank that waits there waits in the kernel, however long. torch.distributed (gloo) carries what
is computed. A rank that dies takes rank 0 with it, and the kernel ends the others with rank 0.
"""

import contextlib
import os
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import DepthbatchError, ModelError
from depthbatch.common.frames import Int32Array
from depthbatch.common.logging import get_logger
from depthbatch.common.messages import MessageDecoder, StageBatch, encode
from depthbatch.worker.device import KVPlan
from depthbatch.worker.host_kv import HostKV
from depthbatch.worker.models.tensor_parallel import TensorParallel
from depthbatch.worker.rank_processes import Channel, RankProcesses
from depthbatch.worker.runner.plain import PlainRunner
from depthbatch.worker.runner.ranked import FollowingStages, LeadingRunner, LeadingStages, all_reduce
from depthbatch.worker.runner.stage_input import StageLimits
from depthbatch.worker.runner.stages import Stages
from depthbatch.worker.sampling.grammar_matchers import Grammars

SAME_ERROR_S = 5.0  # within which rank 0 has met an error that every rank meets; its end is ours
MakePlan = Callable[[int], KVPlan]  # from free bytes
log = get_logger("worker")


class Loaded(msgspec.Struct):
    """What a rank reports: its free memory once its weights are there, or why it cannot go on."""

    free_bytes: int = 0
    error: str = ""


class Begin(msgspec.Struct):
    """What rank 0 answers when all have loaded."""

    plan: KVPlan
    store: str  # file by which the ranks find each other


class Ranks(ABC):
    """What building a worker asks of its ranks, on each of them."""

    parallel: TensorParallel
    stages: type[Stages]

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone decides, and says what is wrong."""
        return self.parallel.rank == 0

    @abstractmethod
    def plan(self, make: MakePlan, free_bytes: int) -> KVPlan:
        """The KV memory that every rank takes: rank 0's plan for the least that any has free, shared by all, since they
        are on one machine. From here on there are collectives. Raises DepthbatchError for what a rank could not load."""

    @abstractmethod
    def runner(
        self,
        stages: Stages,
        limits: StageLimits,
        device: torch.device,
        grammars: Grammars | None,
        host_kv: HostKV | None,
    ) -> PlainRunner: ...


class Leader(Ranks):
    """Rank 0."""

    stages = LeadingStages

    def __init__(self, config: EngineConfig, processes: RankProcesses) -> None:
        self.parallel = TensorParallel(0, config.tensor_parallel_size, all_reduce)
        self._processes = processes

    def plan(self, make: MakePlan, free_bytes: int) -> KVPlan:
        for channel in self._processes.channels.values():
            loaded = msgspec.json.decode(channel.receive(), type=Loaded)
            if loaded.error:
                raise ModelError(loaded.error)
            free_bytes = min(free_bytes, loaded.free_bytes)
        plan = make(free_bytes // self.parallel.size)
        directory = tempfile.mkdtemp(prefix="depthbatch-ranks-")  # for this moment only, 0700
        try:
            begin = Begin(plan, str(Path(directory, "store")))
            for channel in self._processes.channels.values():
                channel.send(msgspec.json.encode(begin))
            join(begin.store, self.parallel)
        finally:
            shutil.rmtree(directory)
        log.info("tensor parallel: %d ranks; KV figures are of each", self.parallel.size)
        return plan

    def runner(
        self,
        stages: Stages,
        limits: StageLimits,
        device: torch.device,
        grammars: Grammars | None,
        host_kv: HostKV | None,
    ) -> PlainRunner:
        watch = self._processes.wait_for_the_watch
        return LeadingRunner(stages, limits, device, grammars, host_kv, self._tell, watch)

    def _tell(self, header: StageBatch, frame: Int32Array, slot_params: Int32Array | None) -> None:
        parts = [frame] if slot_params is None else [frame, slot_params]
        messages = [encode(header), *(part.tobytes() for part in parts)]
        for channel in self._processes.channels.values():
            channel.send(*messages)


class Follower(Ranks):
    """Another rank."""

    stages = FollowingStages

    def __init__(self, channel: Channel, rank: int, size: int) -> None:
        self.parallel = TensorParallel(rank, size, all_reduce)
        self._channel = channel
        self._joined = False

    def plan(self, make: MakePlan, free_bytes: int) -> KVPlan:
        self._channel.send(msgspec.json.encode(Loaded(free_bytes)))
        begin = msgspec.json.decode(self._channel.receive(), type=Begin)
        self._joined = True
        join(begin.store, self.parallel)
        return begin.plan

    def runner(
        self,
        stages: Stages,
        limits: StageLimits,
        device: torch.device,
        grammars: Grammars | None,
        host_kv: HostKV | None,
    ) -> PlainRunner:
        return PlainRunner(stages, limits, device, host_kv=host_kv)

    def run(self, runner: PlainRunner) -> None:
        """Runs what rank 0 runs, until that ends."""
        decoder = MessageDecoder(StageBatch)
        with contextlib.suppress(EOFError):
            while True:
                header = decoder.decode(self._channel.receive())
                assert isinstance(header, StageBatch)
                frames = [self._channel.receive() for _ in range(2 if header.n_slot_params else 1)]
                runner.launch(header, *(np.frombuffer(frame, np.int32) for frame in frames))

    def fail(self, error: DepthbatchError) -> None:
        """Tells rank 0, whose error it then is, and waits for its end. Where rank 0 may wait in a collective already, the
        end of this process is what it notices, unless it fails of the same first."""
        if self._joined:
            time.sleep(SAME_ERROR_S)
            raise error
        self._channel.send(msgspec.json.encode(Loaded(error=str(error))))
        with contextlib.suppress(EOFError):
            self._channel.receive()


def join(store: str, parallel: TensorParallel) -> None:
    """Makes this process rank ``parallel.rank`` of the default group; all ranks are there when it returns."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = dist.FileStore(store, parallel.size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=meeting, rank=parallel.rank, world_size=parallel.size)
    dist.barrier()
