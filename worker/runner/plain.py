"""Runs stages in the order they are sent, on any device, and gives the host what it needs of each.

Knows the stages and their frames; knows nothing of sockets, requests or policy.
"""

import time

import numpy as np
import numpy.typing as npt
import torch

from depthbatch.common.frames import (
    Int32Array,
    SlotParamRows,
    Stage,
    logprob_fields,
    slot_param_rows,
    slot_param_words,
)
from depthbatch.common.messages import RowFailure, StageBatch, Variant
from depthbatch.worker.runner.buffers import DecodeBuffers
from depthbatch.worker.runner.checks import StageLimits, adjustments_of, check_stage, known_tokens_of, rare_inputs
from depthbatch.worker.runner.prefill_input import PrefillInput
from depthbatch.worker.runner.stage_io import NO_FLAGS, NO_TOKENS, InFlight, StageDone, StageOutput
from depthbatch.worker.runner.stages import Sampler, Stages
from depthbatch.worker.sampling.grammar_matchers import Grammars, require_grammars
from depthbatch.worker.sampling.logprobs import num_likeliest


class Runner:
    """Runs stages eagerly over static buffers. On the CPU a launch computes, and reading takes no time."""

    completions: int | None = None

    def __init__(
        self, stages: Stages, limits: StageLimits, device: torch.device, grammars: Grammars | None = None
    ) -> None:
        self.stages = stages
        self.grammars = grammars
        self.limits = limits
        self.score_columns = logprob_fields(num_likeliest(limits.vocab_size))
        self._buffers = {
            (stage, bucket): DecodeBuffers(bucket, device, self.score_columns if stage is Stage.CODA else 0)
            for stage in (Stage.PRELUDE, Stage.CORE, Stage.CODA)
            for bucket in limits.buckets
        }
        self._device = device
        self._filtered = np.zeros(limits.num_slots + 1, bool)  # slots that use top-k, top-p or min-p

    def launch(self, header: StageBatch, frame: Int32Array, slot_params: Int32Array | None = None) -> InFlight:
        start = time.monotonic()
        check_stage(header, frame, slot_params, self.limits)
        with torch.inference_mode():
            if slot_params is not None:
                self._set_params(slot_param_rows(slot_params))
            if header.extra is not None and header.extra.adjustments:
                entries = torch.tensor(adjustments_of(header.extra), device=self._device)
                self.stages.slots.shaping.set_adjustments(entries)
            if header.stage == Stage.PRELUDE and header.extra is not None:
                self.stages.replace_tokens(torch.tensor(known_tokens_of(header.extra), device=self._device))
            self._admit_grammars(header, slot_params)
            slots = self._constrained(header, frame)
            if slots:
                self._set_masks(slots)
            output = self._execute(header, frame)
            if slots and self.grammars is not None:
                self.grammars.note(self._given(header, frame), output.token_ids.tolist())
            failed = self._failed_rows(header, frame) if slots else ()
        return InFlight(header.step_id, start, 0.0, output, failed)

    def finished(self, stage: InFlight) -> bool:
        return True

    def read(self, stage: InFlight) -> StageDone:
        return StageDone(stage.step_id, stage.start_s, time.monotonic(), stage.output, stage.failed)

    def run(self, header: StageBatch, frame: Int32Array, slot_params: Int32Array | None = None) -> StageOutput:
        """Launches and reads: the plain way, one stage in flight."""
        return self.read(self.launch(header, frame, slot_params)).output

    def static_tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor whose address a captured stage would hold, weights and KV memory apart."""
        buffers = (tensor for buffer in self._buffers.values() for tensor in buffer.tensors())
        return (*self.stages.slots.tensors(), *buffers)

    def _set_params(self, rows: SlotParamRows) -> None:
        self.stages.slots.set_params(torch.tensor(slot_param_words(rows), device=self._device))
        self._note_filters(rows)

    def _admit_grammars(self, header: StageBatch, slot_params: Int32Array | None) -> None:
        """Slots that change hands lose their matcher, those of constrained requests get one."""
        if self.grammars is not None and slot_params is not None:
            slots = slot_param_rows(slot_params)["slot"].tolist()
            self.grammars.admit(slots, header.extra.grammars if header.extra is not None else ())

    def _constrained(self, header: StageBatch, frame: Int32Array) -> list[int]:
        """Slots that are to get a token which their grammar must allow; a prefill's own tokens are taken first."""
        if not header.variant & Variant.CONSTRAIN:
            return []
        grammars = require_grammars(self.grammars, header)
        if header.stage == Stage.PREFILL:
            grammars.note_prefill(header, frame)
            if header.extra is not None:
                grammars.note(*known_tokens_of(header.extra).T.tolist())
        return grammars.constrained(self._given(header, frame))

    def _failed_rows(self, header: StageBatch, frame: Int32Array) -> tuple[RowFailure, ...]:
        """Rows that get a token whose grammar has failed; each once."""
        assert self.grammars is not None
        given = self._given(header, frame)
        failures = self.grammars.take_failures(given)
        return tuple([RowFailure(given.index(slot), reason) for slot, reason in failures.items()])

    @staticmethod
    def _given(header: StageBatch, frame: Int32Array) -> list[int]:
        """Slots that get a token, in batch order."""
        slots = frame.reshape(-1)[: header.rows]
        if header.stage == Stage.PREFILL:
            slots = slots[frame[3 * header.rows : 4 * header.rows] == 1]
        given: list[int] = slots.tolist()
        return given

    def _set_masks(self, slots: list[int]) -> None:
        assert self.grammars is not None
        masks = torch.from_numpy(self.grammars.masks(slots)).to(self._device)
        self.stages.slots.shaping.set_allowed(torch.tensor(slots, device=self._device), masks)

    def _note_filters(self, rows: SlotParamRows) -> None:
        self._filtered[rows["slot"]] = (rows["top_k"] > 0) | (rows["top_p"] < 1.0) | (rows["min_p"] > 0.0)

    def _sampler(self, header: StageBatch, slots: npt.NDArray[np.int32]) -> Sampler:
        """The cheapest sampling that is right for these rows, decided from what the host knows of them."""
        variant = header.variant
        sample = bool(variant & Variant.SAMPLE)
        return Sampler(
            sample,
            sample and bool(self._filtered[slots].any()),
            bool(variant & Variant.LOGITS),
            bool(variant & Variant.CONSTRAIN),
            bool(variant & Variant.LOGPROBS),
        )

    def _execute(self, header: StageBatch, frame: Int32Array) -> StageOutput:
        stage, rows = Stage(header.stage), header.rows
        if stage is Stage.PREFILL:
            rare = {name: torch.tensor(values, device=self._device) for name, values in rare_inputs(header).items()}
            chunks = PrefillInput.upload(frame, header.n_tokens, header.n_updates, self._device).with_rare(rare)
            done = self.stages.prefill(chunks, self._sampler(header, frame[:rows]))
            tokens, scores = (tensor.cpu().numpy() for tensor in done.sampled)
            return StageOutput(tokens, NO_FLAGS, scores, done.prompt_scores.cpu().numpy())
        buffers = self._buffers[stage, header.bucket]
        buffers.fill(frame)
        if stage is Stage.CODA:
            sampler = self._sampler(header, frame.reshape(-1)[:rows])
            self.stages.coda(buffers, sampler)
            scores = buffers.scores[: rows if sampler.scored else 0].cpu().numpy().copy()
            return StageOutput(buffers.tokens[:rows].cpu().numpy().copy(), NO_FLAGS, scores)
        gates = bool(header.variant & Variant.GATES)
        run = self.stages.prelude if stage is Stage.PRELUDE else self.stages.core
        run(buffers, gates)
        if gates:
            return StageOutput(NO_TOKENS, buffers.flags[:rows].cpu().numpy().copy())
        return StageOutput(NO_TOKENS, NO_FLAGS)
