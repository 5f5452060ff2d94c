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
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from depthbatch.common.frames import SLOT_PARAM_WORDS, Int32Array, Stage, slot_param_rows
from depthbatch.common.gates import Gate
from depthbatch.common.messages import RowFailure, StageBatch, Variant
from depthbatch.worker.models.interface import ModelSpec
from depthbatch.worker.runner.accelerator import Accelerator, Lane, Mark, Work
from depthbatch.worker.runner.buffers import DecodeBuffers
from depthbatch.worker.runner.checks import (
    StageError,
    StageLimits,
    adjustments_of,
    check_stage,
    known_tokens_of,
    rare_inputs,
)
from depthbatch.worker.runner.completions import CompletionWatch
from depthbatch.worker.runner.plain import Runner
from depthbatch.worker.runner.prefill_graphs import PiecewisePrefill
from depthbatch.worker.runner.prefill_input import PrefillInput, sampled_sequences
from depthbatch.worker.runner.stage_io import NO_FLAGS, NO_TOKENS, InFlight, StageDone, StageOutput
from depthbatch.worker.runner.stages import Sampler, Stages
from depthbatch.worker.sampling.grammar_matchers import Grammars

RING_DEPTH = 64  # two core steps and every boundary stage that may ride along between them


# Penalties and logprobs are rare enough to share one form: a row that asks for neither gets the same token from it.
FULL = Sampler(sample=True, filtered=True, shaped=True, scored=True)


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
        Form(Stage.CODA, sampler=FULL),
        Form(Stage.CODA, sampler=FULL._replace(constrained=True)),
    )


@dataclass
class RingEntry:
    """Staging of one stage in flight."""

    host: Tensor  # int32 [words], pinned
    inputs: Tensor  # int32 [words], on the device
    results: Tensor  # int32 [rows * (1 + score columns)], on the device: one value a row, then their scores
    results_host: Tensor  # the same, pinned
    header: StageBatch | None = None  # None: free
    started: Mark | None = None
    ended: Mark | None = None
    count: int = 0  # rows whose value the host wants
    n_scores: int = 0  # values of their scores
    prompt_scores: Tensor | None = None  # int32 [n_targets, score columns], pinned
    constrained: list[int] = field(default_factory=list)  # slots that get a token, matchers still to be told which
    failed: tuple[RowFailure, ...] = ()
    kept: list[Tensor] = field(default_factory=list)  # buffers of rare inputs and outputs, alive until it is read


class OverlappedRunner(Runner):
    """StageRunner over an accelerator; equal to Runner stage for stage.

    ``max_prefill_tokens``: most prompt tokens of one prefill.
    """

    def __init__(
        self,
        stages: Stages,
        limits: StageLimits,
        accelerator: Accelerator,
        max_prefill_tokens: int,
        grammars: Grammars | None = None,
    ) -> None:
        super().__init__(stages, limits, accelerator.device, grammars)
        self._accelerator = accelerator
        rows = limits.num_slots
        prefill_words = largest_prefill_words(max_prefill_tokens, limits)
        words = max(prefill_words + rows, 3 * max(limits.buckets)) + rows * SLOT_PARAM_WORDS
        results = max(*limits.buckets, rows) * (1 + self.score_columns)
        self._ring = deque(self._new_entry(words, results) for _ in range(RING_DEPTH))
        self._launched: deque[RingEntry] = deque()
        with torch.inference_mode():
            self._graphs = self._capture_all()
            self._pieces = self._capture_pieces(max_prefill_tokens)
        self._watch = CompletionWatch(accelerator)
        self.completions = self._watch.descriptor

    def launch(self, header: StageBatch, frame: Int32Array, slot_params: Int32Array | None = None) -> InFlight:
        check_stage(header, frame, slot_params, self.limits)
        if self._ring[0].header is not None:
            raise StageError(f"stage {header.step_id}: {RING_DEPTH} stages are in flight already")
        entry = self._ring[0]
        self._ring.rotate(-1)
        entry.header = header
        if header.variant & Variant.CONSTRAIN:
            self._settle_matchers()
        self._admit_grammars(header, slot_params)
        self._upload(entry, header, frame, slot_params)
        accelerator = self._accelerator
        entry.started = accelerator.mark(Lane.COMPUTE)
        downloads = self._compute(entry, header, frame)
        entry.ended = accelerator.mark(Lane.COMPUTE)
        accelerator.wait_on_lane(Lane.DOWNLOAD, entry.ended)
        for target, source in downloads:
            accelerator.submit(Lane.DOWNLOAD, partial(target.copy_, source, non_blocking=True))
        constrained = bool(header.variant & Variant.CONSTRAIN)
        entry.constrained = self._given(header, frame) if constrained else []
        entry.failed = self._failed_rows(header, frame) if constrained else ()
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
        self._tell_matchers(entry)
        output = _output(header, entry)
        entry.header = entry.prompt_scores = None
        entry.kept.clear()
        start_s, end_s = self._accelerator.passed_s(started), self._accelerator.passed_s(ended)
        return StageDone(stage.step_id, start_s, end_s, output, entry.failed)

    def _new_entry(self, words: int, result_words: int) -> RingEntry:
        accelerator, device = self._accelerator, self._accelerator.device
        inputs = torch.zeros(words, dtype=torch.int32, device=device)
        results = torch.zeros(result_words, dtype=torch.int32, device=device)
        return RingEntry(accelerator.host_buffer(words), inputs, results, accelerator.host_buffer(result_words))

    def _capture_all(self) -> dict[tuple[Form, int], Work]:
        """One graph per form and bucket, largest first, so that smaller ones fit into the pool's memory."""
        return {
            (form, bucket): self._accelerator.capture(partial(self._run_form, form, self._buffers[form.stage, bucket]))
            for bucket in sorted(self.limits.buckets, reverse=True)
            for form in forms_of(self.stages.model.spec)
        }

    def _capture_pieces(self, max_tokens: int) -> PiecewisePrefill:
        greedy, chunks = Sampler(False, False), PrefillInput.dummy(1, self._accelerator.device)
        trial = partial(self.stages.prefill, chunks, greedy)
        width = self.stages.model.spec.hidden_size
        return PiecewisePrefill(trial, self.stages.backend.geometry, width, max_tokens, self._accelerator.capture)

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
            self._note_filters(slot_param_rows(slot_params))
        words = sum(part.size for part in parts)
        np.concatenate(parts, out=entry.host.numpy()[:words])
        accelerator = self._accelerator
        upload = partial(entry.inputs[:words].copy_, entry.host[:words], non_blocking=True)
        accelerator.submit(Lane.UPLOAD, upload)
        accelerator.wait_on_lane(Lane.COMPUTE, accelerator.mark(Lane.UPLOAD))
        if slot_params is not None:
            rows = entry.inputs[words - slot_params.size : words].view(-1, SLOT_PARAM_WORDS)
            accelerator.submit(Lane.COMPUTE, partial(self.stages.slots.set_params, rows))
        if header.extra is not None and header.extra.adjustments:
            entries = self._upload_rare(entry, adjustments_of(header.extra))
            accelerator.submit(Lane.COMPUTE, partial(self.stages.slots.shaping.set_adjustments, entries))
        if header.stage == Stage.PRELUDE and header.extra is not None:
            known = self._upload_rare(entry, known_tokens_of(header.extra))
            accelerator.submit(Lane.COMPUTE, partial(self.stages.replace_tokens, known))
        slots = self._constrained(header, frame)
        if slots:
            self._upload_masks(entry, slots)

    def _settle_matchers(self) -> None:
        """A mask follows from the token before: waits for the stages in flight that bring one. Batches without a
        constrained row never get here."""
        for entry in self._launched:
            if entry.constrained and entry.header is not None:
                self._watch.wait(entry.header.step_id)
                self._tell_matchers(entry)

    def _tell_matchers(self, entry: RingEntry) -> None:
        """What a finished stage has given to constrained slots; only once."""
        if entry.constrained and self.grammars is not None:
            self.grammars.note(entry.constrained, entry.results_host[: entry.count].tolist())
            entry.constrained = []

    def _upload_masks(self, entry: RingEntry, slots: list[int]) -> None:
        assert self.grammars is not None
        masks = self._upload_rare(entry, self.grammars.masks(slots))
        index = self._upload_rare(entry, np.array(slots, np.int32))
        shaping = self.stages.slots.shaping
        self._accelerator.submit(Lane.COMPUTE, lambda: shaping.set_allowed(index.long(), masks))

    def _upload_rare(self, entry: RingEntry, values: Int32Array) -> Tensor:
        """What staging has no room for, as the compute lane will see it; its buffers live until the stage is read."""
        accelerator = self._accelerator
        host = accelerator.host_buffer(values.size)
        host.numpy()[...] = values.reshape(-1)
        on_device = torch.empty(values.shape, dtype=torch.int32, device=accelerator.device)
        accelerator.submit(Lane.UPLOAD, partial(on_device.view(-1).copy_, host, non_blocking=True))
        accelerator.wait_on_lane(Lane.COMPUTE, accelerator.mark(Lane.UPLOAD))
        entry.kept += [host, on_device]
        return on_device

    def _compute(self, entry: RingEntry, header: StageBatch, frame: Int32Array) -> list[tuple[Tensor, Tensor]]:
        """Puts the stage on the compute lane; what the host wants of it, as (host, device) buffers."""
        accelerator, stage, rows = self._accelerator, Stage(header.stage), header.rows
        entry.count = entry.n_scores = 0
        if stage is Stage.PREFILL:
            return self._compute_prefill(entry, header, frame)
        buffers = self._buffers[stage, header.bucket]
        form = self._form(stage, header, frame)
        source = entry.inputs[: buffers.frame.numel()].view_as(buffers.frame)
        accelerator.submit(Lane.COMPUTE, partial(buffers.frame.copy_, source))
        accelerator.submit(Lane.COMPUTE, self._graphs[form, header.bucket])
        if stage is Stage.CODA or form.gates:
            results = buffers.tokens if stage is Stage.CODA else buffers.flags
            accelerator.submit(Lane.COMPUTE, partial(entry.results[:rows].copy_, results[:rows]))
            entry.count = rows
        if header.variant & Variant.LOGPROBS:
            target = self._scores_of(entry, rows)
            accelerator.submit(Lane.COMPUTE, partial(target.copy_, buffers.scores[:rows]))
        return self._results_of(entry)

    def _scores_of(self, entry: RingEntry, rows: int) -> Tensor:
        """Room for the scores of ``rows`` rows behind their values."""
        entry.n_scores = rows * self.score_columns
        return entry.results[rows : rows + entry.n_scores].view(rows, self.score_columns)

    def _results_of(self, entry: RingEntry) -> list[tuple[Tensor, Tensor]]:
        words = entry.count + entry.n_scores
        return [(entry.results_host[:words], entry.results[:words])] if words else []

    def _form(self, stage: Stage, header: StageBatch, frame: Int32Array) -> Form:
        if stage is not Stage.CODA:
            return Form(stage, gates=bool(header.variant & Variant.GATES))
        sampler = self._sampler(header, frame.reshape(-1)[: header.rows])
        if sampler.shaped or sampler.scored or sampler.constrained:
            sampler = FULL._replace(constrained=sampler.constrained)
        return Form(stage, sampler=sampler)

    def _compute_prefill(self, entry: RingEntry, header: StageBatch, frame: Int32Array) -> list[tuple[Tensor, Tensor]]:
        """Prompts differ too much to be captured whole: the stage is launched piece by piece."""
        rows, accelerator = header.rows, self._accelerator
        sampler = self._sampler(header, frame[:rows])
        entry.count = int(frame[3 * rows : 4 * rows].sum())
        scores = self._scores_of(entry, entry.count) if sampler.scored else None
        prompt_scores = None
        downloads = self._results_of(entry)
        rare = {name: self._upload_rare(entry, values) for name, values in rare_inputs(header).items()}
        if (targets := rare.get("targets")) is not None:
            prompt_scores = torch.empty(len(targets), self.score_columns, dtype=torch.int32, device=targets.device)
            entry.prompt_scores = accelerator.host_buffer(prompt_scores.numel())
            entry.kept.append(prompt_scores)
            downloads.append((entry.prompt_scores, prompt_scores.view(-1)))
        sampled = entry.inputs[frame.size : frame.size + entry.count]
        inputs = entry.inputs[: frame.size]
        chunks = PrefillInput.from_frame(frame, inputs, sampled, header.n_tokens, header.n_updates).with_rare(rare)
        tokens = entry.results[: entry.count]
        accelerator.submit(Lane.COMPUTE, partial(self._prefill, chunks, sampler, tokens, scores, prompt_scores))
        return downloads

    def _prefill(
        self,
        chunks: PrefillInput,
        sampler: Sampler,
        tokens: Tensor,
        scores: Tensor | None,
        prompt_scores: Tensor | None,
    ) -> None:
        """Runs a prefill into result buffers."""
        with torch.inference_mode():
            done = self.stages.prefill(chunks, sampler, self._pieces.context)
            tokens.copy_(done.sampled.tokens)
            if scores is not None:
                scores.copy_(done.sampled.scores)
            if prompt_scores is not None:
                prompt_scores.copy_(done.prompt_scores)


def largest_prefill_words(max_tokens: int, limits: StageLimits) -> int:
    """int32 of the largest prefill frame: every slot in it, and every block new (common.frames)."""
    updates = min(limits.num_blocks, limits.num_slots * limits.max_blocks)
    return 4 * limits.num_slots + max_tokens + 3 * updates


def _output(header: StageBatch, entry: RingEntry) -> StageOutput:
    """The host's copy of a finished stage's results."""
    values = entry.results_host[: entry.count + entry.n_scores].numpy().copy()
    if header.stage in (Stage.PRELUDE, Stage.CORE):
        return StageOutput(NO_TOKENS, values.astype(np.uint8))
    prompt = NO_TOKENS if entry.prompt_scores is None else entry.prompt_scores.numpy().copy()
    return StageOutput(values[: entry.count], NO_FLAGS, values[entry.count :], prompt)
