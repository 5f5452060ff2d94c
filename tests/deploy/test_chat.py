"""``depthbatch chat`` against a server: what is typed reaches the template, answers stream, figures are right."""

import io
import re
from collections.abc import Iterator

import pytest
from depthbatch.common.errors import EngineDeadError
from depthbatch.deploy.chat import RemoteModel, converse
from serving_fakes.process import free_port
from serving_fakes.server import LiveServer
from serving_fakes.tokenizer import byte_tokenizer

FIGURES = re.compile(r"\[(\d+) tokens, [\d.]+ tokens/s, mean depth ([\d.]+)\]")


@pytest.fixture(scope="module", params=[True, False], ids=["template", "no template"])
def live(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    with LiveServer(byte_tokenizer(request.param)) as server:
        yield server


def chat(live: LiveServer, text: str, **request: object) -> str:
    out = io.StringIO()
    model = RemoteModel(live.url, "", {"max_tokens": 10, "temperature": 0, **request})
    converse(model, [], io.StringIO(text), out)
    return out.getvalue()


def test_lines_are_answered(live: LiveServer) -> None:
    """Two turns and the end of input; the same line after /reset gets the same answer as at first."""
    shown = chat(live, "hello\nagain\n/reset\nhello\n", num_loops=2)
    answers = shown.split("> ")[1:]
    assert len(answers) == 5 and answers[0].splitlines()[0] == answers[3].splitlines()[0]
    tokens, depth = FIGURES.findall(shown)[0]
    assert tokens == "10" and float(depth) == 2


def test_refusals_do_not_end_the_chat(live: LiveServer) -> None:
    """A line that is too long is told; the next one is answered."""
    shown = chat(live, "x" * 600 + "\nhello\n")
    assert "512" in shown and len(FIGURES.findall(shown)) == 1


def test_no_server_is_one_clear_error() -> None:
    """The address that nobody listens on is named."""
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineDeadError, match=url):
        RemoteModel(url, "", {})
