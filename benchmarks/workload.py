"""The workload file: requests with lengths, recorded exit depths and arrival times (scheduling.md, Trace).

Knows nothing of models or tokenizers: a prompt is a count of tokens or a list of ids.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import MAX_DEPTH
from depthbatch.common.gates import Gate
from depthbatch.common.messages import RequestParams, Submit
from depthbatch.common.text_files import read_json

if TYPE_CHECKING:
    from depthbatch.frontend.params import SamplingParams

_KEYS = {"prompt_tokens", "output_tokens", "exit_depths", "known_depths", "arrival_s"}


@dataclass(frozen=True)
class WorkloadRequest:
    """One request. ``exit_depths[j]`` is the depth of decode token j, which carries output token j and yields j + 1;
    the first output token comes from prefill and has none. A missing entry means r_max. ``known_depths[j]`` is the number
    of loops from which on a draft read of decode token j is the token that it yields."""

    prompt_tokens: int
    output_tokens: int
    prompt_ids: tuple[int, ...] | None = None
    exit_depths: tuple[int, ...] | None = None
    known_depths: tuple[int, ...] | None = None
    arrival_s: float = 0.0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def sampling(self) -> "SamplingParams":
        """The request's parameters for an LLM: greedy, its output length exactly, its depths replayed if it has some."""
        from depthbatch.frontend.params import SamplingParams  # only what runs an engine needs the frontend

        return SamplingParams(
            max_tokens=self.output_tokens,
            min_tokens=self.output_tokens,
            temperature=0.0,
            ignore_eos=True,
            gate="none" if self.exit_depths is None else "replay",
            exit_depths=self.exit_depths,
        )

    def submit(self, request_id: int, r_max: int, vocab_size: int = 1, **params: Any) -> Submit:
        """The request as a message: replayed depths when it has some, full depth otherwise. A prompt given as a count
        is filled with ids that follow from request_id and vocab_size."""
        replayed = self.exit_depths is not None
        return Submit(
            request_id,
            self.prompt(request_id, vocab_size).tobytes(),
            RequestParams(
                max_tokens=self.output_tokens,
                min_tokens=self.output_tokens,
                gate=Gate.REPLAY if replayed else Gate.NONE,
                max_loops=r_max,
                exit_depths=bytes(min(depth, r_max) for depth in self.exit_depths or ()),
                **params,
            ),
        )

    def prompt(self, request_id: int, vocab_size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        """Token ids, int32 [prompt_tokens]."""
        if self.prompt_ids is not None:
            return np.asarray(self.prompt_ids, dtype=np.int32)
        if vocab_size == 1:
            return np.zeros(self.prompt_tokens, np.int32)
        return np.random.default_rng(request_id).integers(0, vocab_size, self.prompt_tokens, dtype=np.int32)


@dataclass(frozen=True)
class Workload:
    """Requests in file order."""

    requests: tuple[WorkloadRequest, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(request.total_tokens for request in self.requests)

    @classmethod
    def read(cls, path: str | Path) -> "Workload":
        """Raises ConfigError naming the file, the request and the field at fault."""
        try:
            data = read_json(path)
        except OSError as error:
            raise ConfigError(f"workload {path}: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"workload {path}: not JSON ({error})") from None
        if not isinstance(data, dict) or not isinstance(data.get("requests"), list):
            raise ConfigError(f"workload {path}: no list 'requests'")
        if not data["requests"]:
            raise ConfigError(f"workload {path}: 'requests' is empty")
        return cls(
            tuple(_parse(item, f"workload {path}: request {index}") for index, item in enumerate(data["requests"]))
        )

    def write(self, path: str | Path) -> None:
        """The file that read() gives back as this workload."""
        Path(path).write_text(json.dumps({"requests": [_as_json(request) for request in self.requests]}) + "\n")


class Window(NamedTuple):
    """The part of a run that counts: ``tokens`` generated tokens, after ``skip`` of them. The run ends with it."""

    skip: int
    tokens: int


def _parse(item: Any, where: str) -> WorkloadRequest:
    _require(isinstance(item, dict), f"{where} is not an object")
    unknown = sorted(set(item) - _KEYS)
    _require(not unknown, f"{where}: unknown field {', '.join(unknown)}")
    prompt = item.get("prompt_tokens")
    ids = tuple(prompt) if isinstance(prompt, list) else None
    _require(ids is None or all(_is_int(token) and token >= 0 for token in ids), f"{where}: prompt_tokens holds no ids")
    count = len(ids) if ids is not None else prompt
    _require(_is_int(count) and count >= 1, f"{where}: prompt_tokens must be a count of at least 1 or a list of ids")
    output = item.get("output_tokens")
    _require(_is_int(output) and output >= 1, f"{where}: output_tokens must be at least 1, not {output!r}")
    depths, known = (_parse_depths(item, name, where) for name in ("exit_depths", "known_depths"))
    _require(
        known is None or len(known) >= output - 1,
        f"{where}: known_depths has {len(known or ())} entries for {output - 1} decode tokens",
    )
    arrival = item.get("arrival_s", 0.0)
    _require(
        isinstance(arrival, (int, float)) and not isinstance(arrival, bool) and 0 <= arrival < float("inf"),
        f"{where}: arrival_s must be a time of at least 0, not {arrival!r}",
    )
    return WorkloadRequest(count, output, ids, depths, known, float(arrival))


def _parse_depths(item: dict[str, Any], name: str, where: str) -> tuple[int, ...] | None:
    depths = item.get(name)
    _require(
        depths is None or (isinstance(depths, list) and all(_is_int(d) and 1 <= d <= MAX_DEPTH for d in depths)),
        f"{where}: {name} must be a list of depths in 1..{MAX_DEPTH}",
    )
    return None if depths is None else tuple(depths)


def _as_json(request: WorkloadRequest) -> dict[str, Any]:
    ids = request.prompt_ids
    out: dict[str, Any] = {"prompt_tokens": request.prompt_tokens if ids is None else list(ids)}
    out["output_tokens"] = request.output_tokens
    for name in ("exit_depths", "known_depths"):
        if (depths := getattr(request, name)) is not None:
            out[name] = list(depths)
    if request.arrival_s:
        out["arrival_s"] = request.arrival_s
    return out


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
