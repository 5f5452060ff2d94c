"""The page at /: what it is served with, what it is made of, and what it reads beside the OpenAI routes."""

import asyncio
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest

from depthbatch.frontend.http.operations import last_lines
from depthbatch.frontend.http.page import HEADERS, PATHS, STATIC
from depthbatch.frontend.http.server import LateApp
from depthbatch.frontend.tokenizer import Tokenizer
from fakes.http_server import LiveServer

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path.name for path in STATIC.iterdir())
SCRIPTS = [name for name in FILES if name.endswith(".js")]


def text_of(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(PATHS))
def test_every_file_has_the_strict_headers(path: str, http: httpx.Client) -> None:
    """No script but this server's own, no frame, no guessing of types, no address told to others."""
    answer = http.get(path)
    assert answer.status_code == 200 and answer.content
    policy = dict(part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";"))
    assert (
        policy["default-src"] == "'self'" and policy["frame-ancestors"] == "'none'" and policy["object-src"] == "'none'"
    )
    assert policy["require-trusted-types-for"] == "'script'" and "unsafe" not in str(policy)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    kinds = {"": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".json": "application/json"}  # fmt: skip
    assert answer.headers["content-type"].split(";")[0] == kinds[Path(path).suffix]


def test_all_it_asks_for_is_served_and_shipped(http: httpx.Client) -> None:
    """Every file that document, style and scripts name is among those served; none has an address elsewhere. The package
    holds every one of them."""
    named = set(re.findall(r'(?:src|href)="([^"#]+)"', text_of("page.html")))
    for script in SCRIPTS:
        named |= {f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', text_of(script))}
    assert named and {f"/{name}" for name in named} <= PATHS
    assert {f"page/{name}" for name in FILES if name != "page.html"} <= named  # and none is left over
    for name in FILES:
        assert set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text_of(name))) <= {"http://www.w3.org"}, name
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert data["depthbatch.frontend.http"] == ["static/*"]
    assert http.head("/").status_code == 200, "bug: whoever watches a page by HEAD was told 405"
    assert http.get("/page/page.html").status_code == http.get("/page/..%2fapp.py").status_code == 404


async def while_loading(loaded: tuple[int, int], path: str, accept: str, **late: bool) -> httpx.Response:
    app = LateApp(lambda: {"status": "starting"}, lambda: loaded, **late)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        return await http.get(path, headers={"accept": accept})


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def test_a_browser_is_told_that_the_model_loads() -> None:
    """Bug: whoever opened the page while the model was loading got a line of JSON, once. A page says how far it is and asks
    again by itself; programs, other paths and servers without the page have JSON as before, all of them 503."""

    def get(*arguments: Any, **late: bool) -> httpx.Response:
        answer = asyncio.run(while_loading(*arguments, **late))
        assert answer.status_code == 503 and answer.headers.get("retry-after", "5") == "5"
        return answer

    page = get((3 << 30, 12 << 30), "/", BROWSER)
    assert page.headers["content-type"].startswith("text/html") and page.headers["cache-control"] == "no-store"
    assert page.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
    assert "the model is loading: 25% of 12.0 GiB" in page.text and 'http-equiv="refresh"' in page.text
    assert f'<progress max="{12 << 30}" value="{3 << 30}">' in page.text and "<script" not in page.text
    assert "<progress></progress>" in get((0, 0), "/", BROWSER).text
    for path, accept, late in (("/", "*/*", {}), ("/v1/models", BROWSER, {}), ("/", BROWSER, {"page": False})):
        answer = get((1 << 20, 2 << 20), path, accept, **late)
        assert answer.json()["error"]["message"] == "the model is loading: 50% of 2.0 MiB"
    assert get((0, 0), "/ready", BROWSER).json() == {"status": "starting"}


def test_no_text_can_become_markup() -> None:
    """What models and users write is set as text alone, and the document holds no script, style or handler of its own."""
    for script in SCRIPTS:
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setHTML|parseFromString|srcdoc|localStorage|document\.cookie",
            text_of(script),
        )
        assert not found, script
    document = text_of("page.html")
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", document)


def test_a_key_is_asked_of_requests_not_of_the_page(tokenizer: Tokenizer) -> None:
    """The page can be read without a key and says that one is needed; models, tokens and stages cannot."""
    with LiveServer(tokenizer, api_key="sesame") as server, httpx.Client(base_url=server.url, timeout=20) as http:
        assert {http.get(path).status_code for path in PATHS} == {200}
        facts = http.get("/page/server.json").json()
        assert facts["api_key"] and facts["chat"] and "fake" not in json.dumps(facts)
        assert http.get("/v1/models").status_code == http.get("/stage_trace").status_code == 401
        assert http.get("/page/other.js").status_code == 401


def test_the_page_can_be_switched_off(tokenizer: Tokenizer) -> None:
    """``--page off``: nothing at its addresses, everything else as it was."""
    with LiveServer(tokenizer, page="off") as server, httpx.Client(base_url=server.url, timeout=20) as http:
        assert {http.get(path).status_code for path in PATHS} == {404}
        assert http.get("/v1/models").status_code == 200


def test_model_card_says_what_depths_there_are(http: httpx.Client) -> None:
    """What a client needs to offer a choice of depth."""
    (card,) = http.get("/v1/models").json()["data"]
    assert (card["min_loops"], card["max_loops"], card["gate"], card["exit_threshold"]) == (1, 4, "lookahead", 0.5)
    assert "fixed" in card["gates"] and card["max_logprobs"] == 20 and card["draft_lanes"] == 0


def test_stages_are_told_where_they_are_written(live: LiveServer, http: httpx.Client) -> None:
    """As JSON, in the order of the file; without a trace, 404 names the option."""
    answer = http.get("/stage_trace")
    assert answer.status_code == 404 and "--stage-trace" in answer.json()["error"]["message"]
    live.probe.stage_lines = [b'{"stage": "core", "batch": 3}', b'{"stage": "coda", "batch": 1}']
    try:
        assert [stage["batch"] for stage in http.get("/stage_trace").json()["stages"]] == [3, 1]
    finally:
        live.probe.stage_lines = None


def test_last_lines_of_a_file_that_grows(tmp_path: Path) -> None:
    """Whole lines only, however long the file; what is no ordinary file is not waited for."""
    path = tmp_path / "stages.jsonl"
    assert last_lines(str(path), 3) is None
    path.write_bytes(b"a\nb\nhalf")
    assert last_lines(str(path), 3) == [b"a", b"b"]
    path.write_bytes(b"".join(b"%0300d\n" % number for number in range(1000)))
    assert last_lines(str(path), 2) == [b"%0300d" % 998, b"%0300d" % 999]
    os.mkfifo(tmp_path / "pipe")
    assert last_lines(str(tmp_path / "pipe"), 3) is None
