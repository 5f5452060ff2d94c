"""The service's figures, small, on the simulated device: the numbers themselves are for a quiet machine."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from depthbatch.benchmarks.frontends import read_streams
from depthbatch.common.errors import ConfigError, EngineDeadError
from depthbatch.deploy.cli.main import main

SMALL = (
    "demo", "--serve-option=--device=simulated:h100-ouro-1.4b", "--concurrency", "1", "2", "--rounds", "2", "--requests",
    "2", "--output-tokens", "4", "--processor-streams", "8", "--processor-tokens", "48", "--streams", "40", "--stream-tokens", "3", "--capacity-requests", "16",
    "--overload-s", "0.5", "--max-num-seqs", "8",
)  # fmt: skip


def test_all_four_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not luck: a device of known speed gives about the same time a token by either API, every stream is told apart by
    its count of tokens, and the descriptors while the streams were open are one a stream more than before."""
    output = tmp_path / "figures.json"
    assert main(["bench", "service", *SMALL, "--output", str(output)]) == 0
    figures = json.loads(output.read_text())
    assert [row["concurrency"] for row in figures["added_latency"]] == [1, 2]
    for row in figures["added_latency"]:
        assert row["zmq_tpot_ms"] > 10 and len(row["added_ms_by_round"]) == 2  # 22 ms a token at full depth
        assert row["added_ms_per_token"] == pytest.approx(sum(row["added_ms_by_round"]) / 2)
    used = figures["processor_time"]
    assert len(used["us_per_token_by_round"]["http"]) == len(used["us_per_token_by_round"]["zmq"]) == 2
    assert (
        0 < used["http_us_per_token"] < 22_000
    )  # the tokens of one stream are 22 ms apart: a frontend cannot use more
    assert figures["streams"]["lost_tokens"] == 0
    for burst in figures["streams"]["bursts"]:
        assert burst["complete"] == 40 and burst["tokens"] == burst["tokens_expected"] == 120 and not burst["failed"]
        assert burst["descriptors_after"] == burst["descriptors_before"]
        assert burst["descriptors_before"] < burst["descriptors_most"] <= burst["descriptors_before"] + 41
    health = figures["health"]
    assert health["arrivals_per_s"] == 2 * health["capacity_requests_per_s"] > 0
    assert set(health["statuses"]) == {"200"} and health["statuses"]["200"] == health["probes"] > 0
    assert health["p50_ms"] <= health["p99_ms"] <= health["max_ms"]
    assert "/health at twice capacity" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """With the server's own last line, and at once. Bug: a wrong option of the server was exit code 1, a fault."""
    assert main(["bench", "service", *SMALL, "--serve-option=--max-loops=99"]) == 2
    assert "the server did not start: " in (said := capsys.readouterr().err) and "max_loops" in said
    assert main(["bench", "frontends", "--serve-option=--port=70000"]) == 2
    assert capsys.readouterr().err.count("error") == 1


def answers_of(*parts: bytes) -> Iterator[str]:
    """The address of a server that answers each connection with the next of these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for part in parts:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    for start in range(0, len(part), 40):  # no event comes whole
                        connection.sendall(part[start : start + 40])
                        time.sleep(0.001)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


OK = b"HTTP/1.1 200 OK\r\n\r\n"
EVENTS = b'id: x\ndata: {"choices": [{"text": "................................................."}]}\n\n' * 5
DONE = b"data: [DONE]\n\n\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("last", "kind", "words"),
    [
        (OK + EVENTS, EngineDeadError, "1 of 3 streams broke off before their end"),
        (OK + EVENTS + DONE[:6], EngineDeadError, "1 of 3 streams broke off"),
        (OK + EVENTS + b'data: {"error": {}}\n\n' + DONE, EngineDeadError, "1 of 3 streams broke off"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n{}", ConfigError, "the server refuses the request: {}"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}", EngineDeadError, "503"),
    ],
)
def test_streams_that_break_off_are_no_figures(last: bytes, kind: type[Exception], words: str) -> None:
    """Bug: they were counted as if they had brought every token. Events are counted wherever the network cuts them."""
    with contextmanager(answers_of)(*[OK + EVENTS + DONE] * 3) as url:
        assert read_streams(url, 3, 5, 1).events == 15
    mixed = contextmanager(answers_of)(OK + EVENTS + DONE, OK + EVENTS + DONE, last)
    with mixed as url, pytest.raises(kind, match=words):
        read_streams(url, 3, 5, 1)


def test_frontends_pass_on_every_token(tmp_path: Path) -> None:
    """Not luck: all streams are read to their end, and each process has used some time for each of their tokens."""
    output = tmp_path / "frontends.json"
    small = ["--frontends", "2", "--max-num-seqs", "32", "--tokens", "100", "--rounds", "1", "--output", str(output)]
    assert main(["bench", "frontends", *small]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert row["frontends"] == 2 and row["tokens_per_s_by_round"] == [row["tokens_per_s"]]
    assert 1 <= row["tokens_per_event"] <= 100
    for kind in ("frontend", "scheduler", "worker"):
        assert row[f"{kind}_us_per_token"] > 0
    assert row["scheduler_limit_tokens_per_s"] == pytest.approx(1e6 / row["scheduler_us_per_token"])
