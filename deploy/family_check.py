"""Holds a model family to a plain forward pass of its own, as far as the engine runs it on the CPU: ``check_family``.

For who adds a family, in the tree or as a package beside it (docs/adding-a-model.md): logits of whole prompts after every
loop, then greedy tokens of the whole engine with prompts in chunks and rows at several loops in one batch, on the default
attention backend and on ``sdpa``.
"""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ModelError
from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import RequestParams, StageResult, Submit
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.worker.attention.backend import PrefillRows
from depthbatch.worker.build import BuiltRunner, assemble
from depthbatch.worker.models.checkpoint import DummySource, read_json
from depthbatch.worker.models.config_reader import ConfigReader
from depthbatch.worker.models.interface import LoopedModel
from depthbatch.worker.models.loader import load_model
from depthbatch.worker.models.registry import find_family
from depthbatch.worker.runner.stages import PrefillAttention

BACKENDS = (None, "sdpa")  # None: the fastest there is
PROMPT_LENGTHS = (1, 5, 17, 33, 64)
CHUNK_TOKENS = 13  # of a prefill step, so that prompts are cut
BLOCK_SIZE = 16
STAGES_APART = 7  # of prompts

Reference = Callable[[Sequence[int], int], torch.Tensor]
"""(token ids of one sequence, loops) -> fp32 logits [N, V] of all its positions, every token run ``loops`` times."""


class Agreement(NamedTuple):
    """What was compared."""

    largest_difference: float  # of any logit, as a part of the largest
    tokens: int  # greedy tokens that are the reference's
    near_ties: int  # of these, those that are its second choice by less than the tolerance
    layouts: tuple[KVLayout, ...]
    """Under which tokens were compared; none: no layout of the model keeps every loop."""


def check_family(directory: str | Path, reference: Reference, outputs: int = 16, tolerance: float = 3e-4) -> Agreement:
    """Runs the model in ``directory`` in fp32 and raises ModelError at the first place where it is not the reference.

    Args:
        directory: config.json and weights; ``random_weights`` makes some for a config.
        reference: the forward pass, written without the engine.
        outputs: greedy tokens a prompt.
        tolerance: of logits, as a part of the largest one; two logits that are closer are a tie.

    Tokens are compared under the layouts that keep the K/V of every loop: in the others a decoded token sees later loops of
    earlier tokens, which a forward pass of a whole sequence does not have.
    """
    model = load_model(str(directory), dtype="float32")
    spec, ids = model.spec, np.random.default_rng(0)
    longest = spec.max_positions - outputs
    prompts = [ids.integers(0, spec.vocab_size, min(n, longest)).tolist() for n in PROMPT_LENGTHS]
    layouts = tuple(layout for layout in spec.layouts if layout.keeps_every_loop(spec.r_max))
    largest, tokens, ties = 0.0, 0, 0
    reference = _remembered(reference)
    for backend in BACKENDS:
        for layout in spec.layouts:
            config = EngineConfig.from_values(
                {
                    "model": str(directory),
                    "dtype": "float32",
                    "device": "cpu",
                    "kv_layout": str(layout),
                    "kv_blocks": 1 + len(prompts) * -(-(max(PROMPT_LENGTHS) + outputs) // BLOCK_SIZE),
                    "block_size": BLOCK_SIZE,
                    "max_num_seqs": len(prompts),
                    "max_num_batched_tokens": CHUNK_TOKENS,
                    "policy": "refill",  # rows at several loops share a batch
                }
            )
            built = assemble(config, model, torch.device("cpu"), backend)
            where = f"{spec.architecture}, attention backend {backend or 'default'}, kv_layout {layout}"
            largest = max(largest, _check_logits(model, built, layout, prompts, reference, tolerance, where))
            if layout in layouts:
                built = assemble(config, model, torch.device("cpu"), backend)
                found = _check_tokens(
                    config, built, prompts, spec.coda_layers == 0, reference, outputs, tolerance, where
                )
                tokens, ties = tokens + found[0], ties + found[1]
    return Agreement(largest, tokens, ties, layouts)


def _remembered(reference: Reference) -> Reference:
    """Asked once for the same."""
    known: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}

    def remembered(ids: Sequence[int], loops: int) -> torch.Tensor:
        key = tuple(ids), loops
        if key not in known:
            known[key] = reference(ids, loops).detach().float()
        return known[key]

    return remembered


def _check_logits(
    model: LoopedModel,
    built: BuiltRunner,
    layout: KVLayout,
    prompts: Sequence[Sequence[int]],
    reference: Reference,
    tolerance: float,
    where: str,
) -> float:
    """All prompts packed, each loop's logits; the largest difference."""
    stages, lengths = built.runner.stages, [len(prompt) for prompt in prompts]
    table = stages.slots.block_table
    for slot in range(1, len(prompts) + 1):
        blocks = -(-lengths[slot - 1] // BLOCK_SIZE)
        first = 1 + sum(-(-n // BLOCK_SIZE) for n in lengths[: slot - 1])
        table[slot, :blocks] = torch.arange(first, first + blocks)
    slots = torch.arange(1, len(prompts) + 1, dtype=torch.int32)
    counts = torch.tensor(lengths, dtype=torch.int32)
    ends = counts.cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])
    token_slots = slots.repeat_interleave(counts)
    starts = torch.zeros_like(slots)
    cumulated = torch.cat((starts[:1], ends))
    rows = PrefillRows(
        slots, starts, counts, cumulated, token_slots, positions, 0, table, (0,) * len(prompts), tuple(lengths)
    )
    token_ids = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32)
    largest = 0.0
    with torch.inference_mode():
        seeds = torch.zeros_like(positions)
        item = model.prelude(token_ids, positions, seeds, PrefillAttention(stages.backend, rows))
        for loop in range(1, model.spec.r_max + 1):
            attend = PrefillAttention(stages.backend, rows._replace(plane=layout.plane(loop)))
            item = model.core(item, positions, torch.full_like(positions, loop), attend)
            logits = model.logits(model.coda(item, positions, PrefillAttention(stages.backend, rows)))
            for index, (prompt, of_prompt) in enumerate(zip(prompts, torch.split(logits, lengths), strict=True)):
                wanted = reference(prompt, loop)
                if wanted.shape != of_prompt.shape:
                    raise ModelError(f"the reference gives {list(wanted.shape)} logits, not {list(of_prompt.shape)}")
                difference = ((of_prompt - wanted).abs().max() / wanted.abs().max()).item()
                if not difference <= tolerance:
                    raise ModelError(
                        f"{where}: logits after loop {loop} of a prompt of {len(prompt)} tokens (number {index})"
                        f" differ from the reference's by {difference:.2g} of the largest"
                    )
                largest = max(largest, difference)
    return largest


def _check_tokens(
    config: EngineConfig,
    built: BuiltRunner,
    prompts: Sequence[Sequence[int]],
    shallow: bool,
    reference: Reference,
    outputs: int,
    tolerance: float,
    where: str,
) -> tuple[int, int]:
    """Every prompt at another depth, from its second token on: the first comes of a prefill of all loops. In a model with a
    coda all are at full depth, since the coda's K/V are those of the depth its token had. Tokens, near ties."""
    r_max = built.info.r_max
    depths = [r_max - index % r_max if shallow else r_max for index in range(len(prompts))]
    requests = [
        RequestParams(max_tokens=outputs, gate=Gate.FIXED, min_loops=depth, max_loops=depth) for depth in depths
    ]
    ties = 0
    for prompt, depth, given in zip(prompts, depths, _generate(config, built, prompts, requests), strict=True):
        sequence = [*prompt, *given[:-1]]
        logits = reference(sequence, depth)[len(prompt) - 1 :].clone()
        logits[0] = reference(prompt, r_max)[-1]
        for index, (token, row) in enumerate(zip(given, logits, strict=True)):
            behind = (row.max() - row[token]).item()
            if not behind <= tolerance * row.abs().max().item():
                raise ModelError(
                    f"{where}: output token {index + 1} at depth {r_max if index == 0 else depth} after a prompt of"
                    f" {len(prompt)} is {token}, the reference's is {int(row.argmax())}"
                )
            ties += token != int(row.argmax())
    return outputs * len(prompts), ties


def _generate(
    config: EngineConfig, built: BuiltRunner, prompts: Sequence[Sequence[int]], requests: Sequence[RequestParams]
) -> list[list[int]]:
    """The whole engine in this process: what the scheduler asks for is run, and its results are told as late as they can be.
    Prompts come one after the other, so that tokens start while others are in the loop."""
    scheduler, runner = Scheduler(SchedulerConfig.resolve(config, built.info)), built.runner
    todo = deque(
        Submit(index, np.asarray(prompt, np.int32).tobytes(), params)
        for index, (prompt, params) in enumerate(zip(prompts, requests, strict=True))
    )
    tokens: list[list[int]] = [[] for _ in prompts]
    late: deque[StageResult] = deque()
    now = 0.0
    while scheduler.num_unfinished or late or todo:
        now += 1.0
        if todo and now % STAGES_APART == 1 and (rejected := scheduler.submit(todo.popleft())):
            raise ModelError(f"the engine refuses a prompt: {rejected}")
        if (stage := scheduler.next_stage(now)) is not None:
            late.append(runner.read(runner.launch(stage.header, stage.frame, stage.slot_params)))
            continue
        if not late:
            continue
        for event in scheduler.complete(late.popleft(), now):
            tokens[event.request_id] += event.token_ids
    return tokens


def random_weights(directory: str | Path, seed: int = 0) -> Path:
    """Writes model.safetensors beside the config.json in ``directory``: made-up weights of the shapes that its family declares.

    Vectors differ from 1 and 0, so that a norm or a bias that is left out shows. Raises ModelError, also where there are
    weights already.
    """
    path = Path(directory)
    if present := sorted(path.glob("*.safetensors")):
        raise ModelError(f"{present[0]} is there already")
    config = ConfigReader(read_json(path / "config.json"), str(path / "config.json"))
    save_file(random_tensors(config, seed), path / "model.safetensors")
    return path


def random_tensors(config: ConfigReader, seed: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of ``random_weights``, fp32 by name."""
    table = find_family(config).tensors(config)
    source = DummySource(table, torch.float32, torch.device("cpu"), seed)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: source.take(name) for name in table.required}
    return {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator) if tensor.dim() == 1 else tensor
        for name, tensor in tensors.items()
    }
