"""What a simulated fleet is asked for: arrivals, lengths, depths and shared beginnings, drawn once and the same for every
fleet. What a router may know of a request is here, too: its beginning, and the loops that its threshold lets expect."""

from dataclasses import dataclass

import numpy as np

from depthbatch.benchmarks.synthetic import OURO_EXITS, arrival_times, draw_exit_depths, draw_lengths
from depthbatch.common.errors import ConfigError
from depthbatch.common.gates import Gate
from depthbatch.common.messages import RequestParams, Submit
from depthbatch.frontend.routing import prefixes_of

ZIPF = 1.0  # popularity of the k-th shared beginning is k ** -ZIPF


@dataclass(frozen=True)
class TrafficOptions:
    """How it is drawn."""

    workload: str = "alpaca"
    rate: float = 100.0  # requests a second
    exits: str = "0.2"  # thresholds of OURO_EXITS
    prefixes: int = 0
    prefix_tokens: int = 1024
    seed: int = 0

    @property
    def thresholds(self) -> list[float]:
        """Raises ConfigError."""
        try:
            found = [float(text) for text in self.exits.split(",")]
        except ValueError:
            found = [-1.0]
        if any(threshold not in OURO_EXITS for threshold in found):
            raise ConfigError(f"exits: {self.exits!r} are not thresholds among {', '.join(map(str, OURO_EXITS))}")
        return found


@dataclass(frozen=True)
class Traffic:
    """One array entry a request, in order of arrival."""

    options: TrafficOptions
    arrivals_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    depths: list[bytes]  # one a decode token
    prefix: np.ndarray  # which beginning; -1 = none
    expected_loops: np.ndarray  # by the mean output and the mean depth of its threshold
    r_max: int
    homes: tuple[tuple[int, ...], ...]  # routing keys of each beginning

    @property
    def longest(self) -> int:
        """Tokens."""
        return int((self.prompt_tokens + self.output_tokens).max())

    def prefixes(self, request: int) -> tuple[int, ...]:
        index = int(self.prefix[request])
        return () if index < 0 else self.homes[index]

    def submit(self, request: int, generated_depths: bytes) -> Submit:
        """The request after so many tokens."""
        output = int(self.output_tokens[request])
        return Submit(
            request,
            self.prompt(request).tobytes(),
            RequestParams(
                max_tokens=output,
                min_tokens=output,
                gate=Gate.REPLAY,
                max_loops=self.r_max,
                exit_depths=self.depths[request],
            ),
            bytes(4 * len(generated_depths)),
            generated_depths,
        )

    def prompt(self, request: int) -> np.ndarray:
        """Token ids: the shared beginning, then ids of its own."""
        own = np.full(int(self.prompt_tokens[request]), request, np.int32)
        if self.prefix[request] >= 0:
            own[: self.options.prefix_tokens] = _beginning(int(self.prefix[request]), self.options.prefix_tokens)
        return own


def _beginning(index: int, tokens: int) -> np.ndarray:
    return np.arange(tokens, dtype=np.int32) + np.int32(1 + index * tokens)


def make_traffic(options: TrafficOptions, requests: int, r_max: int) -> Traffic:
    """Draws it. Raises ConfigError."""
    rng = np.random.default_rng([options.seed, 1])
    prompts, outputs = draw_lengths(options.workload, requests, rng)
    thresholds = options.thresholds
    chosen = rng.integers(len(thresholds), size=requests)
    depths: list[bytes] = [b""] * requests
    means = np.zeros(len(thresholds))
    for kind, threshold in enumerate(thresholds):
        exits = OURO_EXITS[threshold]
        means[kind] = sum(depth * weight for depth, weight in exits.items()) / sum(exits.values())
        members = np.flatnonzero(chosen == kind)
        for member, drawn in zip(members.tolist(), draw_exit_depths(outputs[members] - 1, exits, rng), strict=True):
            depths[member] = np.minimum(drawn, r_max).astype(np.uint8).tobytes()
    prefix = np.full(requests, -1)
    if options.prefixes:
        weights = np.arange(1, options.prefixes + 1) ** -ZIPF
        prefix = rng.choice(options.prefixes, size=requests, p=weights / weights.sum())
        prompts = prompts + options.prefix_tokens
    homes = tuple(prefixes_of(_beginning(i, options.prefix_tokens).tobytes()) for i in range(options.prefixes))
    return Traffic(
        options,
        arrival_times(requests, options.rate, seed=options.seed),
        prompts,
        outputs,
        depths,
        prefix,
        outputs.mean() * means[chosen],
        r_max,
        homes,
    )
