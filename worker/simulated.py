"""A device without a model: takes a profile's time for every stage, on its own clock, and obeys the same protocol.

A stage starts when it arrives or when the one before it ends, whichever is later, so stages that are queued ahead run
back to back without drift, as on a GPU's stream. Tokens are a function of (seed, position), as is whether drafts of one are right; gates
never fire. Imports no torch.
"""

import ctypes
import os
import time
from collections import deque
from pathlib import Path

import numpy as np
import numpy.typing as npt

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import (
    ROW_AUX,
    ROW_FIELDS,
    Int32Array,
    SlotParamRows,
    Stage,
    lanes_of_a_slot,
)
from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout, swap_blocks
from depthbatch.common.messages import EngineInfo, StageBatch, StageResult, Variant
from depthbatch.common.splitmix64 import UNSIGNED, mix64
from depthbatch.worker.device_profile import DeviceProfile, read_profile
from depthbatch.worker.runner.stage_input import StageInput, StageLimits, bucket_sizes, most_rows, parse_stage
from depthbatch.worker.runner.stage_io import NO_OUTPUT, LaunchedStage, StageOutput

PREFIX = "simulated:"
SHIPPED_PROFILES = Path(__file__).resolve().parent / "profiles"
BLOCK_SIZE = 16
MAX_POSITIONS = 65536
DRAFT_ACCEPTANCE = 0.9
_PR_SET_TIMERSLACK = 29


def find_profile(name: str) -> DeviceProfile:
    """The profile of a file, or of a shipped one by its name; ConfigError names the choices."""
    path = Path(name)
    if os.path.isfile(path) or name.endswith(".json") or "/" in name:
        return read_profile(path)
    shipped = SHIPPED_PROFILES / f"{name}.json"
    if not os.path.isfile(shipped):
        known = ", ".join(sorted(file.stem for file in SHIPPED_PROFILES.glob("*.json"))) or "none"
        raise ConfigError(f"device profile '{name}' is neither a file nor shipped (shipped: {known})")
    return read_profile(shipped)


def simulated_info(config: EngineConfig, profile: DeviceProfile) -> EngineInfo:
    """What the simulated engine is: the profile's model with KV memory for W sequences of the greatest length."""
    r_max = config.max_loops or profile.r_max
    if r_max > profile.r_max:
        raise ConfigError(f"max_loops {r_max} is outside the profile's range 1..{profile.r_max}")
    layout = KVLayout(config.kv_layout or KVLayout.SINGLE)
    gates = (Gate.NONE, Gate.FIXED, Gate.REPLAY) if layout.allows_early_exit else (Gate.NONE, Gate.FIXED)
    if config.gate not in (None, Gate.NONE.label):
        raise ConfigError(f"gate '{config.gate}': a simulated device decides no exits; use replayed depths")
    length = config.max_model_len or MAX_POSITIONS
    block_size = config.block_size or BLOCK_SIZE
    most_blocks = config.max_num_seqs * -(-length // block_size)
    token_bytes = profile.bytes_per_kv_token * layout.num_planes(r_max)
    draft_lanes = config.draft_lanes_under(KVLayout(layout), r_max)
    return EngineInfo(
        model=profile.name,
        architecture="simulated",
        vocab_size=profile.vocab_size,
        r_max=r_max,
        r_min=min(config.min_loops or profile.r_min, r_max),
        default_gate=Gate.NONE,
        gates=gates,
        default_threshold=1.0,
        kv_layout=layout,
        block_size=block_size,
        num_blocks=1 + (config.kv_blocks or most_blocks),
        kv_bytes_per_token=token_bytes,
        max_model_len=length,
        boundary_layers=profile.boundary_layers,
        buckets=bucket_sizes(most_rows(config.max_num_seqs, 1 + draft_lanes)),
        draft_lanes=draft_lanes,
        coda_layers=profile.boundary_layers,
        host_blocks=swap_blocks(config.swap_bytes, block_size * token_bytes, most_blocks),
        device=f"simulated:{profile.name}",
        dtype="bfloat16",
    )


class SimulatedRunner:
    """StageRunner that only lets time pass. The caller waits; ``read`` expects the stage's end to have come."""

    completions: int | None = None
    grammars = None

    def __init__(
        self, profile: DeviceProfile, info: EngineInfo, max_num_seqs: int, draft_acceptance: float | None = None
    ) -> None:
        """``draft_acceptance``: share of the tokens whose drafts are right, 0 to 1; None: DRAFT_ACCEPTANCE."""
        self.limits = StageLimits(
            num_slots=max_num_seqs,
            num_blocks=info.num_blocks,
            max_blocks=-(-info.max_model_len // info.block_size),
            max_positions=info.max_model_len,
            r_max=info.r_max,
            vocab_size=info.vocab_size,
            buckets=info.buckets,
            lanes=lanes_of_a_slot(info.draft_lanes),
            host_blocks=info.host_blocks,
        )
        self._block_bytes = info.kv_bytes_per_token * info.block_size
        self.lateness_s: deque[float] = deque(maxlen=10_000)  # how long after its end each stage was read
        self._profile = profile
        self._draft_acceptance = DRAFT_ACCEPTANCE if draft_acceptance is None else draft_acceptance
        self._end_s = 0.0  # of the last stage launched
        self._seeds = np.zeros(max_num_seqs + 1, np.uint64)

    def launch(self, header: StageBatch, frame: Int32Array, slot_params: Int32Array | None = None) -> LaunchedStage:
        arrived_s = time.monotonic()
        stage = parse_stage(header, frame, slot_params, self.limits)
        self._set_params(stage.slot_params)
        moved_s = self._profile.move_seconds((len(stage.offloads) + len(stage.restores)) * self._block_bytes)
        start_s = max(arrived_s, self._end_s) + moved_s
        self._end_s = start_s + self._seconds(stage)
        output = self._output(stage)
        return LaunchedStage(header, start_s, self._end_s, output._replace(moved_s=moved_s) if moved_s else output)

    def finished(self, stage: LaunchedStage) -> bool:
        return stage.ready_s <= time.monotonic()

    def read(self, stage: LaunchedStage) -> StageResult:
        now_s = time.monotonic()
        if now_s < stage.ready_s:
            time.sleep(stage.ready_s - now_s)
            now_s = time.monotonic()
        self.lateness_s.append(now_s - stage.ready_s)
        return stage.output.result(stage.header.step_id, stage.start_s, stage.ready_s)

    def _set_params(self, rows: SlotParamRows) -> None:
        low = rows["seed_low"].view(np.uint32).astype(np.uint64)
        high = rows["seed_high"].view(np.uint32).astype(np.uint64)
        self._seeds[rows["slot"]] = low | high << np.uint64(32)

    def _seconds(self, stage: StageInput) -> float:
        context = 0
        if stage.stage is Stage.CORE:
            context = int(stage.positions.sum(dtype=np.int64)) + stage.rows
        n_tokens = 0 if stage.chunks is None else stage.chunks.token_ids.size
        return self._profile.stage_seconds(stage.stage, stage.rows, context, n_tokens)

    def _output(self, stage: StageInput) -> StageOutput:
        if stage.stage is Stage.CORE and Variant.GATES in stage.variant:
            return StageOutput(fired=np.zeros(stage.rows, np.uint8))
        if not stage.given.size:
            return NO_OUTPUT
        ends = stage.positions if stage.chunks is None else stage.positions[stage.chunks.sampled]
        bits = self._bits(stage.given, ends + 1)
        tokens: Int32Array = (bits % np.uint64(self.limits.vocab_size)).astype(np.int32)
        if stage.stage is Stage.CODA and self._draft_acceptance < 1.0:
            drafts = stage.frame.reshape(ROW_FIELDS, -1)[ROW_AUX, : stage.rows] < 0
            share = (mix64(bits, UNSIGNED) >> np.uint64(11)).astype(np.float64) / (1 << 53)
            wrong = drafts & (share >= self._draft_acceptance)
            tokens[wrong] = (tokens[wrong] + 1) % self.limits.vocab_size
        return StageOutput(tokens)

    def _bits(self, slots: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
        """Mixed bits of (seed, position): their token is these modulo the vocabulary."""
        x = self._seeds[slots] + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(UNSIGNED.golden)
        bits: npt.NDArray[np.uint64] = mix64(x, UNSIGNED)
        return bits


def sharpen_timers() -> None:
    """Lets this process wake within a microsecond of a deadline; the kernel's default slack is 50."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
