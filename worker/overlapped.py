"""Runs stages on an accelerator without ever making it wait for the host.

Each decode stage is one captured graph per (stage, form, bucket), captured largest first over one memory pool. A ring
of staging buffers carries inputs and results past the graphs' static ones::

    host frame -> entry.host --UPLOAD--> entry.inputs --COMPUTE--> static frame, graph, static results
                                                          |
    StageOutput <- entry.results_host <--DOWNLOAD-- entry.results

so a stage's input may be uploaded and the last stage's results downloaded while a third computes. An entry is reused
only after its stage was read; the ring is deeper than the stages in flight. Knows nothing of sockets or policy.
"""

import math
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from depthbatch.common.frames import SLOT_PARAM_FIELDS, Int32Array, Stage
from depthbatch.common.gates import Gate
from depthbatch.common.messages import StageBatch, Variant
from depthbatch.worker.accelerator import Accelerator, Lane, Mark, Work
from depthbatch.worker.buffers import DecodeBuffers
from depthbatch.worker.checks import StageError, StageLimits, check_stage
from depthbatch.worker.completions import CompletionWatch
from depthbatch.worker.models.interface import ModelSpec
from depthbatch.worker.prefill_input import PrefillInput, sampled_sequences
from depthbatch.worker.runner import Runner
from depthbatch.worker.stage_io import NO_FLAGS, NO_TOKENS, InFlight, StageDone, StageOutput
from depthbatch.worker.stages import Sampler, Stages
from torch import Tensor

RING_DEPTH = 64  # two core steps and every boundary stage that may ride along between them


class Form(NamedTuple):
    """Which captured variant of a stage a batch needs."""

    stage: Stage
    gates: bool = False  # core, and prelude with a pre-loop head
    sampler: Sampler = Sampler(False, False)  # coda


def forms_of(spec: ModelSpec) -> tuple[Form, ...]:
    """The variants a model's batches may need."""
    return (
        Form(Stage.PRELUDE),
        *((Form(Stage.PRELUDE, gates=True),) if Gate.PRELOOP in spec.gates else ()),
        Form(Stage.CORE),
        Form(Stage.CORE, gates=True),
        Form(Stage.CODA),
        Form(Stage.CODA, sampler=Sampler(True, False)),
        Form(Stage.CODA, sampler=Sampler(True, True)),
    )


@dataclass
class RingEntry:
    """Staging of one stage in flight."""

    host: Tensor  # int32 [words], pinned
    inputs: Tensor  # int32 [words], on the device
    results: Tensor  # int32 [rows], on the device
    results_host: Tensor  # int32 [rows], pinned
    header: StageBatch | None = None  # None: free
    started: Mark | None = None
    ended: Mark | None = None
    count: int = 0  # results the host wants


class OverlappedRunner(Runner):
    """StageRunner over an accelerator; equal to Runner stage for stage.

    ``prefill_words`` is the size of the largest prefill frame, in int32.
    """

    def __init__(self, stages: Stages, limits: StageLimits, accelerator: Accelerator, prefill_words: int) -> None:
        super().__init__(stages, limits, accelerator.device)
        self._accelerator = accelerator
        rows = limits.num_slots
        words = max(prefill_words + rows, 3 * max(limits.buckets)) + rows * SLOT_PARAM_FIELDS
        self._ring = deque(self._new_entry(words, max(*limits.buckets, rows)) for _ in range(RING_DEPTH))
        self._launched: deque[RingEntry] = deque()
        self._graphs = self._capture_all()
        self._watch = CompletionWatch(accelerator)
        self.completions = self._watch.descriptor

    def launch(self, header: StageBatch, frame: Int32Array, slot_params: Int32Array | None = None) -> InFlight:
        check_stage(header, frame, slot_params, self.limits)
        if self._ring[0].header is not None:
            raise StageError(f"stage {header.step_id}: {RING_DEPTH} stages are in flight already")
        entry = self._ring[0]
        self._ring.rotate(-1)
        entry.header = header
        self._upload(entry, header, frame, slot_params)
        accelerator = self._accelerator
        entry.started = accelerator.mark(Lane.COMPUTE)
        entry.count = self._compute(entry, header, frame)
        entry.ended = accelerator.mark(Lane.COMPUTE)
        accelerator.wait_on_lane(Lane.DOWNLOAD, entry.ended)
        if entry.count:
            source, target = entry.results[: entry.count], entry.results_host[: entry.count]
            accelerator.submit(Lane.DOWNLOAD, partial(target.copy_, source, non_blocking=True))
        self._launched.append(entry)
        self._watch.add(header.step_id, accelerator.mark(Lane.DOWNLOAD))
        return InFlight(header.step_id, 0.0, math.inf, StageOutput(NO_TOKENS, NO_FLAGS))

    def finished(self, stage: InFlight) -> bool:
        return self._watch.passed(stage.step_id)

    def read(self, stage: InFlight) -> StageDone:
        entry = self._launched.popleft()
        header, started, ended = entry.header, entry.started, entry.ended
        assert header is not None and started is not None and ended is not None
        if header.step_id != stage.step_id:
            raise StageError(f"stage {stage.step_id} read before stage {header.step_id}")
        self._watch.wait(stage.step_id)
        values = entry.results_host[: entry.count].numpy().copy()
        entry.header = None
        if header.stage == Stage.CORE:
            output = StageOutput(NO_TOKENS, values.astype(np.uint8))
        else:
            output = StageOutput(values, NO_FLAGS)
        return StageDone(stage.step_id, self._accelerator.passed_s(started), self._accelerator.passed_s(ended), output)

    def _new_entry(self, words: int, rows: int) -> RingEntry:
        accelerator, device = self._accelerator, self._accelerator.device
        inputs = torch.zeros(words, dtype=torch.int32, device=device)
        results = torch.zeros(rows, dtype=torch.int32, device=device)
        return RingEntry(accelerator.host_buffer(words), inputs, results, accelerator.host_buffer(rows))

    def _capture_all(self) -> dict[tuple[Form, int], Work]:
        """One graph per form and bucket, largest first, so that smaller ones fit into the pool's memory."""
        with torch.inference_mode():
            return {
                (form, bucket): self._accelerator.capture(
                    partial(self._run_form, form, self._buffers[form.stage, bucket])
                )
                for bucket in sorted(self.limits.buckets, reverse=True)
                for form in forms_of(self.stages.model.spec)
            }

    def _run_form(self, form: Form, buffers: DecodeBuffers) -> None:
        if form.stage is Stage.PRELUDE:
            self.stages.prelude(buffers, form.gates)
        elif form.stage is Stage.CORE:
            self.stages.core(buffers, form.gates)
        else:
            self.stages.coda(buffers, form.sampler)

    def _upload(self, entry: RingEntry, header: StageBatch, frame: Int32Array, slot_params: Int32Array | None) -> None:
        """One copy into pinned memory, one asynchronous copy to the device; then slot parameters take effect."""
        parts = [frame.reshape(-1)]
        if header.stage == Stage.PREFILL:
            parts.append(sampled_sequences(frame, header.rows))
        if slot_params is not None:
            parts.append(slot_params.reshape(-1))
            self._note_filters(slot_params.reshape(-1, SLOT_PARAM_FIELDS))
        words = sum(part.size for part in parts)
        np.concatenate(parts, out=entry.host.numpy()[:words])
        accelerator = self._accelerator
        upload = partial(entry.inputs[:words].copy_, entry.host[:words], non_blocking=True)
        accelerator.submit(Lane.UPLOAD, upload)
        accelerator.wait_on_lane(Lane.COMPUTE, accelerator.mark(Lane.UPLOAD))
        if slot_params is not None:
            rows = entry.inputs[words - slot_params.size : words].view(-1, SLOT_PARAM_FIELDS)
            accelerator.submit(Lane.COMPUTE, partial(self.stages.slots.set_params, rows))

    def _compute(self, entry: RingEntry, header: StageBatch, frame: Int32Array) -> int:
        """Puts the stage on the compute lane; how many results the host wants of it."""
        accelerator, stage, rows = self._accelerator, Stage(header.stage), header.rows
        if stage is Stage.PREFILL:
            sampler = self._sampler(header, frame[:rows])
            n_sampled = int(frame[3 * rows : 4 * rows].sum())
            accelerator.submit(Lane.COMPUTE, partial(self._prefill, entry, header, frame, n_sampled, sampler))
            return n_sampled
        buffers = self._buffers[stage, header.bucket]
        form = self._form(stage, header, frame)
        source = entry.inputs[: buffers.frame.numel()].view_as(buffers.frame)
        accelerator.submit(Lane.COMPUTE, partial(buffers.frame.copy_, source))
        accelerator.submit(Lane.COMPUTE, self._graphs[form, header.bucket])
        if stage is Stage.CODA or form.gates:
            results = buffers.tokens if stage is Stage.CODA else buffers.flags
            accelerator.submit(Lane.COMPUTE, partial(entry.results[:rows].copy_, results[:rows]))
            return rows
        return 0

    def _form(self, stage: Stage, header: StageBatch, frame: Int32Array) -> Form:
        if stage is Stage.CODA:
            return Form(stage, sampler=self._sampler(header, frame.reshape(-1)[: header.rows]))
        return Form(stage, gates=bool(header.variant & Variant.GATES))

    def _prefill(
        self, entry: RingEntry, header: StageBatch, frame: Int32Array, n_sampled: int, sampler: Sampler
    ) -> None:
        sampled = entry.inputs[frame.size : frame.size + n_sampled]
        inputs = entry.inputs[: frame.size]
        chunks = PrefillInput.from_frame(frame, inputs, sampled, header.n_tokens, header.n_updates)
        with torch.inference_mode():
            entry.results[:n_sampled].copy_(self.stages.prefill(chunks, sampler))
