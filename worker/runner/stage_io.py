"""What a device is to the worker process: stages are launched, then read, in order. Imports no torch.

Launching and reading are apart, so that a device that computes asynchronously can have several stages in flight.
"""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from depthbatch.common.frames import Int32Array
from depthbatch.common.messages import RowFailure, StageBatch
from depthbatch.worker.runner.checks import StageLimits

NO_TOKENS = np.empty(0, np.int32)
NO_FLAGS = np.empty(0, np.uint8)


class StageOutput(NamedTuple):
    """What the host gets of a stage."""

    token_ids: Int32Array  # one a sampled sequence, in batch order; empty unless prefill or coda
    flags: npt.NDArray[np.uint8]  # one a row; empty unless a core step with gates
    scores: Int32Array = NO_TOKENS  # one row a sampled sequence, flat; empty unless asked for
    prompt_scores: Int32Array = NO_TOKENS  # one row a target of a prefill, flat


class InFlight(NamedTuple):
    """A stage that was launched. Times are seconds on the worker's clock (time.monotonic)."""

    step_id: int
    start_s: float
    ready_s: float  # when it will be finished; 0 = it is, infinity = the runner's ``completions`` tells
    output: StageOutput
    failed: tuple[RowFailure, ...] = ()


class StageDone(NamedTuple):
    """A finished stage."""

    step_id: int
    start_s: float
    end_s: float
    output: StageOutput
    failed: tuple[RowFailure, ...] = ()


class StageRunner(Protocol):
    """A device that runs stages."""

    limits: StageLimits
    completions: int | None  # descriptor that is readable after a stage finished; None: InFlight.ready_s says when

    def finished(self, stage: InFlight) -> bool:
        """Whether reading ``stage`` would not wait."""
        ...

    def launch(self, header: StageBatch, frame: Int32Array, slot_params: Int32Array | None = None) -> InFlight:
        """Starts a stage. Raises StageError when it does not fit this worker."""
        ...

    def read(self, stage: InFlight) -> StageDone:
        """Waits for a launched stage; stages are read in the order they were launched."""
        ...
