"""Which drafts are right on a device without weights: what a workload says of its tokens, or a given share of them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from depthbatch.benchmarks.workload import Workload
from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import ROW_AUX, ROW_POSITION, ROW_SLOT, Stage, slot_param_rows
from depthbatch.common.messages import StageResult
from depthbatch.scheduler.stage_batch import ScheduledStage

Acceptance = Mapping[int, float]  # draft depth -> share of the drafts that are right


def parse_acceptance(text: Any) -> dict[int, float]:
    """A share for all draft depths, or a JSON map of depth to share; between its depths the lower one's holds. Raises
    ConfigError unless shares are 0 to 1 and do not fall with depth."""
    try:
        value = json.loads(text) if isinstance(text, str) else text
        shares = {int(k): float(v) for k, v in (value.items() if isinstance(value, dict) else [(1, value)])}
    except (ValueError, TypeError):
        raise ConfigError(f"draft acceptance {text!r} is neither a share nor a JSON map of depth to share") from None
    ordered = [shares[depth] for depth in sorted(shares)]
    if not ordered or min(shares) < 1 or ordered != sorted(ordered) or not 0.0 <= ordered[0] <= ordered[-1] <= 1.0:
        raise ConfigError(
            f"draft acceptance {text!r}: shares are 0 to 1, at depths from 1 on, and do not fall with depth"
        )
    return shares


def with_known_depths(workload: Workload, acceptance: Acceptance, r_max: int, seed: int = 0) -> Workload:
    """The same requests with the depth drawn from which each decode token is known: a draft read after l loops is right for
    the share of l, and so are later ones of the same token."""
    depths = np.arange(1, r_max)
    shares = np.array([max((a for d, a in acceptance.items() if d <= depth), default=0.0) for depth in depths])
    rng = np.random.default_rng([seed, 3])

    def draw(count: int) -> tuple[int, ...]:
        return tuple((1 + np.searchsorted(shares, rng.random(count), side="right")).tolist())

    return Workload(tuple(replace(r, known_depths=draw(r.output_tokens - 1)) for r in workload.requests))


class VirtualDrafts:
    """Answers the codas of a workload's requests, whose seeds are their indices: 0 for every token, 1 for a wrong draft."""

    def __init__(self, workload: Workload) -> None:
        """Raises ConfigError when the workload does not say which drafts are right."""
        if any(request.known_depths is None for request in workload.requests):
            raise ConfigError("speculation: the workload has no known_depths; give --draft-acceptance")
        self._first = np.array([request.prompt_tokens for request in workload.requests])
        self._known = [np.array([*(request.known_depths or ()), 0]) for request in workload.requests]
        self._request: dict[int, int] = {}  # by slot

    def answer(self, stage: ScheduledStage, blank: StageResult) -> StageResult:
        """``blank``: the stage's result with 0 for every token."""
        if stage.slot_params is not None:
            rows = slot_param_rows(stage.slot_params)
            self._request.update(zip(rows["slot"].tolist(), rows["seed_low"].tolist(), strict=True))
        if stage.header.stage != Stage.CODA:
            return blank
        frame = stage.frame[:, : stage.header.rows]
        drafts = np.flatnonzero(frame[ROW_AUX] < 0)
        if not drafts.size:
            return blank
        tokens = np.zeros(stage.header.rows, "<i4")
        for row in drafts.tolist():
            slot, position, loops = (int(frame[field, row]) for field in (ROW_SLOT, ROW_POSITION, ROW_AUX))
            request = self._request[slot]
            tokens[row] = -loops < self._known[request][position - self._first[request]]
        return msgspec.structs.replace(blank, token_ids=tokens.tobytes())
