"""Decode stages can be captured as they stand: static addresses, nothing that survives, nothing that waits for the host.

A CUDA graph replays fixed addresses, so a stage that rebinds a static tensor, keeps one it made, or asks the host for a
value would replay garbage. On the CPU the first two show as changed addresses or as leftover memory, the last one as
an operator that a dispatch mode sees.
"""

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.test_lockstep import engine
from torch.utils._python_dispatch import TorchDispatchMode

from depthbatch.common.frames import SLOT_PARAMS, Stage, lane_of, slot_param_words
from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import PLAIN, StageBatch, Variant
from depthbatch.worker.runner.plain import PlainRunner
from reference.oracle import HUGINN, OURO

HOST_READS = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.item.default", "aten.equal.default"}
BUCKET, ROWS = 4, 3
MODELS = [pytest.param(OURO, id="ouro"), pytest.param(HUGINN, id="huginn")]


class Operators(TorchDispatchMode):
    """Counts every operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def stages(position: int, lanes: int = 1) -> Iterator[tuple[StageBatch, np.ndarray]]:
    """One token of three rows that sit at different loops, with every variant on that the stage has here; with several
    lanes the second is read for a draft."""
    coda = Variant.SAMPLE | Variant.FILTER | Variant.LOGITS | Variant.FORBID | Variant.LOGPROBS
    variant = {Stage.PRELUDE: PLAIN, Stage.CORE: Variant.GATES, Stage.CODA: coda}
    drafted = 3 if lanes == 1 else -3
    for stage, aux in ((Stage.PRELUDE, (0, 3, 4)), (Stage.CORE, (1, 3, 2)), (Stage.CODA, (2, drafted, 1))):
        frame, slots = np.zeros((4, BUCKET), np.int32), np.array([1, 2, 4])
        frame[:, :ROWS] = slots, [position] * 3, aux, lane_of(slots, position, 5, lanes)
        yield StageBatch(position * 10 + stage, stage, BUCKET, ROWS, variant=variant[stage]), frame


def prepared(model: Path, layout: KVLayout, lanes: int = 1) -> PlainRunner:
    """A runner with three short sequences and with parameters that ask for every filter and gate."""
    runner = engine(model, layout, policy="refill", speculation="off" if lanes == 1 else lanes - 2).built.runner
    params = np.zeros(ROWS, SLOT_PARAMS)
    params["slot"], params["top_k"] = (1, 2, 4), 5
    params["gate"] = Gate.OWN, Gate.DELAYED, Gate.NONE
    params["temperature"], params["top_p"] = 0.8, 0.9
    params["exit_threshold"], params["repetition_penalty"] = 0.5, 1.2
    frame = np.array([1, 2, 4, 0, 0, 0, 2, 2, 2, 1, 1, 1, *range(6), 1, 0, 1, 2, 0, 2, 4, 0, 5], np.int32)
    runner.run(StageBatch(1, Stage.PREFILL, 0, ROWS, 6, 3, n_slot_params=ROWS), frame, slot_param_words(params))
    return runner


def live_tensors() -> Counter[tuple[int, ...]]:
    gc.collect()
    return Counter(tuple(thing.shape) for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))


@pytest.mark.parametrize(("layout", "lanes"), [*((layout, 1) for layout in KVLayout), (KVLayout.LAST_EXITED, 3)])
@pytest.mark.parametrize("model", MODELS)
def test_a_stage_keeps_its_addresses_and_leaves_nothing_behind(model: Path, layout: KVLayout, lanes: int) -> None:
    """Twice every stage: same static addresses, and not one more tensor alive. That stages did run is seen in the state."""
    runner = prepared(model, layout, lanes)
    for header, frame in stages(2, lanes):
        runner.run(header, frame)
    addresses = [tensor.data_ptr() for tensor in runner.static_tensors()]
    before, token = live_tensors(), runner.stages.slots.token.clone()
    for position in (3, 4):
        for header, frame in stages(position, lanes):
            runner.run(header, frame)
    assert [tensor.data_ptr() for tensor in runner.static_tensors()] == addresses
    assert not torch.equal(runner.stages.slots.token, token)
    del token
    assert live_tensors() <= before


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_a_stage_asks_the_host_for_nothing(model: Path, lanes: int) -> None:
    """No operator that reads a value back or makes a shape of data; the mode is shown to see one where there is one."""
    runner = prepared(model, KVLayout.LAST_EXITED, lanes)
    for header, frame in stages(2, lanes):
        with Operators() as seen:
            runner.run(header, frame)
        assert sum(seen.counts.values()) > 5
        assert not HOST_READS & set(seen.counts), f"{Stage(header.stage).label} reads the device"
    with Operators() as seen:
        int(torch.ones(1).sum())
    assert HOST_READS & set(seen.counts)


@pytest.mark.parametrize("model", MODELS)
def test_lanes_cost_one_operator(model: Path) -> None:
    """Where the next token goes is a look-up by lane in coda; prelude and core are what they are without drafts."""
    counts = {}
    for lanes in (1, 3):
        runner = prepared(model, KVLayout.LAST_EXITED, lanes)
        for header, frame in stages(2, lanes):
            with Operators() as seen:
                runner.run(header, frame)
            counts[lanes, header.stage] = seen.counts
    for stage in (Stage.PRELUDE, Stage.CORE):
        assert counts[3, stage] == counts[1, stage]
    assert counts[3, Stage.CODA] - counts[1, Stage.CODA] == Counter({"aten.index_select.default": 1})
    assert counts[3, Stage.CODA].total() == counts[1, Stage.CODA].total() + 1


@pytest.mark.parametrize("model", MODELS)
def test_the_same_operators_whatever_the_data(model: Path) -> None:
    """Control flow that depends on data would show as another list of operators for other rows. The views of a bucket's
    buffers are made when it first runs."""
    runner = prepared(model, KVLayout.FIRST_THEN_SHARED)
    for header, frame in stages(2):
        runner.run(header, frame)
    lists = []
    for position in (3, 4):
        operators = []
        for header, frame in stages(position):
            if position == 4:
                frame[2, :ROWS] = frame[2, :ROWS][::-1]
            with Operators() as seen:
                runner.run(header, frame)
            operators.append(seen.counts)
        lists.append(operators)
    assert lists[0] == lists[1]
