"""``bench cpu tokens``: what a decoded token costs on the CPU at full depth, stage by stage, against what the machine can do.

A worker's own stages with dummy weights, bf16 and int8 in turns, every row at the same context with K and V of its own. A
token is a prelude, every loop of the core and a coda; its bound is that of core and head: bytes over the measured read
bandwidth or operations over the measured multiply rate, whichever is larger, a core step and a head at a time. Parts of a
core step (attention, the four products) are timed alone over all layers; the rest is norms, sums and the way to the kernels.
Each stage is timed beside itself operator by operator.
On one thread the clock is that thread's processor time, which other processes do not lengthen.
``prefill`` rows: one loop of a prompt of so many tokens, and the share of the multiply rate it reaches.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from depthbatch.benchmarks.cpu_step import (
    SHAPES,
    Machine,
    Run,
    in_turns,
    kernels_in_use,
    measure_machine,
    products_of,
    steadiest_clock,
)
from depthbatch.benchmarks.plain_loop import Shape
from depthbatch.common.arguments import positive, seconds
from depthbatch.common.config import EngineConfig
from depthbatch.common.frames import ROW_AUX, ROW_FIELDS, ROW_LANE, ROW_POSITION, ROW_SLOT, Stage
from depthbatch.common.messages import StageBatch
from depthbatch.worker.attention.backend import DecodeRows, PrefillRows
from depthbatch.worker.attention.cpu import CpuAttention
from depthbatch.worker.build import build_runner
from depthbatch.worker.layers.rotary import Rotation
from depthbatch.worker.models.llama_like import StackedModel
from depthbatch.worker.runner.fused_stages import FusedStages
from depthbatch.worker.runner.plain import PlainRunner
from depthbatch.worker.runner.stages import PrefillAttention

OURO_1_4B = Shape(layers=24, hidden=2048, heads=16, intermediate=5632, vocab=49152, loops=4)
TOKEN_SHAPES = {"12x512": SHAPES["12x512"], "24x2048": OURO_1_4B}
BLOCK = 16
KINDS = {"bf16": None, "int8": "int8"}
WEIGHT_BYTES = {"bf16": 2, "int8": 1}  # of a layer; the head stays bf16
Timed = Callable[[Mapping[Any, Run]], dict[Any, float]]


def add_tokens_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured."""
    parser.add_argument("--shape", choices=TOKEN_SHAPES, default="12x512", help="24x2048: Ouro-1.4B's widths")
    parser.add_argument("--layers", type=positive, help="only so many, where memory is short")
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=positive, default=64, help="tokens of every row")
    parser.add_argument("--prefill", type=positive, nargs="*", default=[], metavar="TOKENS")
    parser.add_argument("--seconds", type=seconds, default=1.0, help="time for each figure, over turns")


class Worker:
    """A worker's runner with its model, and the frames of its decode stages."""

    def __init__(self, kind: str, shape: Shape, rows: int, context: int, longest: int, threads: int | None) -> None:
        self.shape, self.kind, self.context = shape, kind, context
        self.blocks = context // BLOCK + 1
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "config.json").write_text(json.dumps(shape.config()))
            config = EngineConfig(
                model=directory,
                load_format="dummy",
                device="cpu",
                max_num_seqs=rows,
                threads=threads,
                quantization=KINDS[kind],
                block_size=BLOCK,
                max_model_len=max(longest, context + BLOCK),
                kv_blocks=max(rows * self.blocks, longest // BLOCK + 1) + 1,
                prefix_caching="off",
            )
            runner = build_runner(config).runner
        assert isinstance(runner, PlainRunner)
        backend, model = runner.stages.backend, runner.stages.model
        assert isinstance(backend, CpuAttention) and isinstance(model, StackedModel)
        for cache in (*backend.k_cache, *backend.v_cache):
            cache.fill_(0.01)  # memory that was never written is one page, which is always in the cache
        table = torch.arange(1, rows * self.blocks + 1, dtype=torch.int32).view(rows, self.blocks)
        runner.stages.slots.block_table[1 : rows + 1, : self.blocks] = table
        self.runner, self.backend, self.weights, self.table = (
            runner,
            backend,
            model.weights,
            runner.stages.slots.block_table,
        )

    def stage(self, stage: Stage, rows: int) -> Run:
        """Runs one of the decode stages on so many rows, at the last loop."""
        frame = np.zeros((ROW_FIELDS, rows), np.int32)
        frame[ROW_SLOT] = frame[ROW_LANE] = np.arange(1, rows + 1)
        frame[ROW_POSITION] = self.context - 1
        last = self.table[1 : rows + 1, (self.context - 1) // BLOCK].numpy()
        frame[ROW_AUX] = last if stage is Stage.PRELUDE else self.shape.loops
        header, values = StageBatch(1, stage, rows, rows), frame.reshape(-1)
        return lambda: self.runner.read(self.runner.launch(header, values))

    def by_operators(self, stage: Stage, rows: int) -> Run:
        """The same without a C call for the whole of it (worker/runner/fused_stages.py)."""
        run, stages = self.stage(stage, rows), self.runner.stages

        def plain() -> None:
            calls, stages.fused = stages.fused, FusedStages()
            run()
            stages.fused = calls

        return plain

    def parts(self, rows: int) -> dict[str, Run]:
        """The products of all layers, and their attention, alone."""
        stack, backend, shape = self.weights.core, self.backend, self.shape
        slots = torch.arange(1, rows + 1, dtype=torch.int32)
        last_loop = torch.full_like(slots, shape.loops - 1)
        decode_rows = DecodeRows(slots, torch.full_like(slots, self.context - 1), last_loop, self.table)
        rotation = Rotation(False, *torch.randn(2, rows, shape.head_dim // 2))
        qkv, x = torch.randn(rows, 3 * shape.hidden).bfloat16(), torch.randn(rows, shape.hidden).bfloat16()
        inner = torch.randn(rows, shape.intermediate).bfloat16()

        def attention() -> None:
            for layer in range(shape.layers):
                backend.decode_qkv(layer, qkv, rotation, decode_rows)

        def products() -> None:
            for block in stack.blocks:
                block.qkv(x), block.out(x), block.gate_up(x), block.down(inner)

        return {"attention": attention, "products": products, "head": lambda: self.weights.head(x)}

    def prefill(self, tokens: int) -> Run:
        """One loop of a prompt."""
        shape = self.shape
        blocks = tokens // BLOCK + 1
        table = torch.zeros(2, blocks, dtype=torch.int32)
        table[1] = 1 + torch.arange(blocks)
        positions = torch.arange(tokens, dtype=torch.int32)
        one = torch.ones(1, dtype=torch.int32)
        rows = PrefillRows(
            slots=one,
            starts=0 * one,
            lengths=tokens * one,
            cu_lengths=torch.tensor([0, tokens], dtype=torch.int32),
            token_slots=torch.ones_like(positions),
            positions=positions,
            plane=0,
            block_tables=table,
            starts_host=(0,),
            lengths_host=(tokens,),
        )
        x, rotation = (
            torch.randn(tokens, shape.hidden).bfloat16(),
            Rotation(False, *torch.randn(2, tokens, shape.head_dim // 2)),
        )
        stack, attend = self.weights.core, PrefillAttention(self.backend, rows)
        return lambda: stack(x, rotation, attend)


def layer_weights(shape: Shape) -> int:
    """Numbers in the products of all layers."""
    return shape.layers * sum(rows * columns for rows, columns in products_of(shape).values())


def token_bound_us(machine: Machine, kind: str, shape: Shape, rows: int, context: int) -> dict[str, float]:
    """The least time of a core step and of a head."""
    weights, kv = layer_weights(shape), shape.layers * rows * context * shape.hidden
    multiplied = 2.0 * weights * rows
    core = machine.bound_us(
        WEIGHT_BYTES[kind] * weights + 4 * kv,
        4 * kv + (multiplied if kind == "bf16" else 0),
        0 if kind == "bf16" else multiplied,
    )
    head = shape.vocab * shape.hidden
    return {"core": core, "head": machine.bound_us(2 * head, 2 * head * rows)}


def run_tokens(args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one shape. Raises ConfigError without kernels."""
    torch.set_num_threads(args.threads or torch.get_num_threads())
    clock = steadiest_clock()
    machine = measure_machine(kernels_in_use(), args.seconds, clock)
    shape = TOKEN_SHAPES[args.shape]
    shape = shape._replace(layers=args.layers or shape.layers)
    longest = max([args.context + 1, *args.prefill])
    result: dict[str, Any] = {"threads": torch.get_num_threads(), "shape": shape._asdict(), "context": args.context}

    def timed(runs: Mapping[Any, Run]) -> dict[Any, float]:
        return in_turns(runs, args.seconds, clock=clock)

    with torch.inference_mode():
        workers = {
            kind: Worker(kind, shape, max(args.batches), args.context, longest, torch.get_num_threads())
            for kind in KINDS
        }
        rows = [
            _report(row) for batch in args.batches for row in _token_rows(workers, machine, batch, args.context, timed)
        ]
        prefills = [_report(row) for tokens in args.prefill for row in _prefill_rows(workers, machine, tokens, timed)]
    return result | machine._asdict() | {"rows": rows, "prefill": prefills}


def _report(row: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def _token_rows(
    workers: dict[str, Worker], machine: Machine, batch: int, context: int, timed: Timed
) -> list[dict[str, Any]]:
    runs: dict[tuple[str, str], Run] = {}
    for kind, worker in workers.items():
        for stage in (Stage.PRELUDE, Stage.CORE, Stage.CODA):
            runs[kind, stage.label] = worker.stage(stage, batch)
            runs[kind, f"{stage.label} by operators"] = worker.by_operators(stage, batch)
        runs |= {(kind, name): run for name, run in worker.parts(batch).items()}
    times = timed(runs)
    rows: list[dict[str, Any]] = []
    for kind, worker in workers.items():
        us = {name: time for (of, name), time in times.items() if of == kind}
        loops = worker.shape.loops
        token_us = us["prelude"] + loops * us["core"] + us["coda"]
        bound = token_bound_us(machine, kind, worker.shape, batch, context)
        bound_us = loops * bound["core"] + bound["head"]
        rows.append(
            {
                "kind": kind,
                "batch": batch,
                "tokens_per_s": 1e6 * batch / token_us,
                "bound_tokens_per_s": 1e6 * batch / bound_us,
                "of_bound": token_us / bound_us,
                "us": us,
                "of_operators": {name: us[name] / us[f"{name} by operators"] for name in ("prelude", "core", "coda")},
                "share": {
                    "products": loops * us["products"] / token_us,
                    "attention": loops * us["attention"] / token_us,
                    "rest of core": loops * (us["core"] - us["products"] - us["attention"]) / token_us,
                    "head": us["head"] / token_us,
                    "rest of coda": (us["coda"] - us["head"]) / token_us,
                    "prelude": us["prelude"] / token_us,
                },
            }
        )
    for row in rows:
        row["relative_to_bf16"] = row["tokens_per_s"] / rows[0]["tokens_per_s"]
    return rows


def _prefill_rows(workers: dict[str, Worker], machine: Machine, tokens: int, timed: Timed) -> list[dict[str, Any]]:
    times = timed({kind: worker.prefill(tokens) for kind, worker in workers.items()})
    rows: list[dict[str, Any]] = []
    for kind, worker in workers.items():
        shape = worker.shape
        operations = 2 * layer_weights(shape) * tokens + 2 * shape.layers * tokens * (tokens + 1) * shape.hidden
        rate = operations / times[kind] * 1e6
        rows.append(
            {"kind": kind, "tokens": tokens, "us": times[kind], "of_bf16_rate": rate / machine.operations_per_s}
        )
    return rows
