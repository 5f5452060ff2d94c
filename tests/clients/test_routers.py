"""vllm-router and smg, as their wheels install them, before two replicas of the demo model, started as the units in deploy/ do."""

import contextlib
import json
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fakes.serve_process import ServeProcess, free_port, wait_until

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv-clients" / "bin"
DEMO = ROOT / "training" / "demo" / "demo"
OPTIONS = ["--max-num-seqs", "8", "--kv-blocks", "1024", "--prefix-caching", "--threads", "1"]
if not list(DEMO.glob("*.safetensors")):
    OPTIONS += ["--load-format", "dummy"]
UNITS = {"vllm-router": "vllm-router.service", "smg": "smg.service"}  # their commands are what is started


def command_of(kind: str, **options: str) -> list[str]:
    """The command of a router's unit, with other values for some of its options, each a text of one or more values."""
    text = (ROOT / "deploy" / UNITS[kind]).read_text().replace("\\\n", " ")
    found = re.search(r"^ExecStart=\S+/(\S+) (.*)$", text, re.MULTILINE)
    assert found is not None
    line = " " + found[2]
    for name, value in options.items():
        line, changed = re.subn(rf"(?<= --{name.replace('_', '-')} ).*?(?= --|$)", value, line)
        assert changed == 1, name
    return [str(BIN / found[1]), *line.split()]


class Router:
    """A router process in front of some servers; ready once it answers a request."""

    def __init__(self, kind: str, policy: str, *urls: str, options: Sequence[str] = ()) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = tempfile.NamedTemporaryFile(mode="rb")  # noqa: SIM115 - closed in __exit__
        ports = {"port": str(port), "prometheus_port": str(free_port())}
        command = command_of(kind, host="127.0.0.1", policy=policy, worker_urls=" ".join(urls), **ports)
        with open(self.log.name, "ab") as log:
            self.process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def __enter__(self) -> "Router":
        wait_until(self._answers, "the router answers")
        return self

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read()
        with contextlib.suppress(httpx.HTTPError):
            return self.ask(prompt="1+1=").status_code == 200
        return False

    def ask(self, **body: Any) -> httpx.Response:
        fields = {"model": "demo", "max_tokens": 4, "temperature": 0, **body}
        return self.http.post("/v1/completions", json=fields)

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.process.kill()  # it keeps no state, and would wait for those that send it requests to look elsewhere
        self.process.wait()
        self.log.close()


class Replicas:
    """Two servers on ports of their own."""

    def __init__(self) -> None:
        ports = [free_port() for _ in range(2)]
        self.events = [f"tcp://127.0.0.1:{port}" for port in ports]
        self.options = [
            [
                *OPTIONS,
                "--kv-events-config",
                json.dumps({"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"}),
            ]
            for port in ports
        ]
        self.servers = [ServeProcess(*options, wait=False) for options in self.options]
        self.urls = [server.url for server in self.servers]

    def counted(self, name: str) -> list[float]:
        """A counter of each, summed over its labels."""
        return [
            sum(
                sample.value
                for family in text_string_to_metric_families(httpx.get(url + "/metrics", timeout=10).text)
                for sample in family.samples
                if sample.name == f"depthbatch:{name}"
            )
            for url in self.urls
        ]


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    replicas = Replicas()
    try:
        for server in replicas.servers:
            server.wait_ready()
        yield replicas
    finally:
        for server in replicas.servers:
            server.__exit__()


def prompts(word: str) -> list[str]:
    """Five questions behind each of seven beginnings of some 60 tokens, by turns: none of them begins as another word's."""
    beginnings = [f"{word}{number} " + f"{number}{word}" * 10 for number in range(7)]
    return [f"{beginning} {question}+1=" for question in range(5) for beginning in beginnings]


@pytest.mark.parametrize("kind", UNITS)
def test_requests_are_spread_and_keep_their_depth(replicas: Replicas, kind: str) -> None:
    """24 at once through the router: all answered, both replicas took their part, the depths that a body asks for are in
    its answer, plain, chat and streamed, and no server had a word to say about the fields that the router adds."""
    with Router(kind, "round_robin", *replicas.urls) as router:
        before = replicas.counted("request_success_total")
        with ThreadPoolExecutor(8) as pool:
            answers = list(
                pool.map(
                    lambda n: router.ask(prompt=f"{n}+30=", num_loops=2, ignore_eos=True, return_exit_depths=True),
                    range(24),
                )
            )
        assert all(answer.status_code == 200 for answer in answers)
        assert all(answer.json()["choices"][0]["exit_depths"] == [4, 2, 2, 2] for answer in answers)
        shares = [now - then for now, then in zip(replicas.counted("request_success_total"), before, strict=True)]
        assert sum(shares) == 24 and min(shares) >= 8
        stream = router.ask(prompt="12+30=", stream=True, num_loops=2, return_exit_depths=True).text
        *chunks, last = [line.removeprefix("data: ") for line in stream.splitlines() if line]
        # How many tokens a chunk has is a matter of time.
        choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
        assert [depth for choice in choices for depth in choice["exit_depths"]] == [4, 2, 2] and last == "[DONE]"
        body = {"messages": [{"role": "user", "content": "12+30="}], "max_tokens": 3, "ignore_eos": True}
        chat = router.http.post(
            "/v1/chat/completions", json={"model": "demo", **body, "num_loops": 3, "return_exit_depths": True}
        )
        if chat.status_code == 200:
            assert chat.json()["choices"][0]["exit_depths"] == [4, 3, 3]
        else:
            assert "chat template" in chat.text
    for server in replicas.servers:
        assert "unknown field" not in server.log


@pytest.mark.parametrize("kind", UNITS)
def test_prefixes_find_the_server_that_has_them(replicas: Replicas, kind: str) -> None:
    """Seven common beginnings, a number that two does not divide: by turns each server computes every one of them; cache_aware sends each to where it is."""
    hits = {}
    for policy in ("round_robin", "cache_aware"):
        with Router(kind, policy, *replicas.urls) as router:
            before = sum(replicas.counted("prefix_cache_hits_total"))
            for prompt in prompts(f"{kind[0]}{policy[0]}"):
                assert router.ask(prompt=prompt).status_code == 200
            hits[policy] = sum(replicas.counted("prefix_cache_hits_total")) - before
    assert hits["cache_aware"] > 1.15 * hits["round_robin"] > 0, hits


def test_vllm_router_follows_the_events_of_the_cache(replicas: Replicas) -> None:
    """Policy kv_aware knows from the servers' events what each has cached: a long prompt goes, whole, to the one that has it,
    while both are idle, and the router names the tokens that it found there."""
    sources = [f"{url}={address}" for url, address in zip(replicas.urls, replicas.events, strict=True)]
    options = ["--log-level", "debug", "--kv-event-model", "demo", "--kv-event-block-size", "16"]
    for source in sources:
        options += ["--kv-event-source", source]
    with Router("vllm-router", "kv_aware", *replicas.urls, options=options) as router:
        before = replicas.counted("prefix_cache_hits_total")
        for number in range(6):
            assert router.ask(prompt="events " * 20 + str(number)).status_code == 200
        hits = [now - then for now, then in zip(replicas.counted("prefix_cache_hits_total"), before, strict=True)]
        log = Path(router.log.name).read_text()
    assert max(hits) >= 5 * 128 and min(hits) == 0, hits
    assert "KV event must be" not in log and "decode batch" not in log
    assert re.search(r"credited_prefix_tokens\S*=\S*1(28|44)", log), log[-3000:]


@pytest.mark.parametrize("kind", UNITS)
def test_a_killed_replica_is_taken_out_and_in_again(replicas: Replicas, kind: str) -> None:
    """kill -9 of one server while requests go through the router: every one is answered by the other. Started again on its
    port, it gets its share again."""
    with Router(kind, "round_robin", *replicas.urls) as router, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(router.ask, prompt=f"{n}+1=") for n in range(12)]
        replicas.servers[1].process.send_signal(signal.SIGKILL)
        replicas.servers[1].process.wait()
        asked += [pool.submit(router.ask, prompt=f"{n}+2=") for n in range(24)]
        assert [future.result().status_code for future in asked] == [200] * 36
        former = replicas.servers[1]
        replicas.servers[1] = ServeProcess(*replicas.options[1], port=former.port, wait=False)
        former.__exit__()
        replicas.servers[1].wait_ready()

        def shared() -> bool:
            assert router.ask(prompt="1+3=").status_code == 200
            return replicas.counted("request_success_total")[1] >= 3

        wait_until(shared, "the server that came back gets requests")
