"""Requests that ask for another protocol, which this server never speaks: answered as if they had not asked."""

import json
import socket
import time

import httptools
import pytest

from fakes.http_server import LiveServer

LIMIT_S = 30.0
BODY = json.dumps({"prompt": [5], "max_tokens": 2, "temperature": 0, "return_token_ids": True}).encode()
PROBE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
ASKING = {
    "h2c": b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
    "websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n",
    "lower case": b"connection: upgrade\r\nupgrade: h2c\r\n",
    "a list": b"Connection: keep-alive, Upgrade, HTTP2-Settings\r\nUpgrade: h2c, foo/2\r\nHTTP2-Settings: AAMAAABk\r\n",
    "two lines": b"Connection: keep-alive\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n",
    "the other order": b"Upgrade: TLS/1.0\r\nConnection: Upgrade\r\n",
    "only the connection": b"Connection: Upgrade\r\n",
    "only the protocol": b"Upgrade: h2c\r\n",
    "an unknown protocol": b"Connection: upgrade\r\nUpgrade: \x80\xff\r\n",
    "no protocol": b"Connection: upgrade\r\nUpgrade:\r\n",
}


class Answers:
    """Reads answers of one connection."""

    def __init__(self) -> None:
        self.got: list[tuple[int, bytes]] = []
        self._body = b""
        self._parser = httptools.HttpResponseParser(self)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.got.append((self._parser.get_status_code(), self._body))
        self._body = b""

    def read(self, connection: socket.socket, count: int) -> list[tuple[int, bytes]]:
        while len(self.got) < count and (data := connection.recv(65536)):
            self._parser.feed_data(data)
        return self.got


def talk(server: LiveServer, segments: list[bytes], count: int) -> list[tuple[int, bytes]]:
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for segment in segments:
            connection.sendall(segment)
            time.sleep(0.02 if len(segments) > 1 else 0.0)
        return Answers().read(connection, count)


def tokens_of(answer: tuple[int, bytes]) -> list[int]:
    assert answer[0] == 200, answer
    tokens: list[int] = json.loads(answer[1])["choices"][0]["token_ids"]
    return tokens


def post(asking: bytes, framing: bytes = b"Content-Length: %d\r\n" % len(BODY)) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head + asking + framing + b"\r\n"


CHUNKED = b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (10, BODY[:10], len(BODY) - 10, BODY[10:])


@pytest.mark.parametrize("name", ASKING)
def test_the_answer_is_that_of_a_request_that_does_not_ask(live: LiveServer, name: str) -> None:
    """Bugs: such a request was answered by 400, its body, in a second segment, was read as the next request of the
    connection, and what was pipelined behind it was lost. However the bytes come, there are the answers to this request
    and to the next, and no third."""
    plain = tokens_of(talk(live, [post(b"") + BODY], 1)[0])
    asking = post(ASKING[name])
    chunked = post(ASKING[name], b"Transfer-Encoding: chunked\r\n")
    for segments in (
        [asking + BODY + PROBE],
        [asking, BODY + PROBE],
        [asking, BODY, PROBE],
        [asking + BODY[:7], BODY[7:], PROBE],
        [asking[:40], asking[40:-2], asking[-2:] + BODY[:1], BODY[1:] + PROBE],
        [chunked + CHUNKED + PROBE],
        [chunked, CHUNKED[:9], CHUNKED[9:] + PROBE],
    ):
        first, second = talk(live, segments, 2)
        assert tokens_of(first) == plain, segments
        assert second[0] == 200 and b'"status"' in second[1], segments


def test_a_body_is_no_request(live: LiveServer) -> None:
    """Smuggling: the body is a request by itself, which whoever stands in front has not seen as one. There is one answer,
    to the request it is the body of."""
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    head = post(ASKING["h2c"], b"Content-Length: %d\r\n" % len(hidden))
    for segments in ([head + hidden + PROBE], [head, hidden, PROBE]):
        first, second = talk(live, segments, 2)
        assert first[0] == 400 and b"JSON" in first[1]
        assert second[0] == 200 and b'"status"' in second[1]


def test_many_in_one_segment(live: LiveServer) -> None:
    """A parser for each, one after another: no recursion, no request lost."""
    asking = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    answers = talk(live, [asking * 600], 600)
    assert [status for status, _ in answers] == [200] * 600


def test_a_tunnel_is_refused(live: LiveServer) -> None:
    """CONNECT has no answer but a refusal, and what follows it is no request."""
    answers = talk(live, [b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", PROBE], 2)
    assert [status for status, _ in answers] in ([400], [404], [405])


def test_limits_hold_for_them(live: LiveServer) -> None:
    """The head that is read twice counts once, and too large a body is refused by its length."""
    padding = b"X-Padding: " + b"a" * 40_000 + b"\r\n"
    first = talk(live, [post(ASKING["h2c"] + padding) + BODY], 1)[0]
    assert tokens_of(first)
    head = post(ASKING["h2c"], b"Content-Length: 99999999999\r\n")
    assert talk(live, [head], 1)[0][0] == 413
    assert talk(live, [post(ASKING["h2c"] + padding + padding) + BODY], 1)[0][0] == 431
