"""The ranks of a tensor-parallel worker: rank 0 is the worker process, which starts the others and tells them every stage.

Two ways between them. A socket pair a rank carries what the host knows: configuration, KV plan, then header and frames
of each stage, in order; a rank that waits there waits in the kernel, however long. torch.distributed carries what is
computed: gloo on CPUs; NCCL on GPUs, one of them a rank. A rank that dies takes rank 0 with it, and the kernel ends the
others with rank 0, wherever they are: also in a collective that will never end.
"""

import contextlib
import os
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
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
from depthbatch.worker.device import KVPlan, of_a_rank
from depthbatch.worker.models.tensor_parallel import TensorParallel
from depthbatch.worker.rank_processes import Channel, RankProcesses
from depthbatch.worker.runner.overlapped import RING_DEPTH, OverlappedRunner
from depthbatch.worker.runner.plain import PlainRunner
from depthbatch.worker.runner.ranked import FollowingStages, LeadingRunner, LeadingStages, all_reduce
from depthbatch.worker.runner.stage_io import LaunchedStage
from depthbatch.worker.runner.stages import Stages

SAME_ERROR_S = 5.0  # within which rank 0 has met an error that every rank meets; its end is ours
MakePlan = Callable[[int], KVPlan]  # from free bytes
log = get_logger("worker")


class Loaded(msgspec.Struct):
    """What a rank reports once its weights are there, or when it cannot go on."""

    error: str = ""


class Meet(msgspec.Struct):
    """What rank 0 answers when all have loaded: the file by which the ranks find each other."""

    store: str


class Free(msgspec.Struct):
    """What a rank reports when it has found the others: what memory its device has left."""

    free_bytes: int


class Ranks(ABC):
    """What building a worker asks of its ranks, on each of them."""

    parallel: TensorParallel
    stages: type[Stages]

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone decides, and says what is wrong."""
        return self.parallel.rank == 0

    @abstractmethod
    def join(self, device: torch.device) -> None:
        """Finds the others, once all have loaded. From here on there are collectives. Raises DepthbatchError for what a
        rank could not load."""

    @abstractmethod
    def plan(self, make: MakePlan, free_bytes: int, device: torch.device) -> KVPlan:
        """The KV memory that every rank takes: rank 0's plan for the least that any has free, of which each takes its part
        where they share it, which is on a CPU. Raises DepthbatchError as ``make`` does."""

    @abstractmethod
    def runner(self, runner: PlainRunner | OverlappedRunner) -> PlainRunner | OverlappedRunner | LeadingRunner:
        """What runs the stages of this rank."""


class Leader(Ranks):
    """Rank 0."""

    stages = LeadingStages

    def __init__(self, config: EngineConfig, processes: RankProcesses) -> None:
        self.parallel = TensorParallel(0, config.tensor_parallel_size, all_reduce)
        self._processes = processes

    def join(self, device: torch.device) -> None:
        channels = self._processes.channels.values()
        for channel in channels:
            loaded = msgspec.json.decode(channel.receive(), type=Loaded)
            if loaded.error:
                raise ModelError(loaded.error)
        directory = tempfile.mkdtemp(prefix="depthbatch-ranks-")  # for this moment only, 0700
        try:
            meet = Meet(str(Path(directory, "store")))
            for channel in channels:
                channel.send(msgspec.json.encode(meet))
            join(meet.store, self.parallel, device)
        finally:
            shutil.rmtree(directory)

    def plan(self, make: MakePlan, free_bytes: int, device: torch.device) -> KVPlan:
        channels = self._processes.channels.values()
        others = [msgspec.json.decode(channel.receive(), type=Free).free_bytes for channel in channels]
        plan = make(of_a_rank([free_bytes, *others], device))
        for channel in channels:
            channel.send(msgspec.json.encode(plan))
        log.info("tensor parallel: %d ranks; KV figures are of each", self.parallel.size)
        return plan

    def runner(self, runner: PlainRunner | OverlappedRunner) -> LeadingRunner:
        return LeadingRunner(runner, self._tell, self._processes.wait_for_the_watch)

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

    def join(self, device: torch.device) -> None:
        self._channel.send(msgspec.json.encode(Loaded()))
        meet = msgspec.json.decode(self._channel.receive(), type=Meet)
        self._joined = True
        join(meet.store, self.parallel, device)

    def plan(self, make: MakePlan, free_bytes: int, device: torch.device) -> KVPlan:
        self._channel.send(msgspec.json.encode(Free(free_bytes)))
        return msgspec.json.decode(self._channel.receive(), type=KVPlan)

    def runner(self, runner: PlainRunner | OverlappedRunner) -> PlainRunner | OverlappedRunner:
        return runner

    def run(self, runner: PlainRunner | OverlappedRunner) -> None:
        """Runs what rank 0 runs, until that ends. What comes of it is read as it finishes, and looked at by nobody."""
        decoder = MessageDecoder(StageBatch)
        in_flight: deque[LaunchedStage] = deque()
        with contextlib.suppress(EOFError):
            while True:
                header = decoder.decode(self._channel.receive())
                assert isinstance(header, StageBatch)
                frames = [self._channel.receive() for _ in range(2 if header.n_slot_params else 1)]
                in_flight.append(runner.launch(header, *(np.frombuffer(frame, np.int32) for frame in frames)))
                while in_flight and (len(in_flight) == RING_DEPTH or runner.finished(in_flight[0])):
                    runner.read(in_flight.popleft())

    def fail(self, error: DepthbatchError) -> None:
        """Tells rank 0, whose error it then is, and waits for its end. Where rank 0 may wait in a collective already, the
        end of this process is what it notices, unless it fails of the same first."""
        if self._joined:
            time.sleep(SAME_ERROR_S)
            raise error
        self._channel.send(msgspec.json.encode(Loaded(str(error))))
        with contextlib.suppress(EOFError):
            self._channel.receive()


def join(store: str, parallel: TensorParallel, device: torch.device) -> None:
    """Makes this process rank ``parallel.rank`` of the default group; all ranks are there when it returns, and on GPUs NCCL
    has what it needs of the device's memory."""
    meeting = dist.FileStore(store, parallel.size)  # type: ignore[attr-defined]
    if device.type == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=meeting, rank=parallel.rank, world_size=parallel.size)
        dist.barrier()
        return
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # Its thread would ask the store every second, which is gone then; what it looks for, the scheduler sees (--hang-s).
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    dist.init_process_group("nccl", store=meeting, rank=parallel.rank, world_size=parallel.size, device_id=device)
    first = torch.zeros(1, dtype=torch.int32, device=device)
    dist.all_reduce(first)
    dist.broadcast(first, 0)
    dist.barrier()
