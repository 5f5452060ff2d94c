"""``depthbatch chat``: one line in, the answer streamed out, with its mean depth and tokens/s. A server or a model.

A model without a chat template gets each line as a prompt of its own.
"""

import argparse
import json
import re
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import httpx

from depthbatch.common.config import FIELDS, add_config_arguments, config_from_sources
from depthbatch.common.errors import FAULT, ConfigError, EngineDeadError, OverloadedError, RequestError
from depthbatch.common.options import values_from_sources
from depthbatch.deploy.cli.request_options import DEMOS, SHARED_OPTIONS
from depthbatch.frontend.output import mean_decode_depth
from depthbatch.frontend.params import add_number_argument

HOST_PORT = re.compile(r"[\w.-]+:\d+(/|$)")  # an address without its scheme
ANSWER_S = 600.0  # without a byte from the server
Conversation = list[dict[str, str]]
HELP = """/reset  forgets the conversation
/quit   ends the chat, as does the end of input; Ctrl-C ends one answer
Anything else is a message. The line under an answer: its tokens, their rate, and the mean loops of a token.
"""
DEMO_GREETING = """The demo is no assistant: a tiny model that completes puzzles, some with more loops than others. Try
  46+5=      say kq7x=      347,348,      kx qz xt ha zf ?xt=
/help says what else there is.
"""


class News(NamedTuple):
    """A piece of the answer."""

    text: str
    exit_depths: list[int]


class ChatModel(Protocol):
    """Who answers. Closing the iterator aborts."""

    def ask(self, conversation: Conversation) -> Iterator[News]: ...


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Who to talk to, and the parameters of every request."""
    parser.add_argument(
        "target", nargs="?", default="demo", metavar="URL or MODEL", help="http://HOST:PORT, or a model"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--api-key", default="", help="key of the server")
    group = parser.add_argument_group("request")
    add_number_argument(group, "max_tokens", 256, "longest answer (default 256)")
    add_number_argument(group, "temperature", 0.0, "0 = greedy (default)")
    add_number_argument(group, "num_loops", None, "every token at this depth")
    add_config_arguments(parser)


def run_chat(args: argparse.Namespace) -> int:
    """Until end of input. Raises DepthbatchError when the engine does not start or the server cannot be reached."""
    request: dict[str, Any] = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    if args.num_loops is not None:
        request["num_loops"] = args.num_loops
    opening: Conversation = [{"role": "system", "content": args.system}] if args.system else []
    if args.target.startswith(("http://", "https://")):
        request |= _request_options(args)
        return _status(converse(RemoteModel(args.target, args.api_key, request), opening, sys.stdin, sys.stdout))
    if HOST_PORT.match(args.target) and not Path(args.target).exists():
        raise ConfigError(f"{args.target} is no model; the URL of a server begins with http://")
    from depthbatch.frontend.llm import LLM

    config = config_from_sources(args, model=args.target)
    with LLM.from_config(config) as llm:
        _greet(config.model, sys.stdout)
        return _status(converse(LocalModel(llm, request), opening, sys.stdin, sys.stdout))


def _status(refused: int) -> int:
    """A script has to learn that it has no answer; who sits in front of it has read so."""
    return FAULT if refused and not sys.stdin.isatty() else 0


def _request_options(args: argparse.Namespace) -> dict[str, Any]:
    """Engine options that a request to a server can carry. Raises ConfigError for those that only an engine has."""
    given = [name for name in (*FIELDS, "config") if name not in ("model", *SHARED_OPTIONS)]
    for name in given:
        if getattr(args, name, None) is not None:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is for an engine of your own: {args.target} was started with its options")
    return values_from_sources(args, {}, {name: FIELDS[name] for name in SHARED_OPTIONS})


def _greet(model: str, out: TextIO) -> None:
    """What may be typed."""
    out.write(DEMO_GREETING if model in DEMOS else "/help says what there is beside messages.\n")
    out.flush()


def converse(model: ChatModel, opening: Conversation, lines: TextIO, out: TextIO) -> int:
    """The loop. ``/reset`` forgets the conversation, ``/quit`` or end of input ends it, Ctrl-C ends one answer, ``/help``
    says so. Returns how many messages were refused."""
    conversation = list(opening)
    refused = 0
    while True:
        out.write("> ")
        out.flush()
        line = lines.readline()
        text = line.strip()
        if not line or text == "/quit":
            out.write("\n")
            return refused
        if text == "/reset":
            conversation = list(opening)
        elif text == "/help":
            out.write(HELP)
        elif text:
            conversation.append({"role": "user", "content": text})
            try:
                answer = _show(model.ask(conversation), out)
            except (RequestError, OverloadedError) as error:
                out.write(f"[{error}]\n")
                conversation.pop()
                refused += 1
                continue
            conversation.append({"role": "assistant", "content": answer})


def _show(news: Iterator[News], out: TextIO) -> str:
    """Streams an answer and its figures; returns the text."""
    pieces: list[str] = []
    depths: list[int] = []
    start_s = time.monotonic()
    try:
        for piece in news:
            pieces.append(piece.text)
            depths += piece.exit_depths
            out.write(piece.text)
            out.flush()
    except KeyboardInterrupt:
        out.write(" [stopped]")
    finally:
        if hasattr(news, "close"):
            news.close()
    duration_s = time.monotonic() - start_s
    mean = mean_decode_depth(depths)
    depth = "" if mean is None else f", mean depth {mean:.2f}"
    out.write(f"\n[{len(depths)} tokens, {len(depths) / duration_s:.1f} tokens/s{depth}]\n" if depths else "\n")
    return "".join(pieces)


class LocalModel:
    """An engine in its own processes."""

    def __init__(self, llm: Any, request: dict[str, Any]) -> None:
        from depthbatch.frontend.params import SamplingParams

        if llm.tokenizer is None:
            raise RequestError("this model has no tokenizer: it cannot chat")
        self._llm = llm
        self._params = SamplingParams(**request)

    def ask(self, conversation: Conversation) -> Iterator[News]:
        tokenizer = self._llm.tokenizer
        if tokenizer.has_chat_template:
            prompt = tokenizer.encode_chat(conversation)
        else:
            prompt = tokenizer.encode(conversation[-1]["content"])
        with closing(self._llm.stream([prompt], self._params)) as stream:
            for _, delta in stream:
                yield News(delta.text, delta.exit_depths)


class RemoteModel:
    """A depthbatch server, or one that speaks the same API (depths are then missing).

    Raises ConfigError for a broken URL, RequestError for what the server refuses, OverloadedError for what it refuses
    for now (the model loads), EngineDeadError when it does not answer, or not in this API.
    """

    def __init__(self, url: str, api_key: str, request: dict[str, Any]) -> None:
        self._url = _server_address(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._request = request
        self._has_template = self._ask_template()

    def ask(self, conversation: Conversation) -> Iterator[News]:
        body = {**self._request, "stream": True, "return_exit_depths": True}
        if self._has_template:
            path, body = "/v1/chat/completions", {**body, "messages": conversation}
        else:
            path, body = "/v1/completions", {**body, "prompt": conversation[-1]["content"]}
        with self._answer("POST", path, body) as response:
            _refuse_errors(response)
            yield from _news(response)

    def _ask_template(self) -> bool:
        """Whether chat completions work; a server without /tokenizer_info is taken to have them."""
        with self._answer("GET", "/tokenizer_info", None) as response:
            if response.status_code == 404:
                return True
            _refuse_errors(response)
            return bool(json.loads(response.read()).get("has_chat_template", True))

    @contextmanager
    def _answer(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[httpx.Response]:
        """The response, whatever its status, to be read inside. What goes wrong there is the server's doing."""
        response: httpx.Response | None = None
        context = ssl.create_default_context()  # the system's certificates
        try:
            with (
                httpx.Client(headers=self._headers, timeout=ANSWER_S, trust_env=False, verify=context) as client,
                client.stream(method, self._url + path, json=body) as response,
            ):
                yield response
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            if response is None:
                missing = isinstance(error, httpx.NetworkError | httpx.TimeoutException)
                what = f"no {'' if missing else 'HTTP '}server at {self._url}: {error!s:.200}"
            elif isinstance(error, httpx.HTTPError):
                what = f"the answer of {self._url} broke off: {error}"
            else:
                what = f"{self._url} does not speak this API: {error!r:.200}"
            raise EngineDeadError(what) from None


def _news(response: httpx.Response) -> Iterator[News]:
    """The pieces of a streamed answer. Raises httpx.HTTPError when it ends before the server says so."""
    for line in _lines(response):
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise RequestError(event["error"]["message"])
            for choice in event["choices"]:
                text = choice["delta"].get("content") if "delta" in choice else choice["text"]
                yield News(text or "", choice.get("exit_depths") or [])
    raise httpx.RemoteProtocolError("it ended without data: [DONE]")


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """As they come. httpx's own iter_lines also ends a line at U+2028 and the like, which may stand in an answer."""
    rest = b""
    for data in response.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
    yield rest


def _server_address(url: str) -> str:
    """Without a path of the API. Raises ConfigError."""
    address = url.rstrip("/").removesuffix("/v1")
    try:
        parts = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url} is not a URL of a server: {error}") from None
    if not parts.host or parts.port == 0:
        raise ConfigError(f"{url} is not a URL of a server: {'port 0' if parts.host else 'it names no host'}")
    return address


def _refuse_errors(response: httpx.Response) -> None:
    """Raises RequestError for a status that is an error, OverloadedError where it may be none soon."""
    if response.status_code == 503:
        raise OverloadedError(_message(response))
    if response.status_code >= 400:
        raise RequestError(_message(response))


def _message(response: httpx.Response) -> str:
    try:
        return str(json.loads(response.read())["error"]["message"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"
