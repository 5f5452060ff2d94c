"""What a model directory says to the frontend: its chat template, or another, and its sampling defaults."""

import json
import shutil
from pathlib import Path

import httpx
import pytest

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError, ModelError, RequestError
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.frontend.llm import LLM
from depthbatch.frontend.params import SamplingParams
from depthbatch.frontend.prompts import ModelTexts, load_texts
from fakes.chat_tokenizer import byte_tokenizer
from fakes.http_server import LiveServer

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The demo's tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model_dir("demo") / name, tmp_path)
    return tmp_path


def test_generation_config_gives_defaults(model: Path) -> None:
    """Bug: the sampling that a model's authors recommend was not applied, unlike in vLLM. null says nothing, what is no
    sampling is left alone, and the option turns it off."""
    path = model / "generation_config.json"
    values = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": None,
        "max_new_tokens": 7,
        "do_sample": True,
        "eos_token_id": 2,
    }
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(values).encode())
    expected = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 7}
    assert load_texts(EngineConfig(model=str(model))).sampling_defaults == expected
    assert load_texts(EngineConfig(model=str(model), generation_config="off")).sampling_defaults == {}
    for broken in ('{"temperature": 9}', "[]", "{"):
        path.write_text(broken)
        with pytest.raises(ModelError, match=r"generation_config.json.*--generation-config off"):
            load_texts(EngineConfig(model=str(model)))


def test_a_chat_template_of_ones_own(model: Path) -> None:
    """--chat-template, for models that have none or a wrong one."""
    template = model / "own.jinja"
    template.write_bytes(b"\xef\xbb\xbf{{ messages[0].content }}!")
    tokenizer = load_texts(EngineConfig(model=str(model), chat_template=str(template))).tokenizer
    assert tokenizer is not None and tokenizer.decode(tokenizer.encode_chat(MESSAGES)) == "x!"
    with pytest.raises(ConfigError, match="cannot read"):
        load_texts(EngineConfig(model=str(model), chat_template=str(model / "none")))
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_texts(EngineConfig(model=str(model), chat_template=str(template)))


def test_defaults_reach_requests_that_do_not_say() -> None:
    """On HTTP, where a field that the client sends wins, and where the answer's length is chat's alone."""
    with LiveServer(byte_tokenizer()) as server, httpx.Client(base_url=server.url) as http:
        server.service.sampling_defaults = {"top_k": 1, "temperature": 0.5, "max_tokens": 5}
        completion = {"prompt": "x"}
        assert http.post("/v1/completions", json=completion).json()["usage"]["completion_tokens"] == 16
        chat = {"messages": MESSAGES, "ignore_eos": True}
        assert http.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] == 5
        longer = http.post("/v1/chat/completions", json={**chat, "max_tokens": 9}).json()
        assert longer["usage"]["completion_tokens"] == 9
        assert [params.top_k for params in server.engine.resolved] == [1, 1, 1]
        http.post("/v1/completions", json={**completion, "top_k": 3, "temperature": 1})
        assert (server.engine.resolved[-1].top_k, server.engine.resolved[-1].temperature) == (3, 1.0)


@pytest.mark.usefixtures("fake_engine")
def test_llm_chats(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """LLM.chat is generate over the template's ids, for one conversation or several; a bar when asked for; the model's
    defaults without params."""
    demo = load_texts(EngineConfig()).tokenizer
    monkeypatch.setattr("depthbatch.frontend.llm.load_texts", lambda config: ModelTexts(demo, {"max_tokens": 4}))
    params = SamplingParams(max_tokens=3)
    with LLM("demo") as llm:
        assert "sampling defaults of generation_config.json: max_tokens 4" in capsys.readouterr().err
        assert demo is not None
        prompt = demo.encode_chat(MESSAGES)
        (plain,) = llm.generate([prompt], params)
        (one,) = llm.chat(MESSAGES, params)
        assert (one.prompt_token_ids, one.token_ids) == (prompt, plain.token_ids)
        assert capsys.readouterr().err == ""
        both = llm.chat([MESSAGES, MESSAGES], use_tqdm=True)
        assert [len(output.token_ids) for output in both] == [4, 4]
        assert "2/2" in capsys.readouterr().err
        with pytest.raises(RequestError, match="no content to continue"):
            llm.chat([{"role": "user"}], params, continue_final_message=True)
        for none in ("hi", [], [MESSAGES, []]):  # bug: an AttributeError, and an answer to nobody
            with pytest.raises(RequestError, match="messages must be a conversation"):
                llm.chat(none, params)  # type: ignore[arg-type]
