"""The schedule as data: one object a stage, in launch order (scheduling.md, Trace)."""

import contextlib
import json
from typing import Any, TextIO

import numpy as np

from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import ROW_AUX, Stage
from depthbatch.common.logging import get_logger
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
    """Writes every dispatched stage to a file. Exits that a gate decides are known after a stage is dispatched, so for
    such gates ``exits`` counts what was known then. A file that cannot be written any more (the disk is full) ends the
    trace, with a warning, and nothing else."""

    def __init__(self, path: str) -> None:
        try:
            self._file: TextIO = open(path, "w", buffering=1)  # noqa: SIM115 (open as long as the process)
        except OSError as error:
            raise ConfigError(f"stage-trace {path}: {error.strerror}") from None

    def write(self, stage: ScheduledStage, scheduler: Scheduler, exited_before: int) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(describe_stage(stage, scheduler, exited_before)) + "\n")
        except OSError as error:
            log.warning("stage-trace %s ends here: %s", self._file.name, error.strerror)
            self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it writes what is still buffered
            self._file.close()
