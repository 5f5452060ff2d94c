"""``depthbatch bench serve``: load with Poisson or Gamma arrivals on a running server, ours or any OpenAI-compatible one.

``--url http://HOST:PORT`` speaks ``/v1/completions`` with streaming and token-id prompts; ``--url ipc://.../api`` (or
tcp://) speaks our native API, which can also replay recorded exit depths. Keys and definitions are those
of ``vllm bench serve``. TTFT: from sending to the first token. ITL: between successive pieces of the stream. E2EL: from
sending to the last piece. TPOT: (E2EL - TTFT) / (output tokens - 1), of requests with more than one. Goodput: requests a
second that meet every target given. Beside those, the paper's ``normalized_latency_s``: the mean of E2EL / output tokens.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import zmq
from tqdm import tqdm

from depthbatch.benchmarks.clients import Client, Endpoint, NativeClient, OpenAIClient, ServerError
from depthbatch.benchmarks.record import add_output_argument, write_json
from depthbatch.benchmarks.sources import add_workload_arguments, workload_from_arguments
from depthbatch.benchmarks.synthetic import arrival_times
from depthbatch.benchmarks.workload import Workload, WorkloadRequest
from depthbatch.common.arguments import loops, positive, seed
from depthbatch.common.errors import ConfigError

GOODPUT_METRICS = ("ttft", "tpot", "e2el")
_CONNECT_ERRORS = (OSError, ServerError, asyncio.IncompleteReadError, json.JSONDecodeError)


# --- figures


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
        if name not in GOODPUT_METRICS or not milliseconds >= 0:
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


# --- the command


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Server, workload, arrivals, targets."""
    parser.add_argument("--url", required=True, help="http(s)://HOST:PORT, or ipc://.../api for the native API")
    parser.add_argument("--model", default=None, help="model name to ask for (default: the first the server lists)")
    parser.add_argument("--api-key", default=None)
    add_workload_arguments(parser, requests=200)
    parser.add_argument("--r-max", type=loops, default=4, help="loops of a full-depth token, for replayed exits")
    parser.add_argument("--vocab-size", type=positive, default=256, help="prompt ids are drawn below this")
    parser.add_argument(
        "--request-rate", type=float, default=float("inf"), help="requests a second (default: all at once)"
    )
    parser.add_argument("--burstiness", type=float, default=1.0, help="Gamma shape of the intervals; 1 = Poisson")
    parser.add_argument("--max-concurrency", type=positive, default=None, help="most requests at a time")
    parser.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="targets, e.g. ttft:500 tpot:50")
    parser.add_argument("--percentiles", type=percentile, nargs="+", default=[99.0])
    parser.add_argument("--extra-body", type=json_object, default={}, help="JSON map of further request fields (http)")
    parser.add_argument("--seed", type=seed, default=0)
    add_output_argument(parser)


def percentile(text: str) -> float:
    """0 to 100, for argparse."""
    value = float(text)
    if not 0.0 <= value <= 100.0:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 100")
    return value


def json_object(text: str) -> dict[str, Any]:
    """A JSON map, for argparse."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON map")
    return value


def run_serve(args: argparse.Namespace) -> int:
    """Runs the load; exit code 1 when no request succeeded."""
    targets = parse_goodput(args.goodput)
    if args.url.startswith("http") and args.exits is not None:
        raise ConfigError("--exits needs the native API: no request over HTTP says how deep its tokens go")
    if not args.url.startswith("http") and (args.api_key is not None or args.extra_body):
        raise ConfigError("--api-key and --extra-body need an http or https --url")
    workload = workload_from_arguments(args, args.r_max, args.seed)
    arrivals = arrival_times(len(workload.requests), args.request_rate, args.burstiness, args.seed)
    figures = asyncio.run(_run(args, workload, arrivals.tolist()))
    requests, duration_s, model = figures
    result = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": "openai" if args.url.startswith("http") else "depthbatch",
        "model_id": model,
        "num_prompts": len(requests),
        "request_rate": args.request_rate if np.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    } | summarise(requests, duration_s, targets, args.percentiles)
    write_json(result, args.output)
    _print_summary(result)
    errors = {request.error for request in requests if request.error is not None}
    for error in sorted(errors)[:3]:
        print(f"failed: {error}", file=sys.stderr)
    return 0 if result["completed"] else 1


async def _run(
    args: argparse.Namespace, workload: Workload, arrivals: Sequence[float]
) -> tuple[list[RequestTimes], float, str]:
    """Times of every request, seconds from the first sending to the last token, and the model's name."""
    client: Client
    if args.url.startswith("http"):
        endpoint = Endpoint(args.url, args.api_key)
        model = args.model or await _first_model(endpoint)
        client = OpenAIClient(endpoint, model, args.extra_body)
    else:
        model = args.model or "native"
        client = await _native(args.url)
    try:
        start_s = time.perf_counter()
        requests = await send_all(client, workload, arrivals, args.max_concurrency, args.vocab_size)
        duration_s = time.perf_counter() - start_s
    finally:
        await client.close()
    return requests, duration_s, model


async def _native(url: str) -> NativeClient:
    client = NativeClient(url)
    try:
        await client.wait_for_server()
    except ServerError as error:
        await client.close()
        raise ConfigError(f"{url}: {error}") from None
    return client


async def _first_model(endpoint: Endpoint) -> str:
    try:
        return str((await endpoint.get_json("/v1/models"))["data"][0]["id"])
    except (*_CONNECT_ERRORS, KeyError, IndexError) as error:
        raise ConfigError(f"url: no model list from {endpoint.host}:{endpoint.port} ({error})") from None


async def send_all(
    client: Client,
    workload: Workload,
    arrivals: Sequence[float],
    max_concurrency: int | None,
    vocab_size: int,
    quiet: bool = False,
) -> list[RequestTimes]:
    """Sends every request at its time, whether or not earlier ones have been answered (an open loop), except as
    ``max_concurrency`` holds it back. ``quiet``: without a bar."""
    limit = asyncio.Semaphore(max_concurrency or len(workload.requests))
    start_s = time.perf_counter()
    with tqdm(total=len(workload.requests), unit="req", file=sys.stderr, mininterval=1.0, disable=quiet) as bar:

        async def send(index: int, request: WorkloadRequest) -> RequestTimes:
            prompt = request.prompt(index, vocab_size).tolist()
            await asyncio.sleep(max(0.0, start_s + arrivals[index] - time.perf_counter()))
            async with limit:
                times = await _follow(client, request, prompt)
            bar.update()
            return times

        return list(await asyncio.gather(*(send(i, request) for i, request in enumerate(workload.requests))))


async def _follow(client: Client, request: WorkloadRequest, prompt: list[int]) -> RequestTimes:
    times = RequestTimes(len(prompt), time.perf_counter())
    try:
        async for piece in client.stream(request, prompt):
            if piece.total is not None:
                times.output_tokens = piece.total
            else:
                times.piece_s.append(time.perf_counter())
                times.output_tokens += piece.tokens
    except _CONNECT_ERRORS as error:
        times.error = f"{type(error).__name__}: {error}"
    except zmq.ZMQError as error:
        times.error = f"ZMQError: {error}"
    if times.error is None and not times.output_tokens:
        times.output_tokens = len(times.piece_s)  # no usage: a piece is a token
    return times


def _print_summary(result: dict[str, Any]) -> None:
    for name in ("completed", "failed", "request_throughput", "output_throughput", "request_goodput"):
        if result[name] is not None:
            print(f"{name:<26}{result[name]:>12.2f}", file=sys.stderr)
    for name in ("ttft", "tpot", "itl", "e2el"):
        mean, median = result[f"mean_{name}_ms"], result[f"median_{name}_ms"]
        print(f"{name + ' mean, median (ms)':<26}{mean:>12.1f}{median:>12.1f}", file=sys.stderr)
    print(f"{'normalized latency (s)':<26}{result['normalized_latency_s']:>12.4f}", file=sys.stderr)
