"""Ranks on captured graphs: tapes that hold collectives, on adversely interleaved lanes, beside one rank that runs plainly.

Each rank is a thread with a model, KV memory, slots and an accelerator of its own; what tells the others and what follows
is the production's (worker/ranks.py), over its socket pairs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from depthbatch.common.frames import Stage
from depthbatch.common.gates import Gate
from depthbatch.common.messages import Submit, Variant
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.worker.build import BuiltRunner, assemble
from depthbatch.worker.models.loader import load_model
from depthbatch.worker.runner.accelerator import CudaAccelerator, Lane
from depthbatch.worker.runner.overlapped import Form, OverlappedRunner, forms_of
from fakes.overlapped_serving import configure, longer, requests, serve, warm
from fakes.tape_accelerator import TapeAccelerator
from fakes.thread_ranks import ThreadGroup, build_ranks

pytestmark = pytest.mark.usefixtures("torch_operators")
CPU = torch.device("cpu")
SUM, TOKENS = "depthbatch_ranks.all_reduce_.default", "depthbatch_ranks.broadcast_.default"
Collective = tuple[str, tuple[int, ...], torch.dtype]


class RankAccelerator(TapeAccelerator):
    """A rank's: whichever thread advances its lanes is that rank."""

    def __init__(self, group: ThreadGroup, rank: int, seed: int) -> None:
        super().__init__(seed)
        self._group, self._rank = group, rank

    def _advance(self) -> bool:
        self._group.enter(self._rank)
        return super()._advance()

    def collectives(self) -> list[list[Collective]]:
        """What each capture holds of them, in order."""
        return [
            [
                (str(entry.operator), tuple(entry.args[0].shape), entry.args[0].dtype)
                for entry in tape.entries
                if str(entry.operator) in (SUM, TOKENS)
            ]
            for tape in self.tapes
        ]


class TapedRanks:
    """A worker of two ranks on tapes."""

    def __init__(self, config: Any, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.group = ThreadGroup(2)
        self.group.stand_in(patch)
        self.accelerators: dict[int, RankAccelerator] = {}
        self.runners: dict[int, OverlappedRunner] = {}

        def overlapped(built: BuiltRunner, rank: int) -> OverlappedRunner:
            accelerator = self.accelerators[rank] = RankAccelerator(self.group, rank, 10 * seed + rank)
            plain = built.runner
            host_kv = plain._host_kv  # type: ignore[union-attr]
            made = OverlappedRunner(plain.stages, plain.limits, accelerator, 48, plain.grammars, host_kv)
            self.runners[rank] = made
            return made

        self.built = build_ranks(config, self.group, CPU, "triton", overlapped)


def alone(config: Any) -> BuiltRunner:
    """One rank, plain."""
    model = load_model(config.model, "float32", CPU, r_max=config.max_loops, state_init=config.state_init)
    return assemble(config, model, CPU, "triton")


def within(submits: list[Submit], vocab_size: int) -> list[Submit]:
    """The same with tokens of a smaller vocabulary, and without lists of allowed ones, which are as long as one."""
    made = []
    for submit in submits:
        prompt = np.frombuffer(submit.prompt, np.int32) % vocab_size
        params = msgspec.structs.replace(submit.params, allow_list=b"")
        made.append(msgspec.structs.replace(submit, prompt=prompt.astype(np.int32).tobytes(), params=params))
    return made


@pytest.mark.parametrize(
    ("model", "layout", "gate", "options"),
    [
        ("ouro-tiny", "last_exited", Gate.DELAYED, {}),
        ("ouro-tiny", "depth_indexed", Gate.LOOKAHEAD, {}),
        ("ouro-tiny", "last_exited", Gate.DELAYED, {"speculation": 2}),
        ("ouro-tiny", "last_exited", Gate.DELAYED, {"preemption": "offload", "kv_blocks": 44, "block_size": 2}),
        ("huginn-tiny", "single", Gate.CONVERGENCE, {}),
        ("huginn-tiny", "first_then_shared", Gate.CONVERGENCE, {"state_init": "seeded"}),
        ("nanbeige-tiny", "depth_indexed", Gate.NONE, {}),
        ("retro-llama-tiny", "last_exited", Gate.NONE, {}),
    ],
)
def test_two_taped_ranks_equal_one_that_is_plain(
    model: str, layout: str, gate: Gate, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, depths and logprobs under lookahead, with preempted sequences, drafts and requests of every kind. Not luck: a
    rank that replays another form, out of order, or with a collective more or less meets a tensor of another shape, or
    nobody."""
    shared = {"max_loops": 4, "max_model_len": 88}
    plain_options = {name: value for name, value in options.items() if name == "state_init"}
    plain_config = configure(model, "off", layout, **shared, **plain_options)
    plain = alone(plain_config)
    submits = requests(gate, plain.info.r_max)
    if model not in ("ouro-tiny", "huginn-tiny"):
        submits = within(submits, plain.info.vocab_size)
    if "speculation" in options:
        submits = warm(submits)
    if "preemption" in options:
        submits = longer(submits)
    want, _ = serve(Scheduler(SchedulerConfig.resolve(plain_config, plain.info)), plain.runner, submits)
    config = configure(model, "lookahead", layout, **shared, **options)
    ranks = TapedRanks(config, 1, monkeypatch)
    scheduler = Scheduler(SchedulerConfig.resolve(config, ranks.built.info))
    got, deepest = serve(scheduler, ranks.built.runner, submits)
    assert deepest > 2
    assert {key: answer[:2] for key, answer in got.items()} == {key: answer[:2] for key, answer in want.items()}
    for key, answer in want.items():
        np.testing.assert_allclose(got[key][2], answer[2], atol=1e-4)
    offload, chains = scheduler.admission.offload, scheduler.admission.chains
    assert offload is None if "preemption" not in options else offload is not None and offload.restored_blocks > 3
    assert chains is None if "speculation" not in options else chains is not None and chains.right.sum() > 3


@pytest.mark.parametrize("model", ["ouro-tiny", "huginn-tiny"])
def test_captures_hold_the_same_collectives_on_every_rank(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each capture, in order: two sums a layer of its stage or piece, and one vector of tokens where a coda ends."""
    config = configure(model, "lookahead", "last_exited", max_num_seqs=3, max_loops=4)
    ranks = TapedRanks(config, 2, monkeypatch)
    first, second = (ranks.accelerators[rank].collectives() for rank in range(2))
    assert first == second
    spec, runner = ranks.built.runner.stages.model.spec, ranks.runners[0]
    layers = {Stage.PRELUDE: spec.prelude_layers, Stage.CORE: spec.core_layers, Stage.CODA: spec.coda_layers}
    expected = []
    for bucket in sorted(runner.limits.buckets, reverse=True):
        for form in forms_of(spec):
            sums = [(SUM, (bucket, spec.hidden_size), spec.dtype)] * 2 * layers[form.stage]
            expected.append(sums + [(TOKENS, (bucket,), torch.int32)] * (form.stage is Stage.CODA))
    for count in reversed(runner._pieces.counts):
        for stack in runner._pieces._stacks:
            expected += [
                [(SUM, (count, spec.hidden_size), spec.dtype)] * 2 * (n > 0) for n in range(len(stack.blocks) + 1)
            ]
    assert first == expected


def test_what_another_rank_captures_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a form with gates or with sampling it captures what a plain one does: no operator of the gates, of the shaping or
    of the head is on its tapes."""
    ranks = TapedRanks(configure("ouro-tiny", "lookahead", "last_exited", max_num_seqs=1), 2, monkeypatch)
    operators: dict[int, dict[Form, list[str]]] = {}
    for rank, accelerator in ranks.accelerators.items():
        tapes = iter(accelerator.tapes)
        forms = forms_of(ranks.built.runner.stages.model.spec)
        operators[rank] = {form: [str(entry.operator) for entry in next(tapes).entries] for form in forms}
    core, gated = Form(Stage.CORE), Form(Stage.CORE, Variant.GATES)
    assert operators[1][gated] == operators[1][core] == operators[0][core] != operators[0][gated]
    codas = {form: names for form, names in operators[1].items() if form.stage is Stage.CODA}
    assert len({tuple(names) for names in codas.values()}) == 1
    assert all(len(names) < len(operators[0][form]) for form, names in codas.items())


def test_a_capture_runs_its_collectives_outside_of_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA accelerator's, with torch's parts replaced: where NCCL connects, and the device is waited for, no graph is
    being captured yet; the graph is captured on the compute lane."""
    seen: list[str] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            seen.append("waits for the default stream")

        def synchronize(self) -> None:
            seen.append("is waited for")

    @contextmanager
    def entered(name: str) -> Iterator[None]:
        seen.append(f"in {name}")
        yield
        seen.append(f"out of {name}")

    streams = [Stream() for _ in Lane]
    compute = streams[Lane.COMPUTE]
    for name, part in {
        "Stream": lambda device: streams.pop(0),
        "Event": lambda **options: SimpleNamespace(record=lambda stream: None, synchronize=lambda: None),
        "current_stream": lambda device: None,
        "graph_pool_handle": lambda: "pool",
        "stream": lambda stream: entered("stream"),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: seen.append("replay")),
        "graph": lambda graph, pool, stream: entered("capture" if stream is compute and pool == "pool" else "another"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, part)
    replay = CudaAccelerator(torch.device("cuda", 1)).capture(lambda: seen.append("work"))
    replay()
    before = ["waits for the default stream", "in stream", "work", "out of stream", "is waited for"]
    assert seen == [*before, "in capture", "work", "out of capture", "replay"]
