"""Request parameters: a table of bad values, each refused with the field's name; and resolution against an engine."""

from typing import Any

import msgspec
import numpy as np
import pytest

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import RequestError
from depthbatch.common.gates import Gate
from depthbatch.common.messages import EngineInfo, RequestParams
from depthbatch.frontend.params import RequestDefaults, SamplingParams
from depthbatch.frontend.prompt_checks import check_token_ids
from fakes import engine_processes as fake_engine

INF, NAN = float("inf"), float("nan")
INFO = fake_engine.fake_info(EngineConfig())  # 4 loops, r_min 2, gate delayed at 0.9, 512 tokens, eos 0 and 2

BAD_BY_ITSELF: list[tuple[str, Any]] = [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "8"), ("max_tokens", True),
    ("temperature", -0.1), ("temperature", NAN), ("temperature", INF), ("temperature", "hot"), ("temperature", None),
    ("temperature", 101), ("top_p", 0.0), ("top_p", -0.5), ("top_p", 1.01), ("top_p", NAN), ("top_p", "1"),
    ("top_k", -2), ("top_k", 1.5), ("top_k", 2**31), ("top_k", None), ("min_p", -0.01), ("min_p", 1.01),
    ("min_p", NAN), ("seed", 2**64), ("seed", -(2**63) - 1), ("seed", 1.0), ("seed", "7"), ("stop", 5),
    ("stop", [""]), ("stop", ""), ("stop", ["a", 5]), ("stop", ["x"] * 17), ("stop", ["x" * 1025]), ("stop", None),
    ("stop_token_ids", [-1]), ("stop_token_ids", 5), ("stop_token_ids", [1.5]), ("stop_token_ids", [True]),
    ("ignore_eos", 1), ("ignore_eos", "yes"), ("speculation", 1), ("speculation", "no"), ("min_tokens", -1), ("min_tokens", 17), ("min_tokens", 1.0),
    ("exit_threshold", -0.1), ("exit_threshold", NAN), ("exit_threshold", INF), ("exit_threshold", "low"),
    ("min_loops", 0), ("min_loops", 1.5), ("max_loops", 0), ("num_loops", 0), ("num_loops", -3), ("num_loops", "2"),
    ("gate", "owm"), ("gate", 3), ("exit_depths", [0]), ("exit_depths", 3), ("exit_depths", ["2"]),
    ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", NAN), ("frequency_penalty", "1"),
    ("repetition_penalty", 0.0), ("repetition_penalty", 10.5), ("repetition_penalty", None), ("logit_bias", [1]),
    ("logit_bias", {"a": 1}), ("logit_bias", {-1: 1}), ("logit_bias", {1: 101}), ("logit_bias", {1: NAN}),
    ("logit_bias", {True: 1}), ("logit_bias", {1: "1"}), ("logit_bias", dict.fromkeys(range(513), 1)),
    ("logprobs", -1), ("logprobs", 21), ("logprobs", True), ("prompt_logprobs", 1.0), ("regex", ""), ("regex", 5),
    ("regex", "x" * 70_000), ("choice", []), ("choice", "ab"), ("choice", [""]), ("choice", [1]), ("json_schema", 5),
    ("json_schema", "{"), ("json_schema", {"a": NAN}), ("json_schema", "[1]"), ("json_schema", {"enum": ["x"] * 70_000}),
    ("bad_words", "a"), ("bad_words", [""]), ("bad_words", [" "]), ("bad_words", [5]), ("bad_words", ["a"] * 65),
    ("bad_words", ["a" * 65]), ("bad_words", None), ("allowed_token_ids", []), ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [True]), ("allowed_token_ids", 5), ("allowed_token_ids", ["1"]),
    ("priority", 1.5), ("priority", 2**20), ("timeout_s", 0), ("timeout_s", -1.0), ("timeout_s", NAN),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_BY_ITSELF)
def test_bad_by_itself(name: str, value: Any) -> None:
    """No engine is needed to refuse these."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


BAD_HERE: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 508}, "max_tokens"),
    ({"stop_token_ids": [fake_engine.VOCAB]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
    ({"logit_bias": {fake_engine.VOCAB: 1}}, "logit_bias"),
    ({"allowed_token_ids": [fake_engine.VOCAB]}, "allowed_token_ids"),
    ({"allowed_token_ids": [0, 2], "min_tokens": 1}, "min_tokens"),  # its stop tokens are these two
    ({"bad_words": ["a"]}, "bad_words"),  # nothing here makes tokens of a word
    ({"logprobs": 0}, "logprobs"),  # the fake engine gives none, and has no grammars
    ({"prompt_logprobs": 2}, "prompt_logprobs"),
    ({"regex": "a"}, "regex"),
    ({"num_loops": 5}, "num_loops"),
    ({"max_loops": 5}, "max_loops"),
    ({"min_loops": 5}, "min_loops"),
    ({"min_loops": 1}, "min_loops"),
    ({"min_loops": 4, "max_loops": 3}, "min_loops"),
    ({"max_loops": 1}, "max_loops"),
    ({"gate": "lookahead"}, "gate"),
    ({"gate": "convergence"}, "gate"),
    ({"gate": "fixed"}, "num_loops"),
    ({"gate": "replay"}, "exit_depths"),
    ({"gate": "none", "exit_threshold": 0.5}, "exit_threshold"),
    ({"gate": "none", "min_loops": 2}, "min_loops"),
    ({"gate": "own", "num_loops": 2}, "num_loops"),
    ({"gate": "own", "exit_depths": [2]}, "exit_depths"),
    ({"num_loops": 2, "exit_threshold": 0.5}, "exit_threshold"),
    ({"num_loops": 2, "max_loops": 3}, "max_loops"),
    ({"num_loops": 2, "exit_depths": [2]}, "num_loops"),
    ({"exit_depths": [2, 5]}, "exit_depths"),
    ({"exit_depths": [2, 4], "max_loops": 3}, "exit_depths"),
    ({"exit_depths": [2], "min_loops": 2}, "min_loops"),
    ({"max_tokens": None, "min_tokens": 508}, "min_tokens"),
]


def resolve(info: EngineInfo = INFO, prompt_tokens: int = 5, ordinal: int = 0, **fields: Any) -> RequestParams:
    return RequestDefaults(info, seed=0).resolve(SamplingParams(**fields), prompt_tokens, ordinal)


@pytest.mark.parametrize(("fields", "param"), BAD_HERE)
def test_bad_for_this_engine(fields: dict[str, Any], param: str) -> None:
    """Values that some engine could take, but not one with 4 loops, 512 tokens and these gates."""
    with pytest.raises(RequestError) as caught:
        resolve(**fields)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_more_loops_at_least_than_at_most() -> None:
    """Bug: "min_loops must be between 2 and 3" named a range of which the client had set one end itself."""
    with pytest.raises(RequestError, match="min_loops 4 is more than max_loops 3"):
        resolve(min_loops=4, max_loops=3)


def test_refused_gate_says_which_there_are() -> None:
    with pytest.raises(RequestError, match="lookahead is not one of this model's: none, fixed, replay, own, delayed"):
        resolve(gate="lookahead")


@pytest.mark.parametrize("fields", [{"gate": "own"}, {"exit_depths": [2]}])
def test_depth_indexed_refuses_early_exit(fields: dict[str, Any]) -> None:
    """An early exit would leave holes in a depth-indexed cache; both names are in the message."""
    info = fake_engine.fake_info(EngineConfig(kv_layout="depth_indexed"))
    info = msgspec.structs.replace(info, gates=(Gate.NONE, Gate.FIXED), default_gate=Gate.NONE)
    with pytest.raises(RequestError, match="depth_indexed"):
        resolve(info, **fields)
    assert resolve(info, num_loops=2).max_loops == 2


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(511, 1), (1, 511), (256, 256)])
def test_exactly_at_the_limit_is_accepted(prompt_tokens: int, max_tokens: int) -> None:
    """At the limit accepted, one token more refused: the off-by-one either way would show."""
    assert resolve(prompt_tokens=prompt_tokens, max_tokens=max_tokens).max_tokens == max_tokens
    with pytest.raises(RequestError):
        resolve(prompt_tokens=prompt_tokens, max_tokens=max_tokens + 1)
    with pytest.raises(RequestError):
        resolve(prompt_tokens=prompt_tokens + 1, max_tokens=max_tokens)


@pytest.mark.parametrize("prompt_tokens", [0, 512, 100_000])
def test_prompts_that_leave_no_room(prompt_tokens: int) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(prompt_tokens=prompt_tokens, max_tokens=None)
    assert caught.value.param == "prompt"


def test_defaults_come_from_the_engine() -> None:
    params = resolve(max_tokens=None)
    assert params.max_tokens == 507
    assert (params.gate, params.exit_threshold, params.min_loops, params.max_loops) == (Gate.DELAYED, 0.9, 2, 4)
    assert params.stop_token_ids == (0, 2)


def test_own_values_win() -> None:
    params = resolve(gate="own", exit_threshold=0.25, min_loops=3, max_loops=3, ignore_eos=True, stop_token_ids=[9])
    assert (params.gate, params.exit_threshold, params.min_loops, params.max_loops) == (Gate.OWN, 0.25, 3, 3)
    assert params.stop_token_ids == (9,)


def test_preloop_takes_a_threshold_and_a_least_depth() -> None:
    """Bug: the threshold was refused as having no effect, and the gate always ran at 1, so it could not be tuned."""
    info = msgspec.structs.replace(INFO, gates=(*INFO.gates, Gate.PRELOOP))
    params = resolve(info, gate="preloop", exit_threshold=0.25, min_loops=3)
    assert (params.gate, params.exit_threshold, params.min_loops, params.max_loops) == (Gate.PRELOOP, 0.25, 3, 4)
    default = resolve(info, gate="preloop")
    assert (default.exit_threshold, default.min_loops) == (0.9, 2)


def test_fixed_and_replay() -> None:
    fixed = resolve(num_loops=1)
    assert (fixed.gate, fixed.min_loops, fixed.max_loops) == (Gate.FIXED, 1, 1)
    replay = resolve(exit_depths=[2, 4, 1])
    assert (replay.gate, replay.exit_depths, replay.max_loops) == (Gate.REPLAY, bytes([2, 4, 1]), 4)


def test_seeds() -> None:
    """A given seed is kept (negative ones as their 64 bits); without one, requests differ and runs repeat."""
    assert resolve(seed=7).seed == 7
    assert resolve(seed=-1).seed == 2**64 - 1
    drawn = [resolve(ordinal=ordinal).seed for ordinal in range(100)]
    assert len(set(drawn)) == 100
    assert drawn == [resolve(ordinal=ordinal).seed for ordinal in range(100)]
    assert RequestDefaults(INFO, seed=1).resolve(SamplingParams(), 5, 0).seed not in drawn


@pytest.mark.parametrize("token", [-1, fake_engine.VOCAB, 2**31, 2**70, 1.0, True, "a", None])
def test_bad_token_ids(token: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check_token_ids([1, token], INFO)
    assert caught.value.param == "prompt" and repr(token) in str(caught.value)


def test_frozen() -> None:
    """Parameters are shared between requests, so nothing may change them."""
    with pytest.raises(AttributeError):
        SamplingParams().max_tokens = 3  # type: ignore[misc]


def test_logit_bias_and_penalties_reach_the_engine() -> None:
    """JSON's string keys are token ids; pairs travel as token and float bits, ascending."""
    params = resolve(logit_bias={"7": 1.5, 3: -2}, presence_penalty=1, frequency_penalty=-0.5, repetition_penalty=1.25)
    pairs = np.frombuffer(params.logit_bias, np.int32).reshape(-1, 2)
    assert pairs[:, 0].tolist() == [3, 7] and pairs[:, 1].view(np.float32).tolist() == [-2.0, 1.5]
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1.0, -0.5, 1.25)
    assert params.changes_logits and not resolve(min_tokens=2, ignore_eos=True).changes_logits
    assert resolve(min_tokens=2).changes_logits


def test_logprobs_up_to_what_the_engine_has() -> None:
    """A vocabulary of 5 has no 6 likeliest tokens."""
    info = msgspec.structs.replace(INFO, max_logprobs=5)
    defaults = RequestDefaults(info, seed=0)
    assert defaults.resolve(SamplingParams(logprobs=5), 5, 0).logprobs
    assert not defaults.resolve(SamplingParams(prompt_logprobs=0), 5, 0).logprobs
    with pytest.raises(RequestError, match="at most 5"):
        defaults.resolve(SamplingParams(logprobs=6), 5, 0)


def test_a_constraint_excludes_what_contradicts_it() -> None:
    """Only the end of the sequence may follow a finished grammar; what forbids that end is refused with it."""
    for name, value in (("min_tokens", 1), ("ignore_eos", True)):
        with pytest.raises(RequestError) as caught:
            SamplingParams(regex="a", **{name: value})
        assert caught.value.param == name
    with pytest.raises(RequestError, match="exclude each other"):
        SamplingParams(regex="a", choice=["b"])
    params = SamplingParams(json_schema={"type": "integer"})
    assert msgspec.structs.replace(params, max_tokens=3).json_schema == params.json_schema == '{"type": "integer"}'


def test_min_tokens_needs_a_token_that_is_no_stop() -> None:
    info = msgspec.structs.replace(INFO, vocab_size=3)
    with pytest.raises(RequestError) as caught:
        RequestDefaults(info, seed=0).resolve(SamplingParams(min_tokens=1, stop_token_ids=[1]), 5, 0)
    assert caught.value.param == "min_tokens"
