"""``depthbatch chat``: one line in, the answer streamed out, with its mean depth and tokens/s. A server or a model.

A model without a chat template gets each line as a prompt of its own.
"""

import argparse
import http.client
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple, Protocol, TextIO
from urllib.parse import SplitResult, urlsplit

from depthbatch.common.config import FIELDS, add_config_arguments, config_from_sources, values_from_sources
from depthbatch.common.errors import ConfigError, EngineDeadError, RequestError
from depthbatch.frontend.output import mean_decode_depth
from depthbatch.frontend.params import add_number_argument

Conversation = list[dict[str, str]]
REQUEST_OPTIONS = ("gate", "exit_threshold", "min_loops", "max_loops", "seed")  # engine options that requests have too


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
        converse(RemoteModel(args.target, args.api_key, request), opening, sys.stdin, sys.stdout)
        return 0
    from depthbatch.frontend.llm import LLM

    config = config_from_sources(args, model=args.target)
    with LLM.from_config(config) as llm:
        converse(LocalModel(llm, request), opening, sys.stdin, sys.stdout)
    return 0


def _request_options(args: argparse.Namespace) -> dict[str, Any]:
    """Engine options that a request to a server can carry. Raises ConfigError for those that only an engine has."""
    given = [name for name in (*FIELDS, "config") if name not in ("model", *REQUEST_OPTIONS)]
    for name in given:
        if getattr(args, name, None) is not None:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is for an engine of your own: {args.target} was started with its options")
    return values_from_sources(args, {}, {name: FIELDS[name] for name in REQUEST_OPTIONS})


def converse(model: ChatModel, opening: Conversation, lines: TextIO, out: TextIO) -> None:
    """The loop. ``/reset`` forgets the conversation, ``/quit`` or end of input ends it, Ctrl-C ends one answer."""
    conversation = list(opening)
    while True:
        out.write("> ")
        out.flush()
        line = lines.readline()
        text = line.strip()
        if not line or text == "/quit":
            out.write("\n")
            return
        if text == "/reset":
            conversation = list(opening)
        elif text:
            conversation.append({"role": "user", "content": text})
            try:
                answer = _show(model.ask(conversation), out)
            except RequestError as error:
                out.write(f"[{error}]\n")
                conversation.pop()
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

    Raises ConfigError for a broken URL, RequestError for what the server refuses, EngineDeadError when it does not
    answer, or not in this API.
    """

    def __init__(self, url: str, api_key: str, request: dict[str, Any]) -> None:
        self._url = _split(url)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._request = request
        self._has_template = self._ask_template()

    def ask(self, conversation: Conversation) -> Iterator[News]:
        body = {**self._request, "stream": True, "return_exit_depths": True}
        if self._has_template:
            path, body = "/v1/chat/completions", {**body, "messages": conversation}
        else:
            path, body = "/v1/completions", {**body, "prompt": conversation[-1]["content"]}
        with closing(self._connect()) as connection:
            response = self._send(connection, "POST", path, json.dumps(body).encode())
            _refuse_errors(response)
            with self._reading():
                yield from _news(response)

    def _ask_template(self) -> bool:
        """Whether chat completions work; a server without /tokenizer_info is taken to have them."""
        with closing(self._connect()) as connection:
            response = self._send(connection, "GET", "/tokenizer_info", None)
            if response.status == 404:
                return True
            _refuse_errors(response)
            with self._reading():
                return bool(json.loads(response.read()).get("has_chat_template", True))

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        return kind(self._url.netloc, timeout=600)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        """The response, whatever its status."""
        try:
            connection.request(method, self._url.path + path, body, self._headers)
            return connection.getresponse()
        except OSError as error:
            raise EngineDeadError(f"no server at {self._url.geturl()}: {error}") from None
        except (http.client.HTTPException, ValueError) as error:
            raise EngineDeadError(f"no HTTP server at {self._url.geturl()}: {error!s:.200}") from None

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Around the reading of an answer: what goes wrong there is the server's doing."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise EngineDeadError(f"the answer of {self._url.geturl()} broke off: {error}") from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise EngineDeadError(f"{self._url.geturl()} does not speak this API: {error!r:.200}") from None


def _news(lines: http.client.HTTPResponse) -> Iterator[News]:
    """The pieces of a streamed answer. Raises HTTPException when it ends before the server says so."""
    for line in lines:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise RequestError(event["error"]["message"])
            for choice in event["choices"]:
                text = choice["delta"].get("content") if "delta" in choice else choice["text"]
                yield News(text or "", choice.get("exit_depths") or [])
    raise http.client.HTTPException("it ended without data: [DONE]")


def _split(url: str) -> SplitResult:
    """Raises ConfigError."""
    try:
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        if not parts.hostname or parts.port == 0:
            raise ValueError("it names no host" if not parts.hostname else "port 0")
    except ValueError as error:
        raise ConfigError(f"{url} is not a URL of a server: {error}") from None
    return parts


def _refuse_errors(response: http.client.HTTPResponse) -> None:
    """Raises RequestError for a status that is an error."""
    if response.status >= 400:
        raise RequestError(_message(response))


def _message(response: http.client.HTTPResponse) -> str:
    try:
        return str(json.loads(response.read())["error"]["message"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return f"the server answered {response.status}"
