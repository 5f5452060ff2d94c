"""Runs stages on an accelerator without ever making it wait for the host.

Each decode stage is one captured graph per (stage, form, bucket), captured largest first over one memory pool. A ring
of staging buffers carries inputs and results past the graphs' static ones::

    host frame -> entry.host --UPLOAD--> entry.inputs --COMPUTE--> static frame, graph, static results
                                                          |
    StageResult <- entry.results_host <--DOWNLOAD-- entry.results

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

from depthbatch.common.frames import SLOT_PARAM_WORDS, Int32Array, Stage, prefill_words, slot_param_words
from depthbatch.common.gates import Gate
from depthbatch.common.messages import PLAIN, RowFailure, StageBatch, StageResult, Variant
from depthbatch.worker.host_kv import HostKV
from depthbatch.worker.models.interface import ModelSpec
from depthbatch.worker.runner.accelerator import Accelerator, CompletionWatch, Lane, Mark, Work
from depthbatch.worker.runner.prefill_graphs import PiecewisePrefill
from depthbatch.worker.runner.stage_input import StageError, StageInput, StageLimits, parse_stage
from depthbatch.worker.runner.stage_io import NO_TOKENS, LaunchedStage, StageOutput
from depthbatch.worker.runner.stage_tensors import PrefillInput, decode_buffers, logprob_columns
from depthbatch.worker.runner.stages import Stages
from depthbatch.worker.sampling.grammar_matchers import Grammars, Masks, begin_stage

RING_DEPTH = 64  # two core steps and every boundary stage that may ride along between them

SAMPLED = Variant.SAMPLE | Variant.FILTER
# Penalties and logprobs are rare enough to share one form: a row that asks for neither gets the same token from it.
FULL = SAMPLED | Variant.LOGITS | Variant.FORBID | Variant.LOGPROBS


class Form(NamedTuple):
    """A captured form of a decode stage."""

    stage: Stage
    variant: Variant = PLAIN


def forms_of(spec: ModelSpec) -> tuple[Form, ...]:
    """All that a model's batches may take."""
    return (
        Form(Stage.PRELUDE),
        *((Form(Stage.PRELUDE, Variant.GATES),) if Gate.PRELOOP in spec.gates else ()),
        Form(Stage.CORE),
        Form(Stage.CORE, Variant.GATES),
        *(Form(Stage.CODA, v) for v in (PLAIN, Variant.SAMPLE, SAMPLED, FULL, FULL | Variant.CONSTRAIN)),
    )


def form_of(stage: Stage, variant: Variant) -> Form:
    """The one that a batch takes: the cheapest that does all it asks for."""
    if stage is not Stage.CODA:
        return Form(stage, variant & Variant.GATES)
    if variant & ~SAMPLED:
        return Form(stage, FULL | (variant & Variant.CONSTRAIN))
    return Form(stage, variant)


@dataclass
class RingEntry:
    """Staging of one stage in flight."""

    host: Tensor  # int32 [words], pinned
    inputs: Tensor  # int32 [words], on the device
    results: Tensor  # int32 [rows * (1 + logprob columns)], on the device: one value a row, then their logprobs
    results_host: Tensor  # the same, pinned
    stage: StageInput | None = None  # None: free
    started: Mark | None = None
    ended: Mark | None = None
    moved: tuple[Mark, Mark] | None = None  # before and after the copies between KV and host memory
    n_logprobs: int = 0  # values of the logprobs behind the stage's values
    prompt_logprobs: Tensor | None = None  # int32 [n_targets, logprob columns], pinned
    constrained: list[int] = field(default_factory=list)  # slots that get a token, matchers still to be told which
    failed: tuple[RowFailure, ...] = ()
    kept: list[Tensor] = field(default_factory=list)  # buffers of rare inputs and outputs, alive until it is read


class OverlappedRunner:
    """StageRunner over an accelerator; equal to PlainRunner stage for stage.

    ``max_prefill_tokens``: most prompt tokens of one prefill.
    """

    def __init__(
        self,
        stages: Stages,
        limits: StageLimits,
        accelerator: Accelerator,
        max_prefill_tokens: int,
        grammars: Grammars | None = None,
        host_kv: HostKV | None = None,
    ) -> None:
        self.stages = stages
        self._host_kv = host_kv
        self.grammars = grammars
        self.limits = limits
        self._accelerator = accelerator
        self._buffers = decode_buffers(limits, accelerator.device)
        self._logprob_columns = logprob_columns(limits)
        rows = limits.num_slots
        prefill = largest_prefill_words(max_prefill_tokens, limits)
        decode = max(self._buffers[Stage.CORE, bucket].frame.numel() for bucket in limits.buckets)
        words = max(prefill + rows, decode) + rows * SLOT_PARAM_WORDS
        results = max(*limits.buckets, rows) * (1 + self._logprob_columns)
        self._ring = deque(self._new_entry(words, results) for _ in range(RING_DEPTH))
        self._launched: deque[RingEntry] = deque()
        with torch.inference_mode():
            self._graphs = self._capture_all()
            self._pieces = self._capture_pieces(max_prefill_tokens)
        self._watch = CompletionWatch(accelerator)
        self.completions: int | None = self._watch.descriptor

    def launch(self, header: StageBatch, frame: Int32Array, slot_params: Int32Array | None = None) -> LaunchedStage:
        stage = parse_stage(header, frame, slot_params, self.limits)
        entry = self._take_entry(stage)
        if Variant.CONSTRAIN in stage.variant:
            self._settle_matchers()
        masks = begin_stage(self.grammars, stage)
        self._upload(entry, stage, masks)
        self._move(entry, stage)
        accelerator = self._accelerator
        entry.started = accelerator.mark(Lane.COMPUTE)
        downloads = self._prefill(entry, stage) if stage.stage is Stage.PREFILL else self._decode(entry, stage)
        entry.ended = accelerator.mark(Lane.COMPUTE)
        accelerator.wait_on_lane(Lane.DOWNLOAD, entry.ended)
        for target, source in downloads:
            accelerator.submit(Lane.DOWNLOAD, partial(target.copy_, source, non_blocking=True))
        if masks is not None and self.grammars is not None:
            entry.constrained, entry.failed = stage.given.tolist(), self.grammars.take_failures(stage)
        self._launched.append(entry)
        self._watch.add(stage.step_id, accelerator.mark(Lane.DOWNLOAD))
        return LaunchedStage(header, 0.0, math.inf)

    def finished(self, stage: LaunchedStage) -> bool:
        return self._watch.passed(stage.header.step_id)

    def read(self, stage: LaunchedStage) -> StageResult:
        entry, step_id = self._launched.popleft(), stage.header.step_id
        assert entry.stage is not None and entry.started is not None and entry.ended is not None
        if entry.stage.step_id != step_id:
            raise StageError(f"stage {step_id} read before stage {entry.stage.step_id}")
        self._watch.wait(step_id)
        self._tell_matchers(entry, entry.stage)
        start_s, end_s = self._accelerator.passed_s(entry.started), self._accelerator.passed_s(entry.ended)
        output = _output(entry, entry.stage)
        if entry.moved is not None:
            begun_s, moved_s = map(self._accelerator.passed_s, entry.moved)
            output = output._replace(moved_s=moved_s - begun_s)
        result = output.result(step_id, start_s, end_s)
        entry.stage = entry.prompt_logprobs = entry.moved = None
        entry.failed = ()
        entry.kept.clear()
        return result

    def _move(self, entry: RingEntry, stage: StageInput) -> None:
        """Copies between KV and host memory: after all stages before this one, which waits for them."""
        if self._host_kv is None or not (stage.offloads.size or stage.restores.size):
            return
        accelerator = self._accelerator
        accelerator.wait_on_lane(Lane.SWAP, accelerator.mark(Lane.COMPUTE))
        begun = accelerator.mark(Lane.SWAP)
        accelerator.submit(Lane.SWAP, partial(self._host_kv.move, stage.offloads, stage.restores))
        ended = accelerator.mark(Lane.SWAP)
        accelerator.wait_on_lane(Lane.COMPUTE, ended)
        entry.moved = begun, ended

    def _new_entry(self, words: int, result_words: int) -> RingEntry:
        accelerator, device = self._accelerator, self._accelerator.device
        inputs = torch.zeros(words, dtype=torch.int32, device=device)
        results = torch.zeros(result_words, dtype=torch.int32, device=device)
        return RingEntry(accelerator.host_buffer(words), inputs, results, accelerator.host_buffer(result_words))

    def _take_entry(self, stage: StageInput) -> RingEntry:
        entry = self._ring[0]
        if entry.stage is not None:
            raise StageError(f"stage {stage.step_id}: {RING_DEPTH} stages are in flight already")
        self._ring.rotate(-1)
        entry.stage = stage
        entry.n_logprobs = stage.given.size * self._logprob_columns if Variant.LOGPROBS in stage.variant else 0
        return entry

    def _capture_all(self) -> dict[tuple[Form, int], Work]:
        """One graph per form and bucket, largest first, so that smaller ones fit into the pool's memory."""
        capture, decode = self._accelerator.capture, self.stages.decode
        return {
            (form, bucket): capture(partial(decode, form.stage, self._buffers[form.stage, bucket], form.variant))
            for bucket in sorted(self.limits.buckets, reverse=True)
            for form in forms_of(self.stages.model.spec)
        }

    def _capture_pieces(self, max_tokens: int) -> PiecewisePrefill:
        trial = partial(self.stages.prefill, PrefillInput.dummy(1, self._accelerator.device), PLAIN)
        width = self.stages.model.spec.hidden_size
        return PiecewisePrefill(trial, self.stages.backend.geometry, width, max_tokens, self._accelerator.capture)

    # --- inputs

    def _upload(self, entry: RingEntry, stage: StageInput, masks: Masks | None) -> None:
        """One copy into pinned memory, one asynchronous copy to the device; then slot parameters take effect."""
        params, slots = slot_param_words(stage.slot_params), self.stages.slots
        sampled = (stage.chunks.sampled,) if stage.chunks is not None else ()
        parts = (stage.frame, *sampled, params.reshape(-1))
        words = sum(part.size for part in parts)
        np.concatenate(parts, out=entry.host.numpy()[:words])
        accelerator = self._accelerator
        upload = partial(entry.inputs[:words].copy_, entry.host[:words], non_blocking=True)
        accelerator.submit(Lane.UPLOAD, upload)
        accelerator.wait_on_lane(Lane.COMPUTE, accelerator.mark(Lane.UPLOAD))
        if params.size:
            rows = entry.inputs[words - params.size : words].view(params.shape)
            accelerator.submit(Lane.COMPUTE, partial(slots.set_params, rows))
        for update in self.stages.updates(stage, masks):
            values = [self._upload_rare(entry, part) for part in update.values]
            accelerator.submit(Lane.COMPUTE, partial(update.apply, *values))

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

    # --- matchers

    def _settle_matchers(self) -> None:
        """A mask follows from the token before: waits for the stages in flight that bring one. Batches without a
        constrained row never get here."""
        for entry in self._launched:
            if entry.constrained and entry.stage is not None:
                self._watch.wait(entry.stage.step_id)
                self._tell_matchers(entry, entry.stage)

    def _tell_matchers(self, entry: RingEntry, stage: StageInput) -> None:
        """What a finished stage has given to constrained slots; only once."""
        if entry.constrained and self.grammars is not None:
            self.grammars.note(entry.constrained, entry.results_host[: stage.num_values].tolist())
            entry.constrained = []

    # --- compute; both give what the host wants of the stage, as (host, device) buffers

    def _decode(self, entry: RingEntry, stage: StageInput) -> list[tuple[Tensor, Tensor]]:
        accelerator, buffers, count = self._accelerator, self._buffers[stage.stage, stage.bucket], stage.num_values
        source = entry.inputs[: buffers.frame.numel()].view_as(buffers.frame)
        accelerator.submit(Lane.COMPUTE, partial(buffers.frame.copy_, source))
        accelerator.submit(Lane.COMPUTE, self._graphs[form_of(stage.stage, stage.variant), stage.bucket])
        if count:
            accelerator.submit(Lane.COMPUTE, partial(entry.results[:count].copy_, buffers.values[:count]))
        if entry.n_logprobs:
            logprobs = self._logprobs_of(entry, count)
            accelerator.submit(Lane.COMPUTE, partial(logprobs.copy_, buffers.logprobs[:count]))
        return self._results_of(entry, count)

    def _prefill(self, entry: RingEntry, stage: StageInput) -> list[tuple[Tensor, Tensor]]:
        """Prompts differ too much to be captured whole: the stage is launched piece by piece."""
        accelerator, count, size, chunks = self._accelerator, stage.num_values, stage.frame.size, stage.chunks
        assert chunks is not None
        downloads = self._results_of(entry, count)
        rare = {name: self._upload_rare(entry, values) for name, values in stage.rare_prefill_inputs().items()}
        prompt_logprobs = None
        if (targets := rare.get("targets")) is not None:
            shape = (len(targets), self._logprob_columns)
            prompt_logprobs = torch.empty(shape, dtype=torch.int32, device=targets.device)
            entry.prompt_logprobs = accelerator.host_buffer(prompt_logprobs.numel())
            entry.kept.append(prompt_logprobs)
            downloads.append((entry.prompt_logprobs, prompt_logprobs.view(-1)))
        tensors = PrefillInput.from_frame(chunks, entry.inputs[:size], entry.inputs[size : size + count], **rare)
        logprobs = self._logprobs_of(entry, count) if entry.n_logprobs else None
        work = partial(self._run_prefill, tensors, stage.variant, entry.results[:count], logprobs, prompt_logprobs)
        accelerator.submit(Lane.COMPUTE, work)
        return downloads

    def _run_prefill(
        self,
        chunks: PrefillInput,
        variant: Variant,
        tokens: Tensor,
        logprobs: Tensor | None,
        prompt_logprobs: Tensor | None,
    ) -> None:
        """Runs a prefill into result buffers."""
        with torch.inference_mode():
            done = self.stages.prefill(chunks, variant, self._pieces.context)
            tokens.copy_(done.sampled.tokens)
            if logprobs is not None:
                logprobs.copy_(done.sampled.logprobs)
            if prompt_logprobs is not None:
                prompt_logprobs.copy_(done.prompt_logprobs)

    def _logprobs_of(self, entry: RingEntry, count: int) -> Tensor:
        """Room for the logprobs of ``count`` rows behind their values."""
        return entry.results[count : count + entry.n_logprobs].view(count, self._logprob_columns)

    def _results_of(self, entry: RingEntry, count: int) -> list[tuple[Tensor, Tensor]]:
        words = count + entry.n_logprobs
        return [(entry.results_host[:words], entry.results[:words])] if words else []


def largest_prefill_words(max_tokens: int, limits: StageLimits) -> int:
    """int32 of the largest prefill frame: every slot in it, and every block new (common.frames)."""
    updates = min(limits.num_blocks, limits.num_slots * limits.max_blocks)
    return prefill_words(limits.num_slots, max_tokens, updates)


def _output(entry: RingEntry, stage: StageInput) -> StageOutput:
    """The host's copy of a finished stage's results."""
    count = stage.num_values
    values = entry.results_host[: count + entry.n_logprobs].numpy()
    if stage.stage in (Stage.PRELUDE, Stage.CORE):
        return StageOutput.of_gates(stage.stage, values.astype(np.uint8))
    prompt = NO_TOKENS if entry.prompt_logprobs is None else entry.prompt_logprobs.numpy()
    return StageOutput(values[:count], logprobs=values[count:], prompt_logprobs=prompt, failed=entry.failed)
