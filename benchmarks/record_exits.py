"""``depthbatch record-exits MODEL WORKLOAD``: runs a workload once and writes the depth of every decode token into it.

The recorded file is then replayed by the other benchmarks (gate ``replay``), as the paper does: every policy runs the
same exits. Prompts given as counts are filled with made-up ids, which say little about a model's real exits; give ids.

``--drafts`` also finds out from which loop on each token is known (``known_depths``): the workload runs once more for each
draft depth, every token is read for a draft there, and the engine says which were right.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from tqdm import tqdm

from depthbatch.benchmarks.workload import Workload
from depthbatch.common.arguments import output_file
from depthbatch.common.config import (
    FIELD_NAMES,
    MAX_DRAFT_LANES,
    EngineConfig,
    add_config_arguments,
    config_from_sources,
)
from depthbatch.common.errors import ConfigError
from depthbatch.common.kv_layout import KVLayout

if TYPE_CHECKING:
    from depthbatch.frontend.llm import LLM


def add_record_exits_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, workload file, gate."""
    parser.add_argument("model", metavar="MODEL", help="directory, repo id or 'demo'")
    parser.add_argument("workload", metavar="WORKLOAD.json", help="read, and written back with exit_depths")
    parser.add_argument("--output", type=output_file, metavar="FILE.json", default=None, help="write here instead")
    parser.add_argument("--drafts", action="store_true", help="also write known_depths: one run more a draft depth")
    add_config_arguments(parser, [name for name in FIELD_NAMES if name not in ("model", "speculation", "draft_depth")])


def run_record_exits(args: argparse.Namespace) -> int:
    """Runs every request to its output length with the engine's gate and threshold."""
    from depthbatch.frontend.llm import LLM

    workload = Workload.read(args.workload)
    config = config_from_sources(args, model=args.model)
    if config.policy == "cb":
        raise ConfigError("policy cb runs every token at full depth: there are no exits to record")
    if config.gate == "none":
        raise ConfigError("gate none lets no token exit early; give another --gate")
    if config.max_model_len is None:
        config = msgspec.structs.replace(config, max_model_len=workload.longest)
    with LLM.from_config(config) as llm:
        info = llm.info
        if not info.default_gate.may_exit_early:
            raise ConfigError(f"gate {info.default_gate.label} lets no token exit early; give --gate")
        if args.drafts and not KVLayout(info.kv_layout).keeps_every_loop(info.r_max):
            raise ConfigError(f"--drafts needs a KV layout with a plane a loop, not {info.kv_layout}")
        exits = [tuple(depth for depth, _ in tokens[1:]) for tokens in _run(llm, workload)]
    recorded = Workload(tuple(replace(r, exit_depths=own) for r, own in zip(workload.requests, exits, strict=True)))
    if args.drafts:
        known = _known_depths(config, workload, exits, info.r_max)
        recorded = Workload(tuple(replace(r, known_depths=k) for r, k in zip(recorded.requests, known, strict=True)))
    recorded.write(args.output or args.workload)
    depths = [depth for request in recorded.requests for depth in request.exit_depths or ()]
    mean = sum(depths) / max(1, len(depths))
    print(
        f"{len(depths)} tokens, mean depth {mean:.2f}, written to {Path(args.output or args.workload)}", file=sys.stderr
    )
    return 0


def _run(llm: "LLM", workload: Workload) -> list[list[tuple[int, bool | None]]]:
    """Of each request's tokens the loops, and whether the draft that stood for it was right, if there was one."""
    from depthbatch.frontend.params import SamplingParams

    prompts = [r.prompt(index, llm.info.vocab_size).tolist() for index, r in enumerate(workload.requests)]
    params = [
        SamplingParams(max_tokens=r.output_tokens, min_tokens=r.output_tokens, temperature=0.0, ignore_eos=True)
        for r in workload.requests
    ]
    tokens: list[list[tuple[int, bool | None]]] = [[] for _ in prompts]
    with tqdm(total=len(prompts), unit="req", file=sys.stderr, mininterval=1.0) as bar:
        for index, delta in llm.stream(prompts, params):
            right = None if not (delta.accepted_drafts or delta.rejected_drafts) else bool(delta.accepted_drafts)
            tokens[index] += [(depth, right) for depth in delta.exit_depths]
            bar.update(delta.finish_reason is not None)
    return tokens


def _known_depths(
    config: EngineConfig, workload: Workload, exits: Sequence[tuple[int, ...]], r_max: int
) -> list[tuple[int, ...]]:
    """For each decode token the fewest loops from which on drafts of it are right; at its exit they are. Depths at which a
    chain would be longer than the engine's are left out: some drafts would be read deeper."""
    from depthbatch.frontend.llm import LLM

    known = [list(depths) for depths in exits]
    settled = [[False] * len(depths) for depths in exits]
    for draft_depth in range(r_max - 1, -(-r_max // MAX_DRAFT_LANES) - 1, -1):
        drafts = {"policy": "refill", "speculation": MAX_DRAFT_LANES, "draft_depth": draft_depth}
        with LLM.from_config(msgspec.structs.replace(config, **drafts), quiet=True) as llm:
            runs = _run(llm, workload)
        for own, done, tokens in zip(known, settled, runs, strict=True):
            for number, (_, right) in enumerate(tokens[1:]):
                if right and not done[number]:
                    own[number] = min(own[number], draft_depth)
                done[number] = done[number] or right is False
    return [tuple(own) for own in known]
