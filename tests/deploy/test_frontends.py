"""``serve --frontends 2``: two processes on one port over one scheduler, on the simulated device."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from depthbatch.common.messages import FinishReason
from fakes.serve_process import DEVICE, ServeProcess, is_alive, token_ids, wait_until

TOKENS = 30
BODY = {"prompt": [5, 6, 7], "ignore_eos": True, "seed": 1, "return_token_ids": True, "max_tokens": TOKENS}


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with ServeProcess("--device", DEVICE, "--frontends", "2") as server:
        yield server


@pytest.fixture
def two(server: ServeProcess) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """A connection to each frontend: the kernel deals new ones out, and one that is kept stays where it is."""
    with contextlib.ExitStack() as clients:
        found: dict[int, httpx.Client] = {}

        def both() -> bool:
            client = clients.enter_context(httpx.Client(base_url=server.url, timeout=60))
            with contextlib.suppress(httpx.HTTPError):
                if client.get("/ready").status_code == 200:
                    found.setdefault(frontend_of(client), client)
            return len(found) == 2

        wait_until(both, "both frontends answer")
        first, second = found.values()
        yield first, second


def frontend_of(client: httpx.Client) -> int:
    pid: int = client.get("/health").json()["processes"]["frontend"]["pid"]
    return pid


def tokens_of(client: httpx.Client) -> list[int]:
    answer = client.post("/v1/completions", json=BODY)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def finished(client: httpx.Client) -> float:
    """Requests that the server has finished, as this frontend tells."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    found = [family for family in families if family.name == "depthbatch:request_success"]
    return sum(sample.value for family in found for sample in family.samples)


def test_both_serve_and_count_together(two: tuple[httpx.Client, httpx.Client]) -> None:
    """One model, one scheduler: the same tokens from either, and either tells what both have finished, at once."""
    first, second = two
    before = finished(first)
    assert finished(second) == before
    assert tokens_of(first) == tokens_of(second) and len(tokens_of(first)) == TOKENS
    assert finished(second) == finished(first) == before + 3
    loads = [client.get("/v1/loads").json()["loads"] for client in two]
    assert loads[0] == loads[1]


def test_an_abort_finds_the_request_in_the_other(two: tuple[httpx.Client, httpx.Client]) -> None:
    """A client that aborts by name reaches either frontend; one that runs nowhere is nobody's."""
    first, second = two
    with first.stream(
        "POST", "/v1/completions", json={**BODY, "max_tokens": 2000, "stream": True, "request_id": "me"}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert second.post("/abort", json={"request_id": ["me", "nobody"]}).json() == {"aborted": ["me"]}
        assert f'"finish_reason":"{FinishReason.ABORT}"' in "".join(lines)
    assert second.post("/abort", json={"request_id": "me"}).json() == {"aborted": []}


def test_a_stream_that_is_resumed_at_the_other_ends_in_the_first(
    server: ServeProcess, two: tuple[httpx.Client, httpx.Client]
) -> None:
    """Bug: both went on, each in its own place, and the first client never learnt of it. A client that comes back before its
    connection is missed gets each token once; the old connection ends with an error; nothing is left running."""
    first, second = two
    expected = first.post("/v1/completions", json={**BODY, "max_tokens": 60}).json()["choices"][0]["token_ids"]
    body = {**BODY, "max_tokens": 60, "stream": True, "request_id": "moves"}
    with first.stream("POST", "/v1/completions", json=body) as answer:
        lines = filter(None, answer.iter_lines())
        seen, begun = next(lines), json.loads(next(lines)[6:])
        rest = second.post("/v1/completions", json=body, headers={"Last-Event-ID": seen.removeprefix("id: ")}).text
        old = list(lines)
    events = [json.loads(line[6:]) for line in rest.splitlines() if line.startswith("data: {")]
    assert token_ids([begun, *events]) == expected
    assert (
        "goes on over another connection" in json.loads(old[-2][6:])["error"]["message"] and old[-1] == "data: [DONE]"
    )
    wait_until(lambda: first.get("/get_load").json()["load"] == 0, "nothing is left running")


def test_a_stream_that_rests_is_aborted_from_either(two: tuple[httpx.Client, httpx.Client]) -> None:
    """Bug: POST /abort did nothing to a stream whose client had gone. Whoever resumes it is told the tokens that there were,
    and that it was aborted."""
    first, second = two
    body = {**BODY, "max_tokens": 2000, "stream": True, "request_id": "rests"}
    with first.stream("POST", "/v1/completions", json=body) as answer:
        last_id = next(answer.iter_lines()).removeprefix("id: ")
    wait_until(lambda: second.get("/get_load").json()["load"] == 0, "it rests")
    assert second.post("/abort", json={"request_id": "rests"}).json() == {"aborted": ["rests"]}
    assert second.post("/abort", json={"request_id": "rests"}).json() == {"aborted": []}
    with contextlib.closing(httpx.Client(base_url=str(first.base_url), timeout=60)) as client:
        rest = client.post("/v1/completions", json=body, headers={"Last-Event-ID": last_id}).text
    assert f'"finish_reason":"{FinishReason.ABORT}"' in rest and rest.endswith("data: [DONE]\n\n")


def test_a_killed_frontend_takes_only_its_own_streams(
    server: ServeProcess, two: tuple[httpx.Client, httpx.Client]
) -> None:
    """The stream of the other goes on as if nothing had been; new connections are served; counters do not fall; scheduler and
    worker are the same; the dead one is started again."""
    first, second = two
    expected = tokens_of(second)
    before, pids = finished(first), server.pids()
    victim = frontend_of(first)
    with second.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        with first.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as lost:
            cut = lost.iter_lines()
            next(cut)
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                list(cut)
        rest = "".join(lines)
    assert rest.endswith("data: [DONE]") and rest.count('"token_ids":[') >= 1
    assert tokens_of(second) == expected
    assert finished(second) >= before + 2
    assert {name: server.pids()[name] for name in ("scheduler", "worker")} == {
        name: pids[name] for name in ("scheduler", "worker")
    }
    wait_until(lambda: second.get("/health").json()["processes"]["frontend"]["restarts"] == 1, "it is started again")
    assert not is_alive(victim)


def test_streams_of_both_survive_the_scheduler(server: ServeProcess, two: tuple[httpx.Client, httpx.Client]) -> None:
    """Each submits again what it holds; the ids that they give are never each other's."""
    expected = tokens_of(two[0])
    with contextlib.ExitStack() as streams:
        answers = [
            streams.enter_context(client.stream("POST", "/v1/completions", json={**BODY, "stream": True}))
            for client in two
        ]
        lines = [answer.iter_lines() for answer in answers]
        begun = [next(each) for each in lines]
        os.kill(server.pids()["scheduler"], signal.SIGKILL)
        for first, each in zip(begun, lines, strict=True):
            events = [first, *filter(None, each)]
            assert events[-1] == "data: [DONE]"
            assert token_ids([json.loads(event.removeprefix("data: ")) for event in events[:-1]]) == expected


def test_a_signal_drains_both(server: ServeProcess, two: tuple[httpx.Client, httpx.Client]) -> None:
    """Streams of both end as they would have, then the command ends with 0."""
    with contextlib.ExitStack() as streams:
        answers = [
            streams.enter_context(client.stream("POST", "/v1/completions", json={**BODY, "stream": True}))
            for client in two
        ]
        lines = [answer.iter_lines() for answer in answers]
        for each in lines:
            next(each)
        server.process.send_signal(signal.SIGTERM)
        for each in lines:
            assert list(filter(None, each))[-1] == "data: [DONE]"
    assert server.process.wait(30) == 0
