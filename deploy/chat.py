"""``depthbatch chat``: one line in, the answer streamed out, with its mean depth and tokens/s. A server or a model.

A model without a chat template gets each line as a prompt of its own.
"""

import argparse
import http.client
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple, Protocol, TextIO
from urllib.parse import urlsplit

from depthbatch.common.config import add_config_arguments, config_from_sources
from depthbatch.common.errors import EngineDeadError, RequestError

Conversation = list[dict[str, str]]
DEPTH_FIELDS = ("num_loops", "exit_threshold", "gate")


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
    group.add_argument("--max-tokens", type=int, default=256, help="longest answer (default 256)")
    group.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    group.add_argument("--num-loops", type=int, help="every token at this depth")
    add_config_arguments(parser)


def run_chat(args: argparse.Namespace) -> int:
    """Until end of input. Raises DepthbatchError when the engine does not start or the server cannot be reached."""
    request: dict[str, Any] = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    request |= {name: value for name in DEPTH_FIELDS if (value := getattr(args, name, None)) is not None}
    opening: Conversation = [{"role": "system", "content": args.system}] if args.system else []
    if args.target.startswith(("http://", "https://")):
        if "exit_threshold" in request:
            request["exit_threshold"] = float(request["exit_threshold"])
        converse(RemoteModel(args.target, args.api_key, request), opening, sys.stdin, sys.stdout)
        return 0
    from depthbatch.frontend.llm import LLM

    config = config_from_sources(args, model=args.target)
    request = {name: value for name, value in request.items() if name not in ("exit_threshold", "gate")}  # the engine's
    with LLM(**{name: getattr(config, name) for name in config.__dataclass_fields__}) as llm:
        converse(LocalModel(llm, request), opening, sys.stdin, sys.stdout)
    return 0


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
    decoded = depths[1:]  # the first token comes from prefill, at full depth
    mean = sum(decoded) / len(decoded) if decoded else 0.0
    out.write(f"\n[{len(depths)} tokens, {len(depths) / duration_s:.1f} tokens/s, mean depth {mean:.2f}]\n")
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
    """A depthbatch server, or one that speaks the same API (depths are then missing)."""

    def __init__(self, url: str, api_key: str, request: dict[str, Any]) -> None:
        self._url = urlsplit(url.rstrip("/").removesuffix("/v1"))
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._request = request
        self._has_template = bool(self._get("/tokenizer_info").get("has_chat_template", True))

    def ask(self, conversation: Conversation) -> Iterator[News]:
        body = {**self._request, "stream": True, "return_exit_depths": True}
        if self._has_template:
            path, body = "/v1/chat/completions", {**body, "messages": conversation}
        else:
            path, body = "/v1/completions", {**body, "prompt": conversation[-1]["content"]}
        with closing(self._connect()) as connection:
            response = self._send(connection, "POST", path, json.dumps(body).encode())
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RequestError(event["error"]["message"])
                    for choice in event["choices"]:
                        text = choice["delta"].get("content") if "delta" in choice else choice["text"]
                        yield News(text or "", choice.get("exit_depths") or [])

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        return kind(self._url.netloc, timeout=600)

    def _get(self, path: str) -> dict[str, Any]:
        with closing(self._connect()) as connection:
            answer = json.loads(self._send(connection, "GET", path, None).read())
            return answer if isinstance(answer, dict) else {}

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        """The response; RequestError for what the server refuses, EngineDeadError when there is none."""
        try:
            connection.request(method, self._url.path + path, body, self._headers)
            response = connection.getresponse()
        except OSError as error:
            raise EngineDeadError(f"no server at {self._url.geturl()}: {error}") from None
        if response.status >= 400:
            raise RequestError(_message(response.read(), response.status))
        return response


def _message(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}"
