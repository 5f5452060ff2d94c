"""Drafts change nothing: with them the engine's answers are, bit for bit in fp32, those without.

Through scheduler and runner as they serve. What is compared is tokens, depths, scores, and every K and V in memory; that
drafts were right and wrong in numbers is asserted beside it.
"""

from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from engine.test_rebuild import Cache

from depthbatch.common.config import EngineConfig
from depthbatch.common.frames import Stage, lane_of
from depthbatch.common.gates import Gate
from depthbatch.common.messages import PLAIN, RequestParams, StageBatch
from depthbatch.scheduler.config import DraftLimit
from fakes.draft_policies import CoreFirst
from fakes.lockstep import Answer, Disturbance, LockstepEngine
from reference.oracle import HUGINN, OURO, R_MAX, prompts_of

MODELS = [pytest.param(OURO, id="ouro"), pytest.param(HUGINN, id="huginn")]
OUTPUTS = 24
WARM = 10.0  # random weights know nothing early: so warm that about half of the drafts are right
GATES = {
    OURO: (Gate.OWN, Gate.DELAYED, Gate.NONE, Gate.REPLAY, Gate.FIXED),
    HUGINN: (Gate.OWN, Gate.DELAYED, Gate.CONVERGENCE, Gate.REPLAY, Gate.FIXED),
}
Batch = list[tuple[list[int], RequestParams]]


def engine(model: Path, backend: str | None = None, **options: object) -> LockstepEngine:
    values = {
        "model": str(model),
        "dtype": "float32",
        "policy": "refill",
        "kv_layout": "last_exited",
        "max_num_seqs": 5,
        "min_free_slots": 1,
        "kv_blocks": 120,
        "block_size": 8,
        "max_loops": R_MAX.get(model),
    }
    return LockstepEngine(EngineConfig.from_values(values | options), backend)


def requests(model: Path, layout: str = "last_exited") -> Batch:
    """Every gate, greedy and sampled, with scores; one with a penalty, which has no drafts, and one that wants none."""
    made = []
    for index, prompt in enumerate(prompts_of(model) + prompts_of(model)[:4]):
        gate = GATES[model][index % 5] if layout == "last_exited" else (Gate.NONE, Gate.FIXED)[index % 2]
        low = 1 + index % R_MAX[model] if gate is Gate.FIXED else 2
        depths = np.random.default_rng(index).integers(1, R_MAX[model] + 1, OUTPUTS).astype(np.uint8)
        params = RequestParams(
            max_tokens=OUTPUTS - index % 4,
            gate=gate,
            exit_threshold=0.5 if model == OURO else 0.8,
            min_loops=low,
            max_loops=low if gate is Gate.FIXED else R_MAX[model],
            exit_depths=bytes(depths) if gate is Gate.REPLAY else b"",
            temperature=(0.0, WARM)[index % 2],
            top_k=200 if index % 4 == 1 else 0,
            seed=index,
            logprobs=index % 3 != 1,
            repetition_penalty=1.3 if index == 6 else 1.0,
            speculation=index != 8,
        )
        made.append((prompt, params))
    return made


@cache
def without(model: Path, backend: str | None = None, layout: str = "last_exited") -> tuple[Answer, ...]:
    return tuple(engine(model, backend, kv_layout=layout, async_scheduling="off").run(requests(model, layout)))


def assert_same(got: list[Answer], want: list[Answer] | tuple[Answer, ...], scores: bool = True) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.tokens, mine.depths, mine.finish_reason) == (theirs.tokens, theirs.depths, theirs.finish_reason)
        assert not scores or mine.scores == theirs.scores


def drafts(answers: list[Answer]) -> tuple[int, int]:
    """Right and wrong ones."""
    return sum(answer.accepted for answer in answers), sum(answer.rejected for answer in answers)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("mode", ["off", "async", "lookahead"])
@pytest.mark.parametrize("model", MODELS)
def test_answers_are_those_without_drafts(model: Path, mode: str, lanes: int) -> None:
    """All gates side by side, more requests than slots, results as late as the mode lets them be. Several tokens of a
    sequence share core steps at different depths: seen in the stages that ran."""
    running = engine(model, async_scheduling=mode, speculation=lanes)
    answers = running.run(requests(model))
    assert_same(answers, without(model))
    right, wrong = drafts(answers)
    assert right > 10 and wrong > 10
    assert answers[6].accepted + answers[6].rejected + answers[8].accepted + answers[8].rejected == 0
    assert max(ran.header.rows for ran in running.history if ran.header.stage == Stage.CORE) > 5


@pytest.mark.parametrize("model", MODELS)
def test_layouts_that_keep_every_loop(model: Path) -> None:
    """The other layout with a plane a loop, where nothing exits early: what a draft has not run lies in no plane."""
    answers = engine(model, kv_layout="depth_indexed", speculation=2).run(requests(model, "depth_indexed"))
    assert_same(answers, without(model, None, "depth_indexed"))
    assert min(drafts(answers)) > 10


@pytest.mark.parametrize(
    "options",
    [{"draft_depth": 2}, {"min_coda_batch": 5}, {"policy": "auto"}, {"max_num_seqs": 1}, {"speculation": 8}],
    ids=str,
)
@pytest.mark.parametrize("model", MODELS)
def test_which_drafts_run_changes_nothing(model: Path, options: dict[str, object]) -> None:
    """Later drafts, codas that let exited rows wait (others then catch up with them), another policy, one sequence at a
    time, the longest chains there are."""
    answers = engine(model, **({"speculation": 3} | options)).run(requests(model))
    assert_same(answers, without(model))
    assert min(drafts(answers)) > 5


@pytest.mark.parametrize("model", MODELS)
def test_torch_attention(model: Path) -> None:
    """Rows are gathered and appended by torch operators: tokens and depths, since products of other shapes round
    otherwise."""
    answers = engine(model, "sdpa", speculation=3).run(requests(model))
    assert_same(answers, without(model, "sdpa"), scores=False)
    assert min(drafts(answers)) > 10


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("model", MODELS)
def test_quantised_k_and_v(model: Path, kind: str) -> None:
    """Planes are filled with codes and scales: what a draft reads is what its successor reads without it."""
    batch = requests(model)
    answers = engine(model, speculation=3, kv_cache_dtype=kind).run(batch)
    assert_same(answers, engine(model, kv_cache_dtype=kind, async_scheduling="off").run(batch))
    assert min(drafts(answers)) > 5


@pytest.mark.parametrize("model", MODELS)
def test_stop_tokens_found_late(model: Path) -> None:
    """A token that ends its request is known while its successors are under way: none of them shows, and whoever has the
    slot next is not harmed."""
    batch = [
        (prompt, msgspec.structs.replace(params, stop_token_ids=(answer.tokens[7],)))
        for (prompt, params), answer in zip(requests(model), without(model), strict=True)
    ]
    answers = engine(model, speculation=3).run(batch)
    for before, after in zip(without(model), answers, strict=True):
        end = before.tokens.index(before.tokens[7]) + 1
        assert (after.tokens, after.depths, after.finish_reason) == (before.tokens[:end], before.depths[:end], "stop")
    assert min(drafts(answers)) > 3


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", MODELS)
def test_disturbed_sequences_go_on(model: Path, seed: int) -> None:
    """Sequences preempted, worker and scheduler lost in the midst of chains: their drafts vanish, their tokens do not."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice(["preempt", "preempt", "worker", "scheduler"], 5).tolist()
    disturbances = [
        Disturbance(int(at), kind, int(pick))
        for at, kind, pick in zip(rng.integers(5, 300, 5), kinds, rng.integers(0, 5, 5), strict=True)
    ]
    running = engine(model, speculation=3, async_scheduling=("off", "lookahead")[seed % 2])
    answers = running.run(requests(model), disturbances)
    assert running.rebuilt
    assert_same(answers, without(model))


@pytest.mark.parametrize("blocks", [13, 17])
@pytest.mark.parametrize("model", MODELS)
def test_drafts_preempt_nobody(model: Path, blocks: int) -> None:
    """Memory for a part of the batch: sequences throw each other out, and drafts get what is left and no more."""
    plain, running = (engine(model, kv_blocks=blocks, speculation=lanes) for lanes in ("off", 3))
    want = plain.run(requests(model))
    answers = running.run(requests(model))
    assert_same(want, without(model))
    assert_same(answers, without(model))
    assert plain.preemptions and running.preemptions <= plain.preemptions + 4
    assert drafts(answers)[0] > 0


@pytest.mark.parametrize("gate", [Gate.REPLAY, Gate.DELAYED, Gate.NONE])
@pytest.mark.parametrize("model", MODELS)
def test_every_k_and_v_is_what_decode_without_drafts_writes(model: Path, gate: Gate) -> None:
    """Every plane of every layer at every position, prelude and coda layers too. Tokens could agree by luck: a row that
    read what was not final, or a plane filled late, has other K and V from there on. Exited rows wait for a coda, and
    those behind catch up with them."""
    prompt, outputs = prompts_of(model)[1], 40
    depths = np.random.default_rng(1).integers(1, R_MAX[model] + 1, outputs).astype(np.uint8)
    params = RequestParams(
        max_tokens=outputs,
        gate=gate,
        exit_threshold=0.5 if model == OURO else 0.8,
        min_loops=1,
        max_loops=R_MAX[model],
        exit_depths=bytes(depths) if gate is Gate.REPLAY else b"",
        temperature=WARM,
    )
    held, memory = len(prompt) + outputs - 1, []
    for lanes, coda_batch in (("off", 1), (1, 5), (4, 1), (4, 5)):
        running = engine(model, speculation=lanes, min_coda_batch=coda_batch)
        [answer] = running.run([(prompt, params)])
        memory.append(Cache(running, 1, held).values)
    assert answer.accepted and answer.rejected
    for others in memory[1:]:
        for mine, theirs in zip(others, memory[0], strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("model", MODELS)
def test_rows_that_have_caught_up_wait_until_planes_are_filled(model: Path) -> None:
    """Core steps go on as long as a row may run, and the token ahead has left after two loops: those behind it come to a
    plane that no coda has filled yet. Had they not waited, their K and V would be others from there on."""
    prompt, outputs = prompts_of(model)[1], 12
    params = RequestParams(
        max_tokens=outputs,
        gate=Gate.REPLAY,
        min_loops=1,
        max_loops=R_MAX[model],
        exit_depths=bytes([3, *[R_MAX[model]] * 2] * outputs),
        temperature=WARM,
    )
    memory = []
    for lanes in ("off", 2):
        running = engine(model, speculation=lanes, max_num_seqs=1)
        policy = CoreFirst(DraftLimit(2, 1), 0) if lanes == 2 else None
        running.run([(prompt, params)], policy=policy)
        memory.append(Cache(running, 1, len(prompt) + outputs - 1).values)
    for mine, theirs in zip(*memory, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("model", "depth"), [("demo", 2), ("demo-huginn", 1)])
def test_trained_models(model: str, depth: int) -> None:
    """A model whose early opinions are worth something: long chains of right drafts, and fewer core steps for them."""
    prompts = [list(b"The old house on the hill"), list(b"Once upon a time"), list(b"In the morning the fox")]
    params = RequestParams(
        max_tokens=60, gate=Gate.DELAYED, exit_threshold=0.5, min_loops=2, max_loops=4, logprobs=True
    )
    batch = [(prompt, params) for prompt in prompts]
    plain = engine(Path(model))
    running = engine(Path(model), speculation=3, draft_depth=depth)
    answers = running.run(batch)
    assert_same(answers, plain.run(batch))
    right, wrong = drafts(answers)
    assert right > wrong
    cores = [sum(ran.header.stage == Stage.CORE for ran in each.history) for each in (plain, running)]
    assert cores[1] < 0.9 * cores[0]


@pytest.mark.parametrize("model", MODELS)
def test_a_draft_readout_changes_one_token_and_nothing_else(model: Path) -> None:
    """Coda with a negative depth: no plane of a looped layer, no work item, no gate state; the token goes to the lane of
    the next position. With a positive one the planes beyond the exit are filled."""
    built = engine(model, speculation=2).built
    runner, stages = built.runner, built.runner.stages
    slots, looped = stages.slots, [i for i, planes in enumerate(stages.backend.geometry.planes) if planes > 1]
    prefill = np.array([2, 0, 4, 1, 5, 6, 7, 8, 2, 0, 3], np.int32)
    runner.run(StageBatch(1, Stage.PREFILL, 0, 1, 4, 1), prefill)
    lanes = [lane_of(2, position, slots.num_slots, slots.lanes) for position in (4, 5)]
    assert slots.token[lanes[0]] != 0
    for step, (stage, aux) in enumerate(((Stage.PRELUDE, 0), (Stage.CORE, 1), (Stage.CORE, 2))):
        runner.run(StageBatch(2 + step, stage, 1, 1), np.array([2, 4, aux, lanes[0]], np.int32))

    def state() -> list[torch.Tensor]:
        kept = [*slots.item, slots.survival, slots.cumulated]
        caches = [cache[layer] for cache in (stages.backend.k_cache, stages.backend.v_cache) for layer in looped]
        return [tensor.clone() for tensor in (*kept, *caches)]

    before, tokens = state(), slots.token.clone()
    result = runner.run(StageBatch(9, Stage.CODA, 1, 1, variant=PLAIN), np.array([2, 4, -2, lanes[0]], np.int32))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(state(), before, strict=True))
    tokens[lanes[1]] = int(np.frombuffer(result.token_ids, "<i4")[0])
    assert torch.equal(slots.token, tokens)
    runner.run(StageBatch(10, Stage.CODA, 1, 1, variant=PLAIN), np.array([2, 4, 2, lanes[0]], np.int32))
    changed = [not torch.equal(mine, theirs) for mine, theirs in zip(state(), before, strict=True)]
    assert not any(changed[: len(changed) - 2 * len(looped)]) and all(changed[-2 * len(looped) :])
