"""The routes and fields that routers in front of several servers need, as their own releases ask for them."""

import httpx
import pytest

from depthbatch import __version__
from depthbatch.common.config import EngineConfig
from depthbatch.common.stats import CoreStats, PrefixCacheStats
from depthbatch.frontend.http import request_fields
from depthbatch.frontend.http.router_routes import load_of
from depthbatch.frontend.tokenizer import Tokenizer
from fakes.http_server import LiveServer
from fakes.serving_engine import fake_info

ADDED_BY_ROUTERS = {  # to every chat body, by vllm-router 0.1.17 and smg 1.13.0
    "no_stop_trim": False,
    "ignore_eos": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "include_reasoning": True,
    "logprobs": False,
}


def test_load_is_what_the_scheduler_says(live: LiveServer, http: httpx.Client) -> None:
    """Load and KV tokens in both shapes, of an engine of 99 blocks of 16 tokens; while there is no core, 503."""
    before = live.probe.core
    live.probe.core = CoreStats(running=3, waiting=2, waiting_tokens=50, kv_usage=33 / 99)
    try:
        assert http.get("/get_load").json() == {"load": 5}
        answer = http.get("/v1/loads?include=core,disagg,queues,memory").json()
        assert answer["version"] == __version__
        assert answer["loads"] == [
            {
                "dp_rank": 0,
                "num_running_reqs": 3,
                "num_waiting_reqs": 2,
                "num_used_tokens": 33 * 16,
                "num_total_tokens": 33 * 16 + 50,
                "max_total_num_tokens": 99 * 16,
                "max_running_requests": 8,
                "token_usage": 0.3333,
                "cache_hit_rate": 0.0,
            }
        ]
        live.probe.core = None
        for path in ("/get_load", "/v1/loads"):
            refused = http.get(path)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
    finally:
        live.probe.core = before


def test_hit_rate_is_of_prompt_tokens() -> None:
    stats = CoreStats(prefix_cache=PrefixCacheStats(queries=300, hits=100))
    assert load_of(stats, fake_info(), EngineConfig())["cache_hit_rate"] == 0.3333


def test_server_and_model_tell_what_runs(http: httpx.Client) -> None:
    """Under SGLang's names, new and old."""
    server = http.get("/server_info").json()
    assert server == http.get("/get_server_info").json()
    assert (server["served_model_name"], server["page_size"], server["max_total_num_tokens"]) == ("fake", 16, 1584)
    assert (server["tp_size"], server["dp_size"], server["max_running_requests"]) == (1, 1, 8)
    model = http.get("/model_info").json()
    assert model == http.get("/get_model_info").json()
    assert model["is_generation"] is True and model["model_type"] == "fake"
    assert http.get("/v1/models").json()["data"][0]["owned_by"] == "depthbatch"


def test_routers_probe_without_a_key(tokenizer: Tokenizer) -> None:
    """Load is what /metrics tells, too; what names the model wants the key."""
    with LiveServer(tokenizer, api_key="k") as server, httpx.Client(base_url=server.url, timeout=20) as http:
        assert http.get("/get_load").status_code == http.get("/v1/loads").status_code == 200
        assert http.get("/server_info").status_code == http.get("/model_info").status_code == 401


def test_fields_that_routers_add_are_taken_in_silence(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one of them, at the value that asks for nothing: no refusal, no word in the log. Values that ask are refused."""
    warned: list[str] = []
    monkeypatch.setattr(request_fields.log, "warning", lambda text, *args: warned.append(text % args))
    monkeypatch.setattr(request_fields, "_warned", set())
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert http.post("/v1/chat/completions", json={**chat, **ADDED_BY_ROUTERS}).status_code == 200
    assert not warned
    http.post("/v1/chat/completions", json={**chat, "nobody_knows_this": 1})
    assert len(warned) == 1, "the log is listened to"
    for name in ("no_stop_trim", "return_hidden_states"):
        refused = http.post("/v1/chat/completions", json={**chat, name: True})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == name


def test_render_gives_the_tokens_that_generation_counts(http: httpx.Client) -> None:
    """Text, ids, several prompts, a conversation: the tokens of a prompt without any output, as many as ``usage`` says."""
    body = {"prompt": ["hello", "hi"], "max_tokens": 1}
    rendered = http.post("/v1/completions/render", json=body).json()
    assert [bytes(each["token_ids"]) for each in rendered] == [b"hello", b"hi"]
    assert http.post("/v1/completions/render", json={"prompt": [5, 6]}).json()[0]["token_ids"] == [5, 6]
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    ids = http.post("/v1/chat/completions/render", json=chat).json()["token_ids"]
    assert len(ids) == http.post("/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens"] > 5
    for bad in ({"prompt": "x", "n": 99}, {"prompt": ""}, {"prompt": "x", "tools": [{}]}):
        assert http.post("/v1/completions/render", json=bad).status_code == 400
