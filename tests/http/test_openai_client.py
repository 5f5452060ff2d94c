"""The published ``openai`` client, retries off, against a real socket: what it parses is what the API promises."""

import asyncio
from collections.abc import Iterator

import openai
import pytest

from fakes.http_server import LiveServer


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    """Listing and fetching by the name that requests use."""
    names = [model.id for model in client.models.list()]
    assert names == ["fake"] and client.models.retrieve("fake").id == "fake"


def test_completion_and_stream(client: openai.OpenAI) -> None:
    """Both ways give the same text and the same usage, extras through extra_body."""
    request = {"model": "fake", "prompt": "hello", "max_tokens": 12, "seed": 7}
    plain = client.completions.create(**request, extra_body={"return_exit_depths": True})
    chunks = list(client.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == plain.choices[0].text
    assert chunks[-1].usage == plain.usage
    assert plain.usage.model_extra["loops"] == sum(plain.choices[0].model_extra["exit_depths"])


def test_chat_and_stream(client: openai.OpenAI) -> None:
    """The chat resource, with two choices and a stop string."""
    request = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "n": 2, "seed": 1, "stop": ["a"]}
    plain = client.chat.completions.create(**request)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**request, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in plain.choices]
    assert plain.choices[0].message.role == "assistant"


def test_stream_helper(client: openai.OpenAI) -> None:
    """The client's own accumulating stream, which is stricter about the order of events than a plain loop."""
    request = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "seed": 4, "max_tokens": 90}
    with client.chat.completions.stream(**request) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == client.chat.completions.create(**request).choices[0].message.content


def test_logprobs(client: openai.OpenAI) -> None:
    """Both shapes, as the client's own classes; streamed pieces join to the plain answer's lists."""
    request = {"model": "fake", "prompt": "hi", "max_tokens": 6, "seed": 1}  # ASCII alone
    plain = client.completions.create(**request, logprobs=2).choices[0]
    assert "".join(plain.logprobs.tokens) == plain.text and len(plain.logprobs.token_logprobs) == 6
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(**request, logprobs=2, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [entry for piece in streamed for entry in getattr(piece, name)]
        assert joined == getattr(plain.logprobs, name)
    chat = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "seed": 1}
    choice = client.chat.completions.create(**chat, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert bytes(byte for token in content for byte in token.bytes).decode("utf-8", "replace") == choice.message.content
    assert all(len(token.top_logprobs) == 3 and token.top_logprobs[0].token == token.token for token in content)


def test_errors_are_the_clients_own_types(client: openai.OpenAI) -> None:
    """400, 404 and 503 arrive as the exceptions that programs catch, with param and code."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="fake", prompt="x", temperature=9)
    assert bad.value.param == "temperature" and bad.value.code == "invalid_value"
    with pytest.raises(openai.BadRequestError) as tools:
        client.completions.create(model="fake", prompt="x", suffix="y")
    assert tools.value.param == "suffix" and tools.value.code == "unsupported_field"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"


def test_error_event_raises_in_the_stream(live: LiveServer, client: openai.OpenAI) -> None:
    """An internal error after the first token is an exception in the reader's loop, not a short answer."""
    live.engine.fail_at = 3
    try:
        seen = 0
        with pytest.raises(openai.APIError, match="internal error"):
            for _ in client.completions.create(model="fake", prompt="x", stream=True):
                seen += 1
        assert seen == 3
    finally:
        live.engine.fail_at = None


def test_async_client_many_at_once(live: LiveServer) -> None:
    """50 concurrent async streams on one client: each gets its own text."""

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:

            async def one(seed: int) -> str:
                request = {"model": "fake", "prompt": "x", "max_tokens": 20, "seed": seed}
                stream = await client.completions.create(**request, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            together = await asyncio.gather(*(one(seed) for seed in range(50)))
            assert [await one(seed) for seed in range(0, 50, 10)] == list(together[::10])
            assert len(set(together)) == 50

    asyncio.run(run())
