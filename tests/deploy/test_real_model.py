"""HTTP over the whole engine on the demo model: the same tokens and depths as the Python API gives, output that obeys
its constraint, conversations through the model's template. Weights are seeded random ones, so that the files that
train the demo model do not matter here."""

import asyncio
import json
import re
from collections.abc import Iterator

import httpx
import openai
import pytest

from depthbatch import LLM, SamplingParams
from fakes.serve_process import ServeProcess

MODEL = "demo"
OPTIONS = {"load_format": "dummy", "kv_blocks": 128, "max_num_seqs": 8, "device": "cpu", "threads": 1}
PROMPTS = [[5, 17, 3], [9, 8, 7, 6, 5, 4], [100, 2, 30, 4]]


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    options = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with ServeProcess(*options, model=MODEL) as server:
        yield server


def test_http_equals_python(server: ServeProcess) -> None:
    """Greedy at two fixed depths, at the model's gate, and sampled with a seed: tokens and depths of every prompt, all
    of them in flight together."""
    cases = [
        {"temperature": 0.0, "num_loops": 2},
        {"temperature": 0.0, "num_loops": 4},
        {"temperature": 0.0, "gate": "own", "exit_threshold": 0.5},
        {"temperature": 0.8, "seed": 11, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {"5": 3.0}},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.0, "exit_depths": [2, 4, 3, 2]},
        {"temperature": 1.5, "seed": -3, "top_k": 40, "min_p": 0.01, "frequency_penalty": 1.0},
        {"temperature": 0.0, "gate": "delayed", "exit_threshold": 0.3, "min_loops": 3, "max_loops": 3},
        {"temperature": 0.0, "gate": "none"},
    ]
    body = {
        "prompt": PROMPTS,
        "max_tokens": 12,
        "ignore_eos": True,
        "return_exit_depths": True,
        "return_token_ids": True,
    }
    answers = [httpx.post(server.url + "/v1/completions", json={**body, **case}, timeout=60) for case in cases]
    with LLM(MODEL, quiet=True, **OPTIONS) as llm:
        for case, answer in zip(cases, answers, strict=True):
            assert answer.status_code == 200, answer.text
            outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True, **case))
            choices = answer.json()["choices"]
            assert [choice["token_ids"] for choice in choices] == [output.token_ids for output in outputs]
            assert [choice["exit_depths"] for choice in choices] == [output.exit_depths for output in outputs]
            for choice, output in zip(choices, outputs, strict=True):
                scored = choice["logprobs"]["token_logprobs"] if "logprobs" in case else []
                assert scored == pytest.approx([entry.logprob for entry in output.logprobs], abs=1e-6)
    depths = {depth for choice in answers[2].json()["choices"] for depth in choice["exit_depths"][1:]}
    texts = [[choice["token_ids"] for choice in answer.json()["choices"]] for answer in answers]
    assert texts[0] != texts[1] and depths != {4} and texts[4] != texts[5]
    assert all(choice["exit_depths"][:6] == [4, 2, 4, 3, 2, 4] for choice in answers[6].json()["choices"])
    assert {depth for choice in answers[8].json()["choices"] for depth in choice["exit_depths"][1:]} == {3}


def test_words_that_may_not_be_said(server: ServeProcess) -> None:
    """Bad words and allowed tokens by the model's own tokenizer, over HTTP and in Python alike: only digits, and of
    those not the pairs that were said before."""
    digits = httpx.post(server.url + "/tokenize", json={"prompt": "0123456789"}, timeout=60).json()["tokens"]
    fields = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "allowed_token_ids": digits}

    def ask(**more: object) -> str:
        body = {"prompt": PROMPTS[0], **fields, **more}
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    free = ask()
    assert len(free) == 12 and free.isdigit()
    words = sorted({free[place : place + 2] for place in range(11)})
    held = ask(bad_words=words)
    assert len(held) == 12 and held.isdigit() and not any(word in held for word in words)
    with LLM(MODEL, quiet=True, **OPTIONS) as llm:
        [output] = llm.generate([PROMPTS[0]], SamplingParams(bad_words=words, **fields))
    assert output.text == held
    error = httpx.post(server.url + "/v1/completions", json={"prompt": "a", "bad_words": ["0" * 17]}, timeout=60)
    assert error.status_code == 400 and "17 tokens, more than 16" in error.json()["error"]["message"]


def test_what_ends_an_output(server: ServeProcess) -> None:
    """Stop token ids, stop strings and min_tokens against the same greedy output without them."""
    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}

    def ask(**fields: object) -> dict[str, object]:
        answer = httpx.post(server.url + "/v1/completions", json={**body, **fields}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]  # type: ignore[no-any-return]

    plain = ask()
    ids, text = list(plain["token_ids"]), str(plain["text"])  # type: ignore[call-overload]
    stopped = ask(stop_token_ids=[ids[3]])
    first = ids.index(ids[3])
    assert stopped["token_ids"] == ids[: first + 1] and stopped["stop_reason"] == ids[3]
    assert ask(min_tokens=16, stop_token_ids=[ids[3]])["finish_reason"] == "length"
    cut = ask(stop=[text[2:5]])
    assert cut["text"] == text[: text.index(text[2:5])] and cut["stop_reason"] == text[2:5]
    eos = ask(ignore_eos=False)
    assert eos["finish_reason"] in ("stop", "length")


def test_echo_with_prompt_logprobs(server: ServeProcess) -> None:
    """What lm-eval asks for, on real weights: the scores of the prompt's tokens are those of the Python API."""
    body = {"prompt": PROMPTS, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
    with LLM(MODEL, quiet=True, **OPTIONS) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=1, temperature=0.0, logprobs=1, prompt_logprobs=1))
    for choice, output in zip(answer["choices"], outputs, strict=True):
        scores = choice["logprobs"]["token_logprobs"]
        own = [entry.logprob for entry in (*output.prompt_logprobs, *output.logprobs)]
        assert scores[0] is None and scores[1:] == pytest.approx(own, abs=1e-5)


def test_priority_jumps_the_queue(server: ServeProcess) -> None:
    """Slots are 8: of 24 long requests that fill and await them, and one of higher priority sent last, that one is
    answered before any of the 16 that wait. Its own work is one token, but so it is for the one without priority that
    is sent with it, which must come after all that were waiting had their turn."""
    long = {"prompt": PROMPTS[0], "max_tokens": 200, "ignore_eos": True, "num_loops": 4}
    finished: list[str] = []

    async def ask(client: httpx.AsyncClient, name: str, body: dict[str, object]) -> None:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        finished.append(name)

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            jobs = [asyncio.create_task(ask(client, "long", long)) for _ in range(24)]
            while 'num_requests_waiting{process="scheduler"} 16.0' not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.01)
            short = {"prompt": PROMPTS[1], "max_tokens": 1}
            jobs.append(asyncio.create_task(ask(client, "plain", short)))
            jobs.append(asyncio.create_task(ask(client, "urgent", {**short, "priority": 5})))
            await asyncio.gather(*jobs)

    asyncio.run(main())
    assert finished.index("urgent") <= 8 and finished.index("plain") >= 16 > finished.index("urgent")


def test_tokenizer_info(server: ServeProcess) -> None:
    """What a client reads off it about the shipped tokenizer."""
    info = httpx.get(server.url + "/tokenizer_info").json()
    assert info["vocab_size"] == 262 and info["has_chat_template"] == (info["chat_template"] is not None)


def test_too_long_for_the_kv_memory_is_refused(server: ServeProcess) -> None:
    """Row "request needs more KV than exists and the queue deadlocks": refused at submit, with a 400."""
    answer = httpx.post(server.url + "/v1/completions", json={"prompt": [1] * 8, "max_tokens": 100_000})
    assert answer.status_code == 400 and answer.json()["error"]["param"] in ("max_tokens", "prompt")


def test_chat_is_the_template_and_then_a_completion(server: ServeProcess) -> None:
    """A conversation gives what its tokens give as a prompt; they are those of /tokenize."""
    messages = [{"role": "user", "content": "12+30="}]
    tokens = httpx.post(server.url + "/tokenize", json={"messages": messages}).json()["tokens"]
    asked = {"max_tokens": 10, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    chat = httpx.post(server.url + "/v1/chat/completions", json={**asked, "messages": messages}).json()
    plain = httpx.post(server.url + "/v1/completions", json={**asked, "prompt": tokens}).json()
    assert chat["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    assert chat["usage"]["prompt_tokens"] == len(tokens) > len("12+30=")


def test_constrained_output(server: ServeProcess) -> None:
    """The openai client's JSON schema, and vLLM's regex and choice: random weights would never write these, however
    often they are asked; what cannot be compiled is refused by the client's name for it."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        asked = {"model": "demo", "prompt": "12+30=", "max_tokens": 60}
        for seed in range(3):
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
            text = client.completions.create(**asked, seed=seed, extra_body={"response_format": form}).choices[0].text
            assert set(json.loads(text)) == {"n", "ok"} and 0 <= json.loads(text)["n"] <= 99
            for own, pattern in (
                ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
                ({"choice": ["yes", "no"]}, "yes|no"),
            ):
                answer = client.completions.create(**asked, seed=seed, extra_body={"structured_outputs": own})
                assert re.fullmatch(pattern, answer.choices[0].text) and answer.choices[0].finish_reason == "stop"
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**asked, extra_body={"structured_outputs": {"regex": "("}})
        assert refused.value.param == "structured_outputs"
