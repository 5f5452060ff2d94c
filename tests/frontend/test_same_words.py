"""A bad value is refused in the same words by HTTP, ZMQ, Python and the command line: the ranges have one home."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from depthbatch.common.errors import RequestError
from depthbatch.deploy.cli import main as cli
from depthbatch.frontend.client import Client
from depthbatch.frontend.http.request_fields import ENGINE_FIELDS
from depthbatch.frontend.http.schemas import ChatRequest, CompletionRequest
from depthbatch.frontend.params import RANGES, SamplingParams
from fakes.running import LIMIT_S, RunningFrontend

HTTP_NAMES = set(CompletionRequest.model_fields)
BAD: list[tuple[str, Any]] = [
    *((name, bounds.high + 1) for name, bounds in RANGES.items() if name in HTTP_NAMES),
    *((name, bounds.low - 1) for name, bounds in RANGES.items() if name in HTTP_NAMES and name != "max_tokens"),
    *((name, "much") for name in RANGES if name in HTTP_NAMES),
    ("stop", ["", "a"]), ("stop", 5), ("stop", {}), ("stop", ["x"] * 17), ("stop", "x" * 1025), ("stop", [[1]]),
    ("stop_token_ids", [1.5]), ("stop_token_ids", "1"), ("stop_token_ids", [0] * 257), ("stop_token_ids", [264]),
    ("exit_depths", [0]), ("exit_depths", [256]), ("exit_depths", 2), ("exit_depths", [2, 9]),
    ("bad_words", [""]), ("bad_words", "x"), ("bad_words", ["x" * 65]), ("bad_words", ["x"] * 65), ("bad_words", [1]),
    ("allowed_token_ids", []), ("allowed_token_ids", [264]), ("allowed_token_ids", [1.5]), ("allowed_token_ids", 5),
    ("cache_salt", ""), ("cache_salt", 5), ("cache_salt", "x" * 1025),
    ("gate", "nonsense"), ("gate", 3), ("gate", "replay"), ("gate", "fixed"), ("gate", "lookahead"),
    ("ignore_eos", 1), ("speculation", 0), ("logit_bias", {"x": 1}), ("logit_bias", {"5": 101.0}), ("logit_bias", [1]),
    ("num_loops", 5), ("min_loops", 1), ("max_tokens", 512), ("max_tokens", 2000),
]  # fmt: skip


@pytest.fixture(scope="module")
def frontend() -> Iterator[RunningFrontend]:
    with pytest.MonkeyPatch.context() as patch, RunningFrontend(patch) as running:
        yield running


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: repr(value)[:20])
def test_same_words_everywhere(frontend: RunningFrontend, name: str, value: Any) -> None:
    """Every range just beyond either end and with a text, and what is no number. What SamplingParams alone cannot know,
    since it depends on the engine, HTTP and ZMQ say alike."""
    answer = httpx.post(frontend.url + "/v1/completions", json={"prompt": [5], name: value}, timeout=LIMIT_S)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] in (name, "exit_depths", "num_loops")
    assert "\n" not in error["message"] and len(error["message"]) < 250
    if name != "seed" or isinstance(value, str):  # msgpack has no whole number beyond that range
        client = Client(f"ipc://{frontend.engine.run_dir}/api", LIMIT_S)
        with pytest.raises(RuntimeError) as native:
            list(client.generate([5], **{name: value}))
        client.close()
        assert error["message"] == str(native.value)
    try:
        SamplingParams(**{name: value})
    except RequestError as own:
        assert str(own) == error["message"] and own.param == name


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "num_loops"])
@pytest.mark.parametrize("beyond", [-1, 1, "much"])
def test_the_command_line_says_the_same(capsys: pytest.CaptureFixture[str], name: str, beyond: Any) -> None:
    """Before any process is started."""
    bounds = RANGES[name]
    value = beyond if isinstance(beyond, str) else bounds.low - 1 if beyond < 0 else bounds.high + 1
    with pytest.raises(RequestError) as own:
        SamplingParams(**{name: value})
    assert cli.main(["generate", f"--{name.replace('_', '-')}={value}", "-p", "x"]) == 2
    assert capsys.readouterr().err == f"depthbatch: error: {own.value}\n"


def test_the_document_has_the_ranges_of_the_table() -> None:
    """OpenAPI's minimum and maximum of every number are those that the errors name."""
    for model in (CompletionRequest, ChatRequest):
        for name, field in model.model_json_schema()["properties"].items():
            number = next((arm for arm in field.get("anyOf", ()) if arm.get("type") in ("integer", "number")), None)
            if name in RANGES and number is not None and name != "max_tokens":
                low = number.get("minimum", number.get("exclusiveMinimum"))
                assert (low, number["maximum"]) == (RANGES[name].low, RANGES[name].high), name
                assert ("exclusiveMinimum" in number) == RANGES[name].low_open


def test_http_names_are_not_the_engines(frontend: RunningFrontend) -> None:
    """A client of HTTP names a request as another API's is called: only requests that came by HTTP have names there."""
    native = Client(f"ipc://{frontend.engine.run_dir}/api", LIMIT_S)
    messages = native.generate([7], max_tokens=100, ignore_eos=True)
    assert next(messages)["type"] == "tokens"
    names = list(frontend.engine._named)
    answer = httpx.post(frontend.url + "/abort", json={"request_id": names}, timeout=LIMIT_S)
    assert names and answer.json() == {"aborted": []}
    assert list(messages)[-1]["finish_reason"] == "length"
    native.close()
    assert {"temperature", "top_k", "seed", "stop", "timeout_s", "exit_depths"} <= set(ENGINE_FIELDS)
    own = {"max_tokens", "logprobs", "prompt_logprobs", "json_schema", "regex", "choice"}  # spelled otherwise by HTTP
    assert set(ENGINE_FIELDS) == set(SamplingParams.__struct_fields__) - own


def test_a_seed_draws_the_same_by_every_way(frontend: RunningFrontend) -> None:
    """Bug: HTTP took a negative seed modulo 2**63, ZMQ and Python as its 64 bits. What reaches the scheduler is asked."""
    seeds = [-(2**63), -1, 0, 2**63 - 1, 2**63, 2**64 - 1]
    asked: list[int] = []
    original = frontend.engine._client.submit_all

    def spy(requests: Any, *rest: Any) -> list[int]:
        asked.extend(frontend.engine._client.check(ids, params).seed for ids, params in requests)
        return original(requests, *rest)

    frontend.engine._client.submit_all = spy  # type: ignore[method-assign]
    try:
        client = Client(f"ipc://{frontend.engine.run_dir}/api", LIMIT_S)
        for seed in seeds:
            body = {"prompt": [5], "max_tokens": 1, "seed": seed}
            assert httpx.post(frontend.url + "/v1/completions", json=body, timeout=LIMIT_S).status_code == 200
            list(client.generate([5], max_tokens=1, seed=seed))
        client.close()
    finally:
        frontend.engine._client.submit_all = original  # type: ignore[method-assign]
    assert asked == [seed % 2**64 for seed in seeds for _ in range(2)]
