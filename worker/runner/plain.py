"""Runs stages in the order they are sent, on any device: the plain way, which the overlapped one is compared with.

Knows the stages and their frames; knows nothing of sockets, requests or policy.
"""

import time

import torch
from torch import Tensor

from depthbatch.common.frames import Int32Array, Stage, slot_param_words
from depthbatch.common.messages import StageBatch, StageResult, Variant
from depthbatch.worker.host_kv import HostKV
from depthbatch.worker.runner.stage_input import StageInput, StageLimits, parse_stage
from depthbatch.worker.runner.stage_io import NO_OUTPUT, LaunchedStage, StageOutput
from depthbatch.worker.runner.stage_tensors import PrefillInput, SharedDecodeBuffers
from depthbatch.worker.runner.stages import Stages
from depthbatch.worker.sampling.grammar_matchers import Grammars, begin_stage


class PlainRunner:
    """StageRunner over static buffers, eager. On the CPU a launch computes, and reading takes no time."""

    completions: int | None = None

    def __init__(
        self,
        stages: Stages,
        limits: StageLimits,
        device: torch.device,
        grammars: Grammars | None = None,
        host_kv: HostKV | None = None,
    ) -> None:
        self.stages = stages
        self.grammars = grammars
        self.limits = limits
        self._buffers = SharedDecodeBuffers(limits, device)
        self._device = device
        self._host_kv = host_kv

    def launch(self, header: StageBatch, frame: Int32Array, slot_params: Int32Array | None = None) -> LaunchedStage:
        arrived_s = time.monotonic()
        stage = parse_stage(header, frame, slot_params, self.limits)
        start_s, moved_s = arrived_s, 0.0
        if self._host_kv is not None and (stage.offloads.size or stage.restores.size):
            self._host_kv.move(stage.offloads, stage.restores)
            start_s = time.monotonic()
            moved_s = start_s - arrived_s
        with torch.inference_mode():
            if stage.slot_params.size:
                self.stages.slots.set_params(self._upload(slot_param_words(stage.slot_params)))
            masks = begin_stage(self.grammars, stage)
            for update in self.stages.updates(stage, masks):
                update.apply(*map(self._upload, update.values))
            output = self._prefill(stage) if stage.stage is Stage.PREFILL else self._decode(stage)
        if masks is not None and self.grammars is not None:
            self.grammars.note(stage.given.tolist(), output.token_ids.tolist())
            output = output._replace(failed=self.grammars.take_failures(stage))
        if moved_s:
            output = output._replace(moved_s=moved_s)
        return LaunchedStage(header, start_s, 0.0, output)

    def finished(self, stage: LaunchedStage) -> bool:
        return True

    def read(self, stage: LaunchedStage) -> StageResult:
        return stage.output.result(stage.header.step_id, stage.start_s, time.monotonic())

    def run(self, header: StageBatch, frame: Int32Array, slot_params: Int32Array | None = None) -> StageResult:
        """Launches and reads: one stage in flight."""
        return self.read(self.launch(header, frame, slot_params))

    def static_tensors(self) -> tuple[Tensor, ...]:
        """Every tensor whose address a captured stage would hold, weights and KV memory apart."""
        buffers = (tensor for buffer in self._buffers.whole.values() for tensor in buffer.tensors())
        return (*self.stages.slots.tensors(), *buffers)

    def _upload(self, values: Int32Array) -> Tensor:
        return torch.tensor(values, device=self._device)

    def _prefill(self, stage: StageInput) -> StageOutput:
        assert stage.chunks is not None
        rare = {name: self._upload(values) for name, values in stage.rare_prefill_inputs().items()}
        frame, sampled = self._upload(stage.frame), self._upload(stage.chunks.sampled)
        done = self.stages.prefill(PrefillInput.from_frame(stage.chunks, frame, sampled, **rare), stage.variant)
        tokens, logprobs = (tensor.cpu().numpy() for tensor in done.sampled)
        return StageOutput(tokens, logprobs=logprobs, prompt_logprobs=done.prompt_logprobs.cpu().numpy())

    def _decode(self, stage: StageInput) -> StageOutput:
        buffers, rows = self._buffers[stage.stage, stage.bucket], stage.rows
        buffers.fill(stage.frame)
        self.stages.decode(stage.stage, buffers, stage.variant)
        if not stage.num_values:
            return NO_OUTPUT
        values = buffers.values[:rows].cpu().numpy()
        if stage.stage is not Stage.CODA:
            return StageOutput.of_gates(stage.stage, values.astype("uint8"))
        logprobs = buffers.logprobs[: rows if Variant.LOGPROBS in stage.variant else 0]
        return StageOutput(values.copy(), logprobs=logprobs.cpu().numpy().copy())
