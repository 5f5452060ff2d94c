"""Device profiles: what a stage costs on a device (scheduling.md, cost model), read strictly from JSON.

Shared by the simulated device (worker), the simulator and the latency fit (benchmarks), and the ``auto`` policy. Knows
nothing of schedules; a profile only answers how long one stage takes.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import Stage
from depthbatch.common.text_files import read_text

Milliseconds = Annotated[float, msgspec.Meta(ge=0.0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class _Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base: unknown keys are errors."""


class LinearCost(_Profile, frozen=True):
    """t(n) = delta + gamma n, n in rows (prefill: prompt tokens)."""

    delta_ms: Milliseconds
    gamma_ms: Milliseconds


class CoreCost(_Profile, frozen=True):
    """t(N_c, N_b) = delta + gamma N_b + alpha N_c, N_b rows, N_c context tokens read."""

    delta_ms: Milliseconds
    gamma_ms: Milliseconds
    alpha_ms: Milliseconds


class StageFlops(_Profile, frozen=True):
    """FLOPs a token: one core step, and both boundary stages together."""

    core: float
    boundary: float


class DeviceProfile(_Profile, frozen=True):
    """One model on one device. ``note`` says where the numbers come from."""

    name: str
    r_max: Count
    bytes_per_kv_token: Count  # K and V of one token, one plane
    core: CoreCost
    prelude: LinearCost
    coda: LinearCost
    prefill: LinearCost  # full depth
    flops: StageFlops
    boundary_layers: Annotated[int, msgspec.Meta(ge=0)] = (
        0  # transformer layers outside the core; decides the default K
    )
    r_min: Count = 1
    vocab_size: Count = 49152
    host_gib_per_s: Annotated[float, msgspec.Meta(gt=0.0)] = 50.0  # copies between K/V and pinned host memory
    note: str = ""

    def move_seconds(self, num_bytes: int) -> float:
        """Seconds of copies between KV and host memory."""
        return num_bytes / (self.host_gib_per_s * (1 << 30))

    def stage_seconds(self, stage: Stage, rows: int, context_tokens: int = 0, prompt_tokens: int = 0) -> float:
        """Seconds of one stage.

        ``rows`` are real rows (not used for prefill); ``context_tokens`` is N_c of a core step, the sum of position + 1 over its
        rows; ``prompt_tokens`` are the tokens of a prefill batch.
        """
        match stage:
            case Stage.CORE:
                cost = self.core
                return 1e-3 * (cost.delta_ms + cost.gamma_ms * rows + cost.alpha_ms * context_tokens)
            case Stage.PREFILL:
                return 1e-3 * (self.prefill.delta_ms + self.prefill.gamma_ms * prompt_tokens)
            case Stage.PRELUDE:
                return 1e-3 * (self.prelude.delta_ms + self.prelude.gamma_ms * rows)
            case Stage.CODA:
                return 1e-3 * (self.coda.delta_ms + self.coda.gamma_ms * rows)


def parse_profile(text: bytes | str, source: str) -> DeviceProfile:
    """A profile from JSON; ConfigError names ``source`` and the field at fault."""
    try:
        return msgspec.json.decode(text, type=DeviceProfile)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigError(f"device profile {source}: {error}") from None


def read_profile(path: Path) -> DeviceProfile:
    """Reads a profile file; ConfigError when it is missing or not a profile."""
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(f"device profile {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"device profile {path}: {error}") from None
    return parse_profile(text, str(path))
