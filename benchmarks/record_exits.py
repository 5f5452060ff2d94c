"""``depthbatch record-exits MODEL WORKLOAD``: runs a workload once and writes the depth of every decode token into it.

The recorded file is then replayed by the other benchmarks (gate ``replay``), as the paper does: every policy runs the
same exits. Prompts given as counts are filled with made-up ids, which say little about a model's real exits; give ids.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
from tqdm import tqdm

from depthbatch.benchmarks.workload import Workload
from depthbatch.common.config import FIELD_NAMES, add_config_arguments, config_from_sources
from depthbatch.common.errors import ConfigError


def add_record_exits_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, workload file, gate."""
    parser.add_argument("model", metavar="MODEL", help="directory, repo id or 'demo'")
    parser.add_argument("workload", metavar="WORKLOAD.json", help="read, and written back with exit_depths")
    parser.add_argument("--output", metavar="FILE.json", default=None, help="write here instead")
    add_config_arguments(parser, [name for name in FIELD_NAMES if name != "model"])


def run_record_exits(args: argparse.Namespace) -> int:
    """Runs every request to its output length with the engine's gate and threshold."""
    from depthbatch.frontend.llm import LLM
    from depthbatch.frontend.params import SamplingParams

    workload = Workload.read(args.workload)
    config = config_from_sources(args, model=args.model)
    if config.policy == "cb":
        raise ConfigError("policy cb runs every token at full depth: there are no exits to record")
    if config.gate == "none":
        raise ConfigError("gate none lets no token exit early; give another --gate")
    if config.max_model_len is None:
        config = msgspec.structs.replace(config, max_model_len=workload.longest)
    with LLM.from_config(config) as llm:
        if not llm.info.default_gate.may_exit_early:
            raise ConfigError(f"gate {llm.info.default_gate.label} lets no token exit early; give --gate")
        prompts = [r.prompt(index, llm.info.vocab_size).tolist() for index, r in enumerate(workload.requests)]
        params = [
            SamplingParams(max_tokens=r.output_tokens, min_tokens=r.output_tokens, temperature=0.0, ignore_eos=True)
            for r in workload.requests
        ]
        with tqdm(total=len(prompts), unit="req", file=sys.stderr, mininterval=1.0) as bar:
            outputs = llm.generate(prompts, params, lambda finished, _: bar.update(finished - bar.n) and None)
    recorded = Workload(
        tuple(
            replace(request, exit_depths=tuple(output.exit_depths[1:]))
            for request, output in zip(workload.requests, outputs, strict=True)
        )
    )
    recorded.write(args.output or args.workload)
    depths = [depth for request in recorded.requests for depth in request.exit_depths or ()]
    mean = sum(depths) / max(1, len(depths))
    print(
        f"{len(depths)} tokens, mean depth {mean:.2f}, written to {Path(args.output or args.workload)}", file=sys.stderr
    )
    return 0
