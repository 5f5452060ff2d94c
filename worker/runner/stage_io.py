"""What goes between a device and the worker process: stages are launched, then read, in order. Imports no torch.

Launching and reading are apart, so that a device that computes asynchronously can have several stages in flight.
"""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from depthbatch.common.frames import Int32Array, Stage
from depthbatch.common.messages import GrammarPrepared, RowFailure, StageBatch, StageResult
from depthbatch.worker.runner.stage_input import StageLimits

NO_TOKENS = np.empty(0, np.int32)
NO_BYTES = np.empty(0, np.uint8)
Bytes = npt.NDArray[np.uint8]


class StageOutput(NamedTuple):
    """What the host gets of a stage."""

    token_ids: Int32Array = NO_TOKENS  # one a sampled sequence, in batch order; empty unless prefill or coda
    fired: Bytes = NO_BYTES  # one a row, 1 = its gate fired at this loop; empty unless a core step with gates
    predicted_depths: Bytes = NO_BYTES  # one a row; empty unless a prelude with gates
    logprobs: Int32Array = NO_TOKENS  # one row a sampled sequence, flat; empty unless asked for
    prompt_logprobs: Int32Array = NO_TOKENS  # one row a target of a prefill, flat
    failed: tuple[RowFailure, ...] = ()
    moved_s: float = 0.0  # of copies between KV and host memory before it

    @classmethod
    def of_gates(cls, stage: Stage, values: Bytes) -> "StageOutput":
        """Of a core step or prelude with gates."""
        return cls(fired=values) if stage is Stage.CORE else cls(predicted_depths=values)

    def result(self, step_id: int, start_s: float, end_s: float) -> StageResult:
        """What the scheduler gets of it."""
        return StageResult(
            step_id,
            start_s,
            end_s,
            token_ids=self.token_ids.tobytes(),
            fired=self.fired.tobytes(),
            predicted_depths=self.predicted_depths.tobytes(),
            logprobs=self.logprobs.tobytes(),
            prompt_logprobs=self.prompt_logprobs.tobytes(),
            failed=self.failed,
            moved_s=self.moved_s,
        )


NO_OUTPUT = StageOutput()


class LaunchedStage(NamedTuple):
    """A stage that was launched. Times are seconds on the worker's clock (time.monotonic)."""

    header: StageBatch
    start_s: float
    ready_s: float  # when it will be finished; 0 = it is, infinity = the runner's ``completions`` tells
    output: StageOutput = NO_OUTPUT  # of a device that has computed it already


class GrammarPreparer(Protocol):
    """Compiles grammars beside the stages (worker.sampling.grammar_matchers)."""

    def prepare(self, request_id: int, grammar: str) -> None: ...

    def take_prepared(self) -> list[GrammarPrepared]: ...

    def descriptors(self) -> list[int]: ...


class StageRunner(Protocol):
    """A device that runs stages."""

    limits: StageLimits
    completions: int | None  # descriptor that is readable after a stage finished; None: ready_s says when

    @property
    def grammars(self) -> GrammarPreparer | None:
        """None where output cannot be constrained."""
        ...

    def finished(self, stage: LaunchedStage) -> bool:
        """Whether reading ``stage`` would not wait."""
        ...

    def launch(self, header: StageBatch, frame: Int32Array, slot_params: Int32Array | None = None) -> LaunchedStage:
        """Starts a stage. Raises StageError when it does not fit this worker."""
        ...

    def read(self, stage: LaunchedStage) -> StageResult:
        """Waits for a launched stage; stages are read in the order they were launched."""
        ...
