"""``depthbatch chat`` against a server: what is typed reaches the template, answers stream, figures are right."""

import io
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from depthbatch.common.errors import EngineDeadError
from depthbatch.deploy.cli.main import main
from depthbatch.deploy.cli.terminal_chat import RemoteModel, _greet, converse
from fakes.chat_tokenizer import byte_tokenizer
from fakes.http_server import LiveServer
from fakes.serve_process import free_port

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


def test_help_and_what_the_demo_is(live: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: a newcomer who typed "hello" to the demo got noise, and no word of what it can do or how to leave."""
    shown = chat(live, "/help\n")
    assert "/reset" in shown and "/quit" in shown and "tokens/s" not in shown
    for model, says in (("demo", "no assistant"), ("other/model", "/help")):
        _greet(model, sys.stdout)
        assert says in capsys.readouterr().out


def test_refusals_do_not_end_the_chat(live: LiveServer) -> None:
    """A line that is too long is told; the next one is answered."""
    shown = chat(live, "x" * 600 + "\nhello\n")
    assert "512" in shown and len(FIGURES.findall(shown)) == 1


@pytest.mark.parametrize(("text", "status"), [("x" * 600 + "\nhello\n", 1), ("hello\n", 0), ("", 0)])
def test_exit_code_of_a_piped_chat(
    live: LiveServer, text: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a script whose every message was refused got exit code 0."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["chat", live.url, "--max-tokens", "4"]) == status


def test_no_server_is_one_clear_error() -> None:
    """The address that nobody listens on is named."""
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineDeadError, match=url):
        RemoteModel(url, "", {})


# --- servers that are not ours, or not well

HTTP = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
EVENT = b'data: {"choices": [{"delta": {"content": "four"}}]}\n\n'
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
WHOLE = HTTP + b"\r\n" + EVENT + b"data: [DONE]\n\n"
BROKEN = {  # the answer to a chat completion -> what is said of it
    "mid-chunk": (HTTP + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % (len(EVENT) + 50) + EVENT, "broke off"),
    "between events": (HTTP + b"\r\n" + EVENT, "broke off"),
    "no JSON": (HTTP + b"\r\ndata: {nonsense\n\n", "does not speak this API"),
    "no choices": (HTTP + b"\r\ndata: {}\n\n", "does not speak this API"),
    "no head": (b"SSH-2.0-OpenSSH_9.6\r\n", "no HTTP server"),
    "no status": (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "no HTTP server.*SSH"),
}


@contextmanager
def canned(*answers: bytes) -> Iterator[str]:
    """The URL of a server that gives each connection the next of ``answers`` and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(timeout=10)
        assert not thread.is_alive()


@pytest.fixture
def run_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """``depthbatch chat WORDS`` with one line of input: exit code, output and errors."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("2+2=\n"))
        code = main(["chat", *words])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("name", BROKEN)
def test_broken_answers_are_one_line(name: str, run_chat: Callable[..., tuple[int, str, str]]) -> None:
    """Bug: a server that died in mid-answer, or was none, gave a traceback (IncompleteRead, BadStatusLine, KeyError) or
    passed a cut answer off as a whole one. The test below shows that the same server's whole answer is taken."""
    answer, pattern = BROKEN[name]
    with canned(NOT_FOUND, answer) as url:
        code, _, err = run_chat(url)
    assert code == 1 and len(err.splitlines()) == 1 and re.search(f"error: .*{pattern}", err) and url in err


def test_server_without_tokenizer_info(run_chat: Callable[..., tuple[int, str, str]]) -> None:
    """Bug: another server's 404 on /tokenizer_info ended the program. It is asked for chat completions instead, and
    gets no figures, for it gives no depths."""
    with canned(NOT_FOUND, WHOLE) as url:
        assert run_chat(url) == (0, "> four\n> \n", "")


def test_a_server_that_cannot_answer_yet(run_chat: Callable[..., tuple[int, str, str]]) -> None:
    """Bug: while the model loaded chat ended with 2, as if another start would end the same way. In mid-conversation it is
    a line like any other refusal."""
    body = b'{"error": {"message": "the model is loading"}}'
    busy = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with canned(busy) as url:
        assert run_chat(url) == (1, "", "depthbatch: error: the model is loading\n")
    with canned(NOT_FOUND, busy) as url:
        assert run_chat(url) == (1, "> [the model is loading]\n> \n", "")


def test_unicode_separators_do_not_end_a_line(run_chat: Callable[..., tuple[int, str, str]]) -> None:
    """U+2028 and NEL stand in answers as they are; a reader that takes them for ends of lines gets half an event."""
    event = EVENT.replace(b"four", "fo\u2028u\x85r".encode())
    with canned(NOT_FOUND, WHOLE.replace(EVENT, event)) as url:
        assert run_chat(url) == (0, "> fo\u2028u\x85r\n> \n", "")


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (("http://127.0.0.1:1", "--exit-threshold", "abc"), "--exit-threshold.*abc"),
        (("http://127.0.0.1:1", "--max-num-seqs", "4"), "--max-num-seqs.*http://127.0.0.1:1"),
        (("http://127.0.0.1:1", "--speculation", "2"), "--speculation.*http://127.0.0.1:1"),
        (("http://127.0.0.1:1", "--config", "x.toml"), "--config.*http://127.0.0.1:1"),
        (("http://127.0.0.1:abc",), "http://127.0.0.1:abc is not a URL"),
        (("http://[::1",), "is not a URL"),
        (("http://",), "is not a URL"),
        (("localhost:8000/v1",), "localhost:8000/v1 is no model; .* http://"),  # bug: a model that Hugging Face lacks
    ],
)
def test_bad_words(words: tuple[str, ...], pattern: str, run_chat: Callable[..., tuple[int, str, str]]) -> None:
    """Bugs: tracebacks (ValueError, InvalidURL), and options of the engine that a server's user gave in vain. Nobody
    listens there, so a line without the option or URL at fault would be the one about the missing server."""
    code, _, err = run_chat(*words)
    assert code == 2 and len(err.splitlines()) == 1 and re.search(pattern, err), err


def test_request_options_reach_the_server(live: LiveServer, run_chat: Callable[..., tuple[int, str, str]]) -> None:
    """Bug: --min-loops, --max-loops and --seed were dropped. This server refuses a depth it has not, by name."""
    code, out, _ = run_chat(live.url, "--max-loops", "200")
    assert code == 1 and "max_loops 200" in out
    code, out, _ = run_chat(live.url, "--seed", "3")
    assert code == 0 and FIGURES.search(out)
