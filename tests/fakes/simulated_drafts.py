"""A device without weights whose drafts are right as often as a test says, and the scheduler core on it in virtual time."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from depthbatch.benchmarks.sources import with_exits
from depthbatch.benchmarks.trace import blank_result, virtual_engine
from depthbatch.benchmarks.workload import Workload, WorkloadRequest
from depthbatch.common.config import EngineConfig
from depthbatch.common.frames import ROW_AUX, ROW_POSITION, ROW_SLOT, Int32Array, Stage
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import StageResult
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.scheduler.stage_batch import ScheduledStage
from depthbatch.worker.device_profile import DeviceProfile

PROMPT, OUTPUT = 512, 200  # tokens of a request


@dataclass
class DraftRun:
    """Virtual seconds of decode stages, and what they have done."""

    scheduler: Scheduler
    decode_s: float = 0.0
    tokens: int = 0
    right: int = 0
    wrong: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.decode_s


def decode(
    profile: DeviceProfile,
    sequences: int,
    exits: dict[int, float],
    accept: npt.NDArray[np.float64],
    output: int = OUTPUT,
    most_rows: int | None = None,
    watch: Callable[[DraftRun], None] | None = None,
    **settings: object,
) -> DraftRun:
    """``sequences`` requests, all from the start, to their end. ``exits``: weights of depths; ``accept`` [r_max + 1]: share
    of the drafts read after so many loops that are right; ``most_rows``: of a stage; ``watch`` is shown the run after
    every stage; ``settings``: of SchedulerConfig."""
    workload = Workload(tuple(WorkloadRequest(PROMPT, output) for _ in range(sequences)))
    config = _config(profile, workload, settings)
    if most_rows is not None:
        config = replace(config, buckets=tuple(range(1, 1 + most_rows)))
    scheduler = Scheduler(config)
    for index, request in enumerate(with_exits(workload, exits, 0).requests):
        assert scheduler.submit(request.submit(index, profile.r_max)) is None
    run, now = DraftRun(scheduler), 0.0
    while (stage := scheduler.next_stage(now)) is not None:
        header, kind = stage.header, Stage(stage.header.stage)
        context = int(stage.frame[ROW_POSITION].sum()) + header.rows if kind is Stage.CORE else 0
        seconds = profile.stage_seconds(kind, header.rows, context, header.n_tokens)
        run.decode_s += 0.0 if kind is Stage.PREFILL else seconds
        for event in scheduler.complete(_answer(stage, now, now + seconds, accept), now + seconds):
            run.tokens += len(event.token_ids)
            run.right += event.accepted_drafts
            run.wrong += event.rejected_drafts
        now += seconds
        if watch is not None:
            watch(run)
    assert run.tokens == sequences * output
    return run


def _config(profile: DeviceProfile, workload: Workload, settings: dict[str, object]) -> SchedulerConfig:
    width = len(workload.requests)
    options = EngineConfig(policy="auto", preemption="off", async_scheduling="off", max_num_seqs=width)
    info = virtual_engine(workload, width, profile.r_max, None, profile.boundary_layers)
    config = SchedulerConfig.resolve(options, info)
    config = replace(config, kv_layout=KVLayout.LAST_EXITED, coda_layers=profile.boundary_layers, **settings)
    return replace(config, buckets=tuple(range(1, 1 + width * (1 + config.draft_lanes))))


def _answer(stage: ScheduledStage, start_s: float, end_s: float, accept: npt.NDArray[np.float64]) -> StageResult:
    """Final tokens are a function of slot and position; a draft is that token where the position's number is below the
    acceptance at its depth, so what a shallow read knows a deeper one knows, too."""
    if stage.header.stage != Stage.CODA:
        return blank_result(stage, start_s, end_s)
    frame = stage.frame[:, : stage.header.rows]
    bits = _mixed(frame[ROW_SLOT], frame[ROW_POSITION])
    tokens = (bits % np.uint64(1 << 20)).astype("<i4")
    knows = (bits >> np.uint64(11)).astype(np.float64) / 2.0**53 < accept[np.abs(frame[ROW_AUX])]
    tokens += (frame[ROW_AUX] < 0) & ~knows
    return StageResult(stage.header.step_id, start_s, end_s, token_ids=tokens.tobytes())


def _mixed(slots: Int32Array, positions: Int32Array) -> npt.NDArray[np.uint64]:
    bits = slots.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ positions.astype(np.uint64)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        bits = (bits ^ bits >> np.uint64(30)) * np.uint64(factor)
    return bits ^ bits >> np.uint64(31)
