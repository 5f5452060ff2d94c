"""The schedule as data: one object a stage, in launch order (scheduling.md, Trace)."""

import contextlib
import json
from collections import deque
from typing import Any, TextIO

import numpy as np

from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import ROW_AUX, Stage
from depthbatch.common.logging import get_logger
from depthbatch.common.messages import StageResult
from depthbatch.scheduler.core import Scheduler
from depthbatch.scheduler.stage_batch import ScheduledStage

log = get_logger("stage_trace")


def describe_stage(stage: ScheduledStage, scheduler: Scheduler, exited_before: int) -> dict[str, Any]:
    """A stage that was just dispatched. Queue sizes are after it; exited_before: Q_C before it, which tells its exits."""
    header, view = stage.header, scheduler.view
    line: dict[str, Any] = {"stage": Stage(header.stage).label, "batch": header.rows}
    if header.stage == Stage.PREFILL:
        line["prompt_tokens"] = header.n_tokens
    if header.stage == Stage.CORE:
        loops, rows = np.unique(stage.frame[ROW_AUX, : header.rows], return_counts=True)
        line["depths"] = {str(loop): int(count) for loop, count in zip(loops.tolist(), rows.tolist(), strict=True)}
        line["exits"] = view.q_c - exited_before
    if scheduler.config.policy in ("cb", "no-refill"):
        return line | {"q_d": view.q_d, "q_p": view.q_p}
    return line | {"q_r": view.q_r, "q_c": view.q_c, "q_p": view.q_p}


class StageTrace:
    """Writes every dispatched stage to a file, in launch order, as soon as its result is there: with ``start_s`` and ``end_s``
    on the worker's clock, which a stage that was lost with its worker has not. Exits that a gate decides are known after a
    stage is dispatched, so for such gates ``exits`` counts what was known then. A file that cannot be written any more (the
    disk is full) ends the trace, with a warning, and nothing else."""

    def __init__(self, path: str) -> None:
        self._in_flight: deque[tuple[int, dict[str, Any]]] = deque()
        try:
            self._file: TextIO = open(path, "w", buffering=1)  # noqa: SIM115 (open as long as the process)
        except OSError as error:
            raise ConfigError(f"stage-trace {path}: {error.strerror}") from None

    def dispatched(self, stage: ScheduledStage, scheduler: Scheduler, exited_before: int) -> None:
        """Right after the core has given the stage out."""
        if not self._file.closed:
            line = describe_stage(stage, scheduler, exited_before)
            self._in_flight.append((stage.header.step_id, line))

    def finished(self, result: StageResult) -> None:
        """Of the present worker; results come in launch order."""
        while self._in_flight and self._in_flight[0][0] <= result.step_id:
            step_id, line = self._in_flight.popleft()
            times = {"start_s": result.start_s, "end_s": result.end_s} if step_id == result.step_id else {}
            self._write(line | times)

    def close(self) -> None:
        """The stages that are still in flight come without times."""
        while self._in_flight:
            self._write(self._in_flight.popleft()[1])
        self._close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            log.warning("stage-trace %s ends here: %s", self._file.name, error.strerror)
            self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # it writes what is still buffered
            self._file.close()
