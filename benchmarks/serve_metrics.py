"""Figures of a serving benchmark, with the names and definitions of ``vllm bench serve``.

TTFT: from sending to the first token. ITL: between successive pieces of the stream. E2EL: from sending to the last
piece. TPOT: (E2EL - TTFT) / (output tokens - 1), of requests with more than one. Goodput: requests a second that meet
every target given. Beside those, the paper's ``normalized_latency_s``: the mean of E2EL / output tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from depthbatch.common.errors import ConfigError

GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass
class RequestTimes:
    """What was seen of one request; seconds on the client's clock."""

    prompt_tokens: int
    sent_s: float
    output_tokens: int = 0
    piece_s: list[float] = field(default_factory=list)  # arrival of each piece that carries tokens
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and bool(self.piece_s) and self.output_tokens > 0

    @property
    def ttft_s(self) -> float:
        return self.piece_s[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        return self.piece_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """None when there is no second token."""
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def parse_goodput(targets: Sequence[str]) -> dict[str, float]:
    """``ttft:500 tpot:50`` as seconds by metric; ConfigError on anything else."""
    parsed = {}
    for text in targets:
        name, _, value = text.partition(":")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = -1.0
        if name not in GOODPUT_METRICS or milliseconds < 0:
            raise ConfigError(f"goodput {text!r}: wants {' or '.join(GOODPUT_METRICS)}, a colon and milliseconds")
        parsed[name] = milliseconds / 1e3
    return parsed


def meets(request: RequestTimes, targets: Mapping[str, float]) -> bool:
    """True when a request that succeeded is within every target (seconds)."""
    measured = {"ttft": request.ttft_s, "tpot": request.tpot_s or 0.0, "e2el": request.e2el_s}
    return all(measured[name] <= limit for name, limit in targets.items())


def summarise(
    requests: Sequence[RequestTimes],
    duration_s: float,
    targets: Mapping[str, float],
    percentiles: Sequence[float] = (99.0,),
) -> dict[str, Any]:
    """All figures; times in ms where the name says so. Latencies are those of the requests that succeeded."""
    good = [request for request in requests if request.ok]
    output = sum(request.output_tokens for request in good)
    total_input = sum(request.prompt_tokens for request in good)
    series = {
        "ttft": [request.ttft_s for request in good],
        "tpot": [tpot for request in good if (tpot := request.tpot_s) is not None],
        "itl": [gap for request in good for gap in np.diff(request.piece_s).tolist()],
        "e2el": [request.e2el_s for request in good],
    }
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(requests) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": output,
        "request_throughput": len(good) / duration_s,
        "request_goodput": sum(meets(request, targets) for request in good) / duration_s if targets else None,
        "output_throughput": output / duration_s,
        "total_token_throughput": (total_input + output) / duration_s,
    }
    for name, values in series.items():
        figures |= _spread(name, values, percentiles)
    normalized = [request.e2el_s / request.output_tokens for request in good]
    figures["normalized_latency_s"] = float(np.mean(normalized)) if normalized else 0.0
    figures["p99_normalized_latency_s"] = float(np.percentile(normalized, 99)) if normalized else 0.0
    return figures


def _spread(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """mean, median, std and percentiles in ms, 0 when there is nothing to measure."""
    values = np.asarray(seconds if seconds else [0.0]) * 1e3
    out = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    for percentile in percentiles:
        word = str(int(percentile)) if percentile == int(percentile) else str(percentile)
        out[f"p{word}_{name}_ms"] = float(np.percentile(values, percentile))
    return out
