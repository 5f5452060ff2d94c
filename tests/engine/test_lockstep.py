"""The engine equals the batch-1 references: greedy tokens and exit depths, for every gate, layout and policy.

The references share no code with the engine, know no batching and no paging, and equal the published values. Tokens
of random-weight models change with any K/V that is wrong, and depths are compared beside them.
"""

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError, RequestError
from depthbatch.common.frames import Stage
from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import RequestParams
from depthbatch.frontend.params import RequestDefaults, SamplingParams
from fakes.lockstep import Answer, LockstepEngine
from reference.oracle import HUGINN, OURO, R_MAX, compare, prompts_of

MODELS = [pytest.param(OURO, id="ouro"), pytest.param(HUGINN, id="huginn")]
EARLY_LAYOUTS = [layout for layout in KVLayout if layout.allows_early_exit]
OUTPUTS = 12


def engine(model: Path, layout: str, backend: str | None = None, **options: object) -> LockstepEngine:
    values = {"max_num_seqs": 5, "min_free_slots": 1, "kv_blocks": 120, "max_loops": R_MAX.get(model)} | options
    return LockstepEngine(EngineConfig.from_values({"model": str(model), "kv_layout": layout, **values}), backend)


def params(model: Path, gate: Gate, index: int = 0) -> RequestParams:
    """A request's parameters; ``index`` varies thresholds, limits and replayed depths."""
    r_max = R_MAX[model]
    threshold = (0.3, 0.5, 0.8)[index % 3] if model == OURO else (0.65, 0.8, 0.95)[index % 3]
    depths = np.random.default_rng(index).integers(1, r_max + 1, OUTPUTS)
    low, high = (1 + index % r_max,) * 2 if gate is Gate.FIXED else (2 + index % 2, r_max - index % 2)
    return RequestParams(
        max_tokens=OUTPUTS - index % 4,
        gate=gate,
        exit_threshold=threshold,
        min_loops=low,
        max_loops=high,
        exit_depths=bytes(np.minimum(depths, high).astype(np.uint8)) if gate is Gate.REPLAY else b"",
    )


def gates_of(model: Path) -> list[Gate]:
    own = [Gate.NONE, Gate.FIXED, Gate.REPLAY, Gate.OWN, Gate.DELAYED]
    return own if model == OURO else [*own, Gate.CONVERGENCE]


def check(model: Path, layout: str, prompts: list[list[int]], requests: list[RequestParams], got: list[Answer]) -> None:
    """Every answer is the reference's; near ties may cut short a tenth of the comparison at most."""
    compared = total = 0
    for prompt, request, answer in zip(prompts, requests, got, strict=True):
        agreement = compare(model, prompt, request, layout, answer)
        compared, total = compared + agreement.compared, total + agreement.total
    assert compared >= 0.9 * total


@pytest.mark.parametrize("backend", [None, "sdpa"])
@pytest.mark.parametrize(
    ("model", "layout", "key"),
    [
        (OURO, "depth_indexed", "greedy_full_depth"),
        (OURO, "last_exited", "greedy_full_depth"),
        (HUGINN, "depth_indexed", "greedy_depth_indexed"),
        (HUGINN, "single", "greedy_single"),
    ],
)
def test_greedy_tokens_are_the_published_ones(model: Path, layout: str, key: str, backend: str | None) -> None:
    """The recorded values of the published implementations, all four prompts in one batch, no oracle of ours between."""
    values = np.load(model / "expected.npz")
    r_max = 4 if model == OURO else 8
    request = RequestParams(max_tokens=24, min_loops=2, max_loops=r_max)
    answers = engine(model, layout, backend, max_loops=r_max).run(
        [(values[f"prompt_{i}"].tolist(), request) for i in range(4)]
    )
    for index, answer in enumerate(answers):
        assert answer.tokens == values[f"{key}_{index}"].tolist()
        assert answer.depths == [r_max] * 24


@pytest.mark.parametrize("layout", list(KVLayout))
@pytest.mark.parametrize("model", MODELS)
def test_every_gate_and_layout(model: Path, layout: KVLayout) -> None:
    """One gate a run, prompts of mixed lengths in one batch, slots refilled (7 requests, 5 slots)."""
    prompts = prompts_of(model)
    running = engine(model, layout)
    for gate in gates_of(model):
        if gate.may_exit_early and not layout.allows_early_exit:
            continue
        requests = [params(model, gate, index) for index in range(len(prompts))]
        answers = running.run(list(zip(prompts, requests, strict=True)))
        check(model, layout, prompts, requests, answers)
        if gate.may_exit_early:
            assert len({depth for answer in answers for depth in answer.depths[1:]}) >= 2, gate


@pytest.mark.parametrize("gate", [Gate.OWN, Gate.DELAYED])
@pytest.mark.parametrize(
    ("model", "exits"), [pytest.param(OURO, False, id="ouro"), pytest.param(HUGINN, True, id="huginn")]
)
def test_threshold_of_one_means_full_depth_for_cumulative_gates_only(model: Path, exits: bool, gate: Gate) -> None:
    """Bug: OWN and DELAYED with a threshold of 1 or more were full depth for Huginn too, whose gate is a convergence
    test and fires. 1.9 lies above most distances of this random model, and a cumulated probability never reaches it."""
    prompts = prompts_of(model)
    requests = [msgspec.structs.replace(params(model, gate, i), exit_threshold=1.9) for i in range(len(prompts))]
    answers = engine(model, "single").run(list(zip(prompts, requests, strict=True)))
    check(model, "single", prompts, requests, answers)
    assert exits == any(d < r.max_loops for a, r in zip(answers, requests, strict=True) for d in a.depths[1:])


@pytest.mark.parametrize("max_tokens", [8192, 13], ids=["whole", "chunked"])
@pytest.mark.parametrize("policy", ["cb", "no-refill", "refill"])
@pytest.mark.parametrize("layout", EARLY_LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_gates_side_by_side(model: Path, layout: KVLayout, policy: str, max_tokens: int) -> None:
    """Every request another gate, under every policy, with and without chunked prefill: no row changes its neighbour.

    ``cb`` lets no gate decide: every token runs its request's max_loops. Chunks of 13 tokens cut the longer prompts at
    borders that are no block borders, several prompts to a batch.
    """
    prompts, gates = prompts_of(model), gates_of(model)
    requests = [params(model, gates[index % len(gates)], index) for index in range(len(prompts))]
    k = 1 if policy == "refill" else None
    running = engine(model, layout, policy=policy, max_num_batched_tokens=max_tokens, min_coda_batch=k)
    answers = running.run(list(zip(prompts, requests, strict=True)))
    if policy == "cb":
        requests = [msgspec.structs.replace(r, gate=Gate.NONE, exit_depths=b"") for r in requests]
    check(model, layout, prompts, requests, answers)
    chunked = [answer for answer in answers if len(answer.chunks) > 1]
    assert len(chunked) >= 3 if max_tokens == 13 else not chunked


@pytest.mark.parametrize("model", MODELS)
def test_refill_mixes_depths_in_one_core_batch_under_last_exited(model: Path) -> None:
    """The step beyond the published implementation: rows at 3 or more depths in one launch, each on its own plane.

    That it happened is read off the stages that ran; that it was right, off the references.
    """
    prompts = prompts_of(model)
    requests = [params(model, Gate.REPLAY, index) for index in range(len(prompts))]
    running = engine(model, "last_exited", policy="refill", min_coda_batch=1)
    answers = running.run(list(zip(prompts, requests, strict=True)))
    depths = [len(set(ran.loops)) for ran in running.history if ran.header.stage == Stage.CORE]
    assert max(depths) >= 3
    assert sum(count >= 3 for count in depths) > 10
    check(model, "last_exited", prompts, requests, answers)


@pytest.mark.parametrize("mode", ["async", "lookahead"])
@pytest.mark.parametrize("model", MODELS)
def test_results_that_come_late_change_nothing(model: Path, mode: str) -> None:
    """Stages are launched before the results of earlier ones are known, as far ahead as the mode allows.

    All gates side by side, more requests than slots, and stop tokens that are found late: what was computed beyond them
    must not show, nor harm the next owner of the slot.
    """
    prompts, gates = prompts_of(model), gates_of(model)
    requests = [params(model, gates[index % len(gates)], index) for index in range(len(prompts))]
    batch = list(zip(prompts, requests, strict=True))
    running = engine(model, "last_exited", async_scheduling=mode, max_num_batched_tokens=40)
    answers = running.run(batch)
    assert running.deepest >= (3 if mode == "lookahead" else 2)
    check(model, "last_exited", prompts, requests, answers)
    stopped = [
        (prompt, msgspec.structs.replace(request, stop_token_ids=(answer.tokens[4],)))
        for (prompt, request), answer in zip(batch, answers, strict=True)
    ]
    for before, after in zip(answers, running.run(stopped), strict=True):
        end = before.tokens.index(before.tokens[4]) + 1
        assert after.finish_reason == "stop"
        assert (after.tokens, after.depths) == (before.tokens[:end], before.depths[:end])


@pytest.mark.parametrize("model", MODELS)
def test_sampled_tokens_do_not_depend_on_policy_or_preemption(model: Path) -> None:
    """Draws are a function of (seed, position): other batches, another order, recomputation, the same tokens.

    Full depth, so that the logits are the same; temperature 1.5, so that they would differ if the draws did.
    """
    prompts = prompts_of(model)
    requests = [
        RequestParams(max_tokens=12, temperature=1.5, top_k=(0, 20)[i % 2], seed=i << 33, max_loops=R_MAX[model])
        for i in range(len(prompts))
    ]
    batch = list(zip(prompts, requests, strict=True))
    tokens = [
        [answer.tokens for answer in engine(model, "last_exited", **options).run(batch)]
        for options in ({}, {"policy": "cb"}, {"policy": "no-refill", "max_num_seqs": 3}, {"max_num_seqs": 1})
    ]
    assert all(other == tokens[0] for other in tokens[1:])
    greedy = [(prompt, RequestParams(max_tokens=12, max_loops=R_MAX[model])) for prompt in prompts]
    assert tokens[0] != [answer.tokens for answer in engine(model, "last_exited").run(greedy)]


def test_lookahead_exits_as_its_trained_head_says(tmp_path: Path) -> None:
    """A head with random weights beside the model: depths follow it and not the model's own gate, which differs."""
    model = tmp_path / "model"
    shutil.copytree(OURO, model)
    weight = torch.randn(1, 64, generator=torch.Generator().manual_seed(4)) / 4
    save_file({"weight": weight, "bias": torch.tensor([-0.5])}, model / "lookahead_gate.safetensors")
    prompts = prompts_of(OURO)
    running = engine(model, "last_exited", max_loops=4)
    assert running.built.info.default_gate is Gate.LOOKAHEAD
    depths = []
    for gate in (Gate.LOOKAHEAD, Gate.DELAYED):
        requests = [
            RequestParams(max_tokens=OUTPUTS, gate=gate, exit_threshold=0.5, min_loops=2, max_loops=4) for _ in prompts
        ]
        answers = running.run(list(zip(prompts, requests, strict=True)))
        check(model, "last_exited", prompts, requests, answers)
        depths.append([answer.depths for answer in answers])
    assert depths[0] != depths[1] and len({d for row in depths[0] for d in row}) == 3


def test_seeded_initial_states_are_the_requests_own() -> None:
    """Huginn's initial state drawn from (seed, position): two seeds in one batch, each as its reference says."""
    prompts, seeds = prompts_of(HUGINN)[:3], (3, 3 << 32 | 9, 3)
    requests = [RequestParams(max_tokens=6, seed=seed, max_loops=R_MAX[HUGINN]) for seed in seeds]
    answers = engine(HUGINN, "single", state_init="seeded").run(list(zip(prompts, requests, strict=True)))
    for prompt, request, answer in zip(prompts, requests, answers, strict=True):
        state_seed = (request.seed ^ request.seed >> 32) & 0xFFFFFFFF
        agreement = compare(HUGINN, prompt, request, "single", answer, state_seed)
        assert agreement.compared == agreement.total


@pytest.mark.parametrize("max_tokens", [8192, 13], ids=["whole", "chunked"])
@pytest.mark.parametrize("model", MODELS)
def test_a_cached_prefix_changes_nothing(model: Path, max_tokens: int) -> None:
    """Prompts that begin alike start behind blocks that others have prefilled, and still get the reference's tokens and
    depths; some of the blocks are of sequences that have ended."""
    prefix = prompts_of(model)[-1]
    prefix = (prefix * (40 // len(prefix) + 1))[:40]
    prompts = [[*prefix[: 40 - index], *prompt[:3]] for index, prompt in enumerate(prompts_of(model))]
    gates = gates_of(model)
    requests = [params(model, gates[index % len(gates)], index) for index in range(len(prompts))]
    running = engine(
        model, "last_exited", prefix_caching="on", block_size=16, max_num_batched_tokens=max_tokens, max_num_seqs=2
    )
    answers = running.run(list(zip(prompts, requests, strict=True)))
    check(model, "last_exited", prompts, requests, answers)
    prefilled = sum(ran.header.n_tokens for ran in running.history)
    assert prefilled < 0.75 * sum(len(prompt) for prompt in prompts)


@pytest.mark.parametrize("backend", [None, "sdpa"])
@pytest.mark.parametrize("layout", ["last_exited", "depth_indexed"])
@pytest.mark.parametrize("model", MODELS)
def test_prompts_of_one_prefill_read_each_others_blocks(model: Path, layout: str, backend: str | None) -> None:
    """A stage writes the K/V of every chunk before it attends, layer by layer and loop by loop: three siblings that
    prefill 8 tokens behind the first one's 40, in the same stage, get its logprobs, bit for bit where a token's bits do
    not depend on the chunk (the C kernels)."""
    prompt = [*(prompts_of(model)[-1] * 24)[:47], 7]
    asked = [(prompt, RequestParams(max_tokens=4, max_loops=R_MAX[model], logprobs=True)) for _ in range(4)]
    scores = []
    for caching in ("off", "on"):
        running = engine(model, layout, backend, prefix_caching=caching, block_size=8, max_num_seqs=4, kv_blocks=60)
        running.history.clear()
        answers = running.run(asked)
        prefills = [ran.header for ran in running.history if ran.header.stage == Stage.PREFILL]
        assert [header.n_tokens for header in prefills] == [4 * 48 if caching == "off" else 48 + 3 * 8]
        assert len({answer.scores for answer in answers}) == 1 or backend
        scores.append(answers[0].scores + answers[3].scores)
    tokens, others = (np.frombuffer(each, np.int32).reshape(8, -1)[:, 0].view(np.float32) for each in scores)
    assert scores[0] == scores[1] if backend is None else np.allclose(tokens, others, atol=1e-4)


def test_depth_indexed_refuses_gates_that_exit_early() -> None:
    """Both at the edge (the option) and for a request; the message names layout and gate."""
    with pytest.raises(ConfigError, match=r"depth_indexed.*delayed"):
        engine(OURO, "depth_indexed", gate="delayed")
    running = engine(OURO, "depth_indexed")
    assert running.built.info.default_gate is Gate.NONE
    defaults = RequestDefaults(running.built.info, seed=0)
    for gate, asks in (
        (Gate.REPLAY, SamplingParams(exit_depths=[1, 2])),
        (Gate.OWN, SamplingParams(gate="own")),
        (Gate.DELAYED, SamplingParams(gate="delayed")),
    ):
        with pytest.raises(RequestError, match=f"gate {gate.label} cannot run with kv_layout depth_indexed") as refused:
            defaults.resolve(asks, 2, ordinal=0)
        assert refused.value.param == ("exit_depths" if gate is Gate.REPLAY else "gate")


@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_stays_close_to_float32(model: Path) -> None:
    """A smoke test of the other dtype: every request ends, and most first tokens, which come of one prefill, agree."""
    prompts = prompts_of(model)
    requests = [RequestParams(max_tokens=8, max_loops=R_MAX[model]) for _ in prompts]
    batch = list(zip(prompts, requests, strict=True))
    wide, narrow = (engine(model, "last_exited", dtype=dtype).run(batch) for dtype in ("float32", "bfloat16"))
    assert all(len(answer.tokens) == 8 and answer.finish_reason == "length" for answer in narrow)
    agree = sum(a.tokens[0] == b.tokens[0] for a, b in zip(wide, narrow, strict=True))
    assert agree >= len(prompts) - 2
