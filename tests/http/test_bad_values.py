"""Row "bad parameter gives 500 or a device assert": every value below is a 4xx that names its field, and the engine
still answers afterwards. A pass is not luck: the field's name must be in ``param``, not only in the prose."""

import json

import httpx
import pytest

from fakes.chat_tokenizer import VOCAB_SIZE
from fakes.serving_engine import MAX_MODEL_LEN, R_MAX

BAD = [
    ("temperature", -0.1), ("temperature", 2.5), ("temperature", "0.5"), ("temperature", True), ("temperature", [1]),
    ("top_p", 0), ("top_p", 1.1), ("top_p", -1), ("top_p", "1"),
    ("top_k", -2), ("top_k", 1.5), ("top_k", "5"), ("top_k", 2**40),
    ("min_p", -0.5), ("min_p", 2), ("min_p", {}),
    ("seed", "abc"), ("seed", 1.5), ("seed", 2**70),
    ("n", 0), ("n", -1), ("n", 17), ("n", 10**9), ("n", "2"), ("n", 1.5),
    ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 1.5), ("max_tokens", "10"), ("max_tokens", 2**31),
    ("max_tokens", MAX_MODEL_LEN),
    ("min_tokens", -1), ("min_tokens", 17), ("min_tokens", "1"),
    ("stop", ""), ("stop", 5), ("stop", ["ok", ""]), ("stop", ["x"] * 17), ("stop", "x" * 1025), ("stop", [None]),
    ("stop_token_ids", [-1]), ("stop_token_ids", [VOCAB_SIZE]), ("stop_token_ids", "1"), ("stop_token_ids", [0] * 257),
    ("ignore_eos", "yes"), ("ignore_eos", 1),
    ("exit_threshold", -1), ("exit_threshold", "0.5"), ("exit_threshold", {"a": 1}),
    ("min_loops", 0), ("min_loops", R_MAX + 1), ("min_loops", 1.5),
    ("max_loops", 0), ("max_loops", R_MAX + 1), ("max_loops", 10**6),
    ("num_loops", 0), ("num_loops", R_MAX + 1), ("num_loops", "2"),
    ("gate", "nonsense"), ("gate", "convergence"), ("gate", "preloop"), ("gate", 3), ("gate", ""),
    ("priority", "high"), ("priority", 2**40),
    ("timeout_s", 0), ("timeout_s", -1), ("timeout_s", "soon"), ("timeout_s", 1e9),
    ("stream", "true"), ("stream_options", {"include_usage": True}), ("stream_options", 3),
    ("echo", 1), ("return_exit_depths", "yes"), ("request_id", ""), ("request_id", "white space"), ("request_id", 7),
    ("presence_penalty", 2.1), ("presence_penalty", "x"), ("frequency_penalty", -3), ("repetition_penalty", 0),
    ("repetition_penalty", 11), ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "1"}), ("logit_bias", [1]), ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", {str(i): 0 for i in range(513)}), ("logprobs", -1), ("logprobs", 21), ("logprobs", True),
    ("response_format", {"type": "xml"}), ("response_format", {"type": "json_schema"}), ("response_format", "json"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
    ("structured_outputs", {}), ("structured_outputs", {"regex": ""}), ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}), ("structured_outputs", {"json": "{nope"}),
    ("structured_outputs", {"regex": "("}), ("structured_outputs", {"regex": "a" * 70000}),
    ("prompt", ""), ("prompt", []), ("prompt", [[]]), ("prompt", 5), ("prompt", None), ("prompt", {"a": 1}),
    ("prompt", [1, "a"]), ("prompt", [VOCAB_SIZE]), ("prompt", [-1]), ("prompt", ["a"] * 1025), ("prompt", [1.5]),
    ("bad_words", "x"), ("bad_words", [""]), ("bad_words", [" "]), ("bad_words", ["x"] * 65), ("bad_words", ["x" * 65]),
    ("bad_words", ["a long word of bytes"]), ("allowed_token_ids", []), ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [VOCAB_SIZE]), ("allowed_token_ids", 5),
    ("cache_salt", ""), ("cache_salt", 5), ("cache_salt", "x" * 1025),
    ("prompt", "x" * (MAX_MODEL_LEN + 1)),
]  # fmt: skip

UNSUPPORTED = [
    ("regex", "a+"), ("ebnf", "root ::= x"), ("json_schema", {}), ("spaces_between_special_tokens", False),
    ("structured_outputs", {"grammar": "x"}), ("structured_outputs", {"regex": "a", "whitespace_pattern": " "}),
    ("stream_options", {"continuous_usage_stats": True}),
    ("best_of", 2), ("suffix", "x"), ("prompt_logprobs", 1), ("length_penalty", 2),
    ("guided_json", {}), ("guided_regex", "(a+)+$"), ("prompt_embeds", "AAAA"), ("tools", [{}]), ("functions", [{}]),
    ("chat_template", "{{ 7 * 7 }}"), ("use_beam_search", True),
]  # fmt: skip

NEUTRAL = {
    "logprobs": None, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {},
    "best_of": 1, "suffix": None, "response_format": {"type": "text"}, "tools": [], "user": "me", "unheard_of": 1,
}  # fmt: skip


def _post(http: httpx.Client, field: str, value: object) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 16, field: value})


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda value: repr(value)[:24])
def test_bad_value_is_refused_by_name(http: httpx.Client, field: str, value: object) -> None:
    """Row "bad parameter gives 500 or a device assert": each field's range, type and bounds against the model. Bug: a prompt that does not fit was blamed on max_tokens."""
    answer = _post(http, field, value)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert error["type"] == "invalid_request_error" and error["message"] and error["code"]


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED, ids=lambda value: repr(value)[:24])
def test_unsupported_field_is_refused_by_name(http: httpx.Client, field: str, value: object) -> None:
    """What the engine cannot honour is never accepted and ignored; regex bombs are never compiled."""
    answer = _post(http, field, value)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert answer.json()["error"]["code"] == "unsupported_field"


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"tool_calls": [{"id": "1"}]}, "messages[1].tool_calls"),
        ({"tool_call_id": "1"}, "messages[1].tool_call_id"),
        ({"reasoning_content": "hm"}, "messages[1].reasoning_content"),
        ({"content": None, "role": "user"}, "messages: [1].content is null"),
        ({"name": "n" * 65}, "messages[1].name must be 1 to 64 of the characters"),
    ],
)
def test_what_is_wrong_within_a_message_is_named(http: httpx.Client, message: dict, place: str) -> None:
    """Bug: tool calls in a message were accepted and ignored, and a name of 65 characters was an error of messages as a
    whole, without a word of the name."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", **message}]
    answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages" and answer.json()["error"]["message"].startswith(place)


@pytest.mark.parametrize(
    "field",
    [
        {"top_logprobs": 0}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}, {"max_tokens": 16.0},
        {"n": 1.0}, {"tool_choice": "none", "tools": []}, {"seed": 5.0},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": None}]},
        {"messages": [{"role": "user", "content": "x", "refusal": None, "annotations": []}]},
    ],
)  # fmt: skip
def test_what_asks_for_nothing_is_accepted(http: httpx.Client, field: dict) -> None:
    """Bug: clients that send a field's default, or 16.0 for 16, were refused."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **field}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_errors_name_what_the_client_wrote(http: httpx.Client) -> None:
    """Bug: max_completion_tokens was blamed as max_tokens; the name of a schema as its whole format; a compressed body and
    the address of an API that is not here got no word of why."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 5000}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "max_completion_tokens" and error["message"].startswith("max_completion_tokens 5000")
    named = {"type": "json_schema", "json_schema": {"name": "n" * 65, "schema": {}}}
    error = _post(http, "response_format", named).json()["error"]
    assert error["message"].startswith("response_format.json_schema.name must be a text of at most 64")
    answer = http.post("/v1/completions", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert answer.status_code == 415 and "gzip" in answer.json()["error"]["message"]
    answer = http.post("/v1/responses", json={"input": "x"})
    assert answer.status_code == 404 and "/v1/chat/completions" in answer.json()["error"]["message"]
    error = http.post("/v1/completions", json={"prompt": "x", "tools": [{}]}).json()["error"]
    assert error["param"] == "tools" and "call no tools" in error["message"]


def test_neutral_and_unknown_fields_are_accepted(http: httpx.Client) -> None:
    """Clients that send every field with its default work; unknown extras are ignored."""
    plain = http.post("/v1/completions", json={"prompt": "hello", "temperature": 0})
    answer = http.post("/v1/completions", json={"prompt": "hello", "temperature": 0, **NEUTRAL})
    assert answer.status_code == 200
    assert answer.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize(
    "body",
    [b"", b"nope", b"[]", b'"x"', b"null", b"{", b'{"prompt": "\\ud800"}', b'{"prompt":"a","temperature":NaN}',
     b'{"prompt":"a","temperature":Infinity}', b'{"prompt":' + b"[" * 100_000, b"\xff\xfe{}", b'{"prompt":"\xff"}',
     b'{"prompt":"a","seed":' + b"9" * 5000 + b"}"],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_broken_body_is_refused(http: httpx.Client, body: bytes) -> None:
    """No JSON, wrong JSON, half a surrogate pair, non-finite numbers, deep nesting, endless digits: 400, never 500.
    Bugs: invalid UTF-8 and deep nesting had no ``code``; half a pair was "Value error, text holds ..."."""
    paths = ["/v1/completions", "/v1/chat/completions"]
    paths += ["/detokenize", "/abort"] + ["/tokenize"] * (b"temperature" not in body and b"seed" not in body)
    for path in paths:
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, (path, answer.text)
        error = answer.json()["error"]
        assert error["message"] and error["code"] in ("invalid_json", "invalid_value"), (path, error)
        assert "Value error" not in error["message"]


@pytest.mark.parametrize(
    ("messages", "extra", "param"),
    [
        ([], {}, "messages"), ("hi", {}, "messages"), ([{"role": "user"}], {}, "messages"),
        ([{"role": "<|im_start|>", "content": "x"}], {}, "messages"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], {}, "messages"),
        ([{"role": "user", "content": "x" * MAX_MODEL_LEN}], {}, "messages"),
        ([{"role": "user", "content": "x"}], {"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
        ([{"role": "user", "content": "x"}], {"chat_template_kwargs": {"enable_thinking": "<|x|>"}}, "chat_template_kwargs"),
        ([{"role": "user", "content": "x"}], {"max_completion_tokens": 0}, "max_completion_tokens"),
        ([{"role": "user", "content": "x"}], {"logprobs": 2}, "logprobs"),
        ([{"role": "user", "content": "x"}], {"top_logprobs": 2}, "top_logprobs"),
        ([{"role": "user", "content": "x"}], {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ([{"role": "user", "content": "x"}], {"tools": [{"type": "function"}]}, "tools"),
    ],
)  # fmt: skip
def test_bad_chat_is_refused_by_name(http: httpx.Client, messages: object, extra: dict, param: str) -> None:
    """The same for conversations: other content than text, control tokens as roles, templates' private arguments."""
    answer = http.post("/v1/chat/completions", json={"messages": messages, **extra})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_engine_is_alive_after_all_of_it(http: httpx.Client) -> None:
    """Runs last in this file: the same server still generates, and holds nothing."""
    answer = _post(http, "temperature", 0)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 16
    assert json.loads(http.get("/health").text)["status"] == "ok"


@pytest.mark.parametrize("max_tokens", [1, 2, MAX_MODEL_LEN // 2])
@pytest.mark.parametrize("total", [MAX_MODEL_LEN - 1, MAX_MODEL_LEN, MAX_MODEL_LEN + 1, MAX_MODEL_LEN + 2])
def test_prompt_at_the_limit(http: httpx.Client, total: int, max_tokens: int) -> None:
    """Row "prompt at the limit, one below, one above; prompt + max_tokens the same": together up to max_model_len they
    are served, beyond it refused, plain or as a stream."""
    body = {"prompt": [65] * (total - max_tokens), "max_tokens": max_tokens}
    for stream in (False, True):
        answer = http.post("/v1/completions", json={**body, "stream": stream})
        assert answer.status_code == (200 if total <= MAX_MODEL_LEN else 400)


@pytest.mark.parametrize(("length", "param"), [(MAX_MODEL_LEN - 1, "max_tokens"), (MAX_MODEL_LEN, "prompt")])
def test_whose_fault_it_is(http: httpx.Client, length: int, param: str) -> None:
    """Bug: a prompt that leaves no room for even one token was blamed on max_tokens. One token less and it is right."""
    answer = http.post("/v1/completions", json={"prompt": [65] * length, "max_tokens": 2})
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, "context_length_exceeded")
