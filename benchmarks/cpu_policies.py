"""``python -m depthbatch.benchmarks.cpu_policies``: ``auto`` against the fixed policies on the real CPU device.

One engine a policy (cb, no-refill, refill with K = 1 and K = W/4, auto), all alive, serve the same workload in turns; the
order rotates with every round, so that what else the machine does meets all alike. Ouro shape of ``cpu_engine``, dummy
weights, replayed depths. What is reported is the median over rounds of tokens/s, and of auto against the fixed policy with
the best median, round by round. A round in which nothing is learned any more: the first is thrown away.
"""

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from depthbatch.benchmarks.cpu_engine import SHAPE, make_workload
from depthbatch.benchmarks.throughput import PolicyChoice
from depthbatch.common.config import EngineConfig

AUTO = "auto"


def main() -> int:
    """Prints rounds and a table to stderr and one JSON object to stdout (or --output)."""
    parser = argparse.ArgumentParser(prog="python -m depthbatch.benchmarks.cpu_policies", description=__doc__)
    parser.add_argument("--w", type=int, default=16, help="W: most active sequences")
    parser.add_argument("--requests-per-slot", type=int, default=2)
    parser.add_argument(
        "--threads", type=int, default=1, help="of each worker; one leaves a core to scheduler and frontend"
    )
    parser.add_argument("--async-scheduling", default="lookahead")
    parser.add_argument("--seconds", type=float, default=240.0, help="no round begins after so many, start included")
    parser.add_argument("--output")
    args = parser.parse_args()
    start_s = time.monotonic()
    choices = ["cb", "no-refill", "refill:1", f"refill:{max(1, args.w // 4)}", AUTO]
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        Path(directory, "config.json").write_text(json.dumps(SHAPE.config()))
        engines = {choice: _Engine(choice, directory, args, stack) for choice in choices}
        while len(rounds) < 2 or time.monotonic() - start_s < args.seconds:
            turn = len(rounds) % len(choices)
            if not rounds:
                print(f"engines are up after {time.monotonic() - start_s:.0f} s", file=sys.stderr, flush=True)
            rounds.append({choice: engines[choice].tokens_per_s() for choice in choices[turn:] + choices[:turn]})
            print(len(rounds), {c: round(rounds[-1][c], 1) for c in choices}, file=sys.stderr, flush=True)
    result = summary(rounds[1:]) | {"w": args.w, "threads": args.threads, "async_scheduling": args.async_scheduling}
    text = json.dumps(result, indent=1)
    if args.output:
        Path(args.output).write_text(text + "\n")
    print(text)
    return 0


class _Engine:
    """A policy's engine and its workload."""

    def __init__(self, choice: str, directory: str, args: argparse.Namespace, stack: ExitStack) -> None:
        from depthbatch.frontend.llm import LLM

        policy = PolicyChoice.parse(choice)
        workload = make_workload(args.requests_per_slot * args.w)
        config = EngineConfig(
            model=directory,
            load_format="dummy",
            device="cpu",
            dtype="bfloat16",
            policy=policy.policy,
            min_coda_batch=policy.k,
            max_num_seqs=args.w,
            max_model_len=workload.longest,
            kv_blocks=args.w * workload.longest,  # five engines share the memory; a block holds at least one token
            threads=args.threads,
            async_scheduling=args.async_scheduling,
        )
        self._llm = stack.enter_context(LLM.from_config(config, quiet=True))
        vocabulary = self._llm.info.vocab_size
        self._prompts = [r.prompt(index, vocabulary).tolist() for index, r in enumerate(workload.requests)]
        self._params = [request.sampling() for request in workload.requests]
        self._tokens = sum(request.output_tokens for request in workload.requests)

    def tokens_per_s(self) -> float:
        """Serves the workload once."""
        start_s = time.perf_counter()
        self._llm.generate(self._prompts, self._params)
        return self._tokens / (time.perf_counter() - start_s)


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over rounds, and auto round by round against the fixed policy whose median is best."""
    names = list(rounds[0])
    medians = {name: float(np.median([r[name] for r in rounds])) for name in sorted(names)}
    best = max((name for name in names if name != AUTO), key=lambda name: medians[name])
    ratios = np.array([r[AUTO] / r[best] for r in rounds])
    quartiles = np.percentile(ratios, (25, 50, 75))
    return {
        "rounds": len(rounds),
        "median_tokens_per_s": {name: round(value, 1) for name, value in medians.items()},
        "relative_to_cb": {name: round(float(np.median([r[name] / r["cb"] for r in rounds])), 4) for name in medians},
        "best_fixed": best,
        "auto_vs_best_quartiles": [round(float(q), 4) for q in quartiles],
    }


if __name__ == "__main__":
    sys.exit(main())
