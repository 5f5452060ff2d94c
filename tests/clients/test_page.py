"""The page at / in a headless Chromium: real keys, real pixels, a real server, and no word in the browser's console.

The server's model is the demo; answers that must be slow or hostile come from the fake engine, in this process.
"""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select

from depthbatch.common.gates import Gate
from depthbatch.deploy.cli.main import main
from fakes import serving_engine
from fakes.chat_tokenizer import byte_tokenizer
from fakes.http_server import LiveServer
from fakes.serve_process import ServeProcess

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium and chromedriver here: tests/clients/install.sh installs them"
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
TRACES = Path(__file__).resolve().parents[1] / "data" / "traces"
LIMIT_S = 20.0
RATE = r"\d{1,3}(,\d{3})*(\.\d)?|\u2013"  # as the page writes it, a dash where all tokens came in one piece
HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
CONTRAST = """
const light = (rgb) => { const [r, g, b] = rgb.map((v) => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b; };
const parts = (text) => text.match(/[\\d.]+/g).map(Number);
const behind = (node) => { for (; node; node = node.parentElement) {
  const [r, g, b, a = 1] = parts(getComputedStyle(node).backgroundColor); if (a === 1) return [r, g, b]; } return [255, 255, 255]; };
const low = [];
for (const node of document.querySelectorAll("body *")) {
  const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  if (!own || !node.checkVisibility() || node.disabled || node.namespaceURI.endsWith("svg") || node.tagName === "OPTION") continue;
  const a = light(parts(getComputedStyle(node).color).slice(0, 3)), b = light(behind(node));
  const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  if (ratio < 4.5) low.push([node.textContent.slice(0, 40), ratio.toFixed(2)]);
}
return low;
"""


class Browser:
    """One Chromium; ``visit`` starts a page anew."""

    def __init__(self, directory: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in (*FLAGS, f"--user-data-dir={directory}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(str(DRIVER)))

    def visit(self, url: str, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get("about:blank")
        self.driver.get(url)

    def open(self, url: str, **size: Any) -> None:
        """The page, as soon as it knows its model."""
        self.visit(url, **size)
        self.until(lambda: "loops" in self.get("#model").text, "the page knows its model")

    def get(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def script(self, text: str, *arguments: Any) -> Any:
        return self.driver.execute_script(text, *arguments)

    def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"never came true: {what}\n{self.get('body').text}"
            time.sleep(0.02)

    def press(self, *keys: str) -> None:
        """To whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def focused(self) -> str:
        return str(self.script("const a = document.activeElement; return a.className || a.id || a.hash || a.tagName"))

    def tab_to(self, name: str, key: str = Keys.TAB) -> None:
        for _ in range(40):
            if self.focused() == name:
                return
            self.press(key)
        raise AssertionError(f"{name} cannot be reached by {key!r}; the focus is at {self.focused()}")

    def run(self, prompt: str) -> None:
        """Asks and waits for the end of all answers."""
        self.get("#prompt").clear()
        self.get("#prompt").send_keys(prompt, Keys.CONTROL, Keys.ENTER)
        self.finish()

    def finish(self) -> None:
        self.until(lambda: self.get("#run").is_displayed(), "the answers have ended")

    def tokens(self, column: str = "A") -> list[dict[str, Any]]:
        """What is shown of each token of an answer."""
        found = self.script(
            """return [...document.querySelectorAll(`[data-column=${arguments[0]}] .tok`)].map((node) => ({
            text: node.textContent, depth: Number(node.dataset.depth), fill: getComputedStyle(node).backgroundColor,
            parts: node.classList.contains("parts"), blank: node.classList.contains("blank")}))""",
            column,
        )
        return list(found)

    def figures(self, column: str = "A") -> dict[str, str]:
        pairs = self.script(
            """return [...document.querySelectorAll(`[data-column=${arguments[0]}] .figures div`)]
            .map((entry) => [entry.querySelector("dt").textContent, entry.querySelector("dd").textContent])""",
            column,
        )
        return dict(pairs)

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.driver.quit()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """No test may leave anything in the console."""
    chromium.complaints()
    yield chromium
    assert chromium.complaints() == []


def asked(server: ServeProcess, **body: Any) -> dict[str, Any]:
    """The plain answer to what the page asks."""
    body = {"max_tokens": 64, "temperature": 0, "seed": 1, "return_exit_depths": True, "return_token_ids": True, **body}
    answer: dict[str, Any] = httpx.post(server.url + "/v1/completions", json=body, timeout=30).json()
    return answer


def test_tokens_stand_on_the_colour_of_their_depth(server: ServeProcess, browser: Browser) -> None:
    """Text, depths and costs are those of the API's plain answer; a depth has one colour, the legend's; the panel of a
    token has its loops, its logprob and five alternatives."""
    prompt = "kx qz xt ha zf t7 aj j6 f2 ?az="
    answer = asked(server, prompt=prompt)
    (choice,) = answer["choices"]
    browser.open(server.url)
    browser.run(prompt)
    tokens = browser.tokens()
    assert "".join(token["text"] for token in tokens if not token["blank"]) == choice["text"]
    assert [token["depth"] for token in tokens] == choice["exit_depths"]
    legend = browser.script(
        "return [...document.querySelectorAll('#legend .chip')].map((c) => [c.textContent, getComputedStyle(c).backgroundColor])"
    )
    assert [depth for depth, _ in legend] == ["1", "2", "3", "4"] and len({fill for _, fill in legend}) == 4
    assert all(token["fill"] == dict(legend)[str(token["depth"])] for token in tokens)
    assert browser.figures()["loops spent"] == f"{answer['usage']['loops']:,}"
    assert browser.figures()["mean depth"] == f"{answer['usage']['mean_exit_depth']:.2f}"
    webdriver.ActionChains(browser.driver).move_to_element(browser.all(".tok")[1]).perform()
    tip = browser.get("#tip")
    assert tip.is_displayed() and f"{tokens[1]['depth']} of 4 loops" in tip.text and "logprob" in tip.text
    assert len(browser.all("#tip li")) == 5 and tokens[1]["text"] in browser.get("#tip .chosen .tip-name").text


def test_two_settings_part_where_their_tokens_do(server: ServeProcess, browser: Browser) -> None:
    """A with the model's gate, B with two loops: each has its own answer, loops and speed; the first token that differs is
    marked in both. Bug: a fast machine's "2,941.2" tokens/s was read as a plain number; so would "1,024" loops have been, and
    the dash of an answer that came in one piece."""
    prompt = "kx qz xt ha zf t7 aj j6 f2 ?az="
    plain = [asked(server, prompt=prompt), asked(server, prompt=prompt, num_loops=2)]
    browser.open(server.url)
    browser.get("#compare").click()
    Select(browser.get("[data-column=B] [data-name=gate]")).select_by_value("fixed")
    browser.get("[data-column=B] [data-name=loops]").send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert not browser.get("[data-column=B] [data-name=threshold]").is_enabled()
    browser.run(prompt)
    ids = [answer["choices"][0]["token_ids"] for answer in plain]
    at = next(i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)
    for column, answer in zip("AB", plain, strict=True):
        tokens, figures = browser.tokens(column), browser.figures(column)
        assert [token["depth"] for token in tokens] == answer["choices"][0]["exit_depths"]
        assert [i for i, token in enumerate(tokens) if token["parts"]] == [at]
        assert figures["loops spent"] == f"{answer['usage']['loops']:,}"
        assert re.fullmatch(RATE, figures["tokens/s"]), figures["tokens/s"]
        details = answer["usage"]["completion_tokens_details"]
        if sum(details.values()):
            assert {"drafts accepted", "drafts dropped"} <= figures.keys()
    text = browser.get("#difference").text
    assert f"part at token {at + 1}:" in text and f"B spent {plain[1]['usage']['loops']} loops" in text


def test_by_keyboard_alone(server: ServeProcess, browser: Browser) -> None:
    """From a fresh page: type, run, walk through the tokens, go to another view and through its stages. No pointer."""
    browser.open(server.url)
    assert browser.focused() == "prompt"
    browser.press("12+30=")
    browser.tab_to("run")
    browser.press(Keys.ENTER)
    browser.finish()
    browser.until(lambda: browser.focused() != "stop", "the focus goes back to where one can run again")
    browser.tab_to("tok prefill")
    browser.press(Keys.ARROW_RIGHT)
    tip = browser.get("#tip")
    assert tip.is_displayed() and "of 4 loops" in tip.text and "from prefill" not in tip.text
    browser.press(Keys.HOME)
    assert "from prefill" in tip.text
    browser.press(Keys.ESCAPE)
    assert not tip.is_displayed()
    browser.tab_to("#schedule", Keys.SHIFT + Keys.TAB)
    browser.press(Keys.ENTER)
    browser.until(lambda: browser.all("#stages .part"), "stages are drawn")
    browser.tab_to("strips")
    browser.press(Keys.HOME)
    assert "1: " in browser.get(".schedule-note").text and "row" in browser.get(".schedule-note").text
    browser.press(Keys.ARROW_RIGHT)
    assert "2: " in browser.get(".schedule-note").text


def test_live_figures_are_those_of_metrics(server: ServeProcess, browser: Browser) -> None:
    """Cards for tokens, depth, stages, device, requests, memory; the count of tokens is the one that /metrics has."""
    browser.visit(server.url + "/#live")
    browser.until(lambda: len(browser.all("#cards .card")) >= 6, "the cards are there")
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    (total,) = [line.split()[1] for line in lines if line.startswith("depthbatch:generation_tokens_total{")]
    assert f"since start\n{float(total):,.0f}" in browser.get("[data-card='Tokens/s']").text
    for stage in ("prefill", "prelude", "core", "coda"):
        assert stage in browser.get("[data-card=Stages]").text
    assert "idle, no work" in browser.get("[data-card=Device]").text
    assert len(browser.all("[data-card=Depth] .track")) == 4
    assert "KV blocks" in browser.get("[data-card=Memory]").text and "q_r" in browser.get("[data-card=Requests]").text


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 360)])
def test_readable_and_narrow(scheme: str, width: int, server: ServeProcess, browser: Browser) -> None:
    """Every text has a contrast of 4.5 or more in both schemes, and nothing is wider than a phone."""
    browser.open(server.url, width=width, scheme=scheme)
    browser.get("#compare").click()
    browser.run("say cuk6en=")
    background = browser.script("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(20, 22, 26)") == (scheme == "dark")
    for view, ready in (("playground", ".tok"), ("live", "#cards .card"), ("schedule", "#stages .part")):
        browser.script("location.hash = arguments[0]", view)
        browser.until(lambda ready=ready: browser.all(ready), view)
        assert browser.script(CONTRAST) == []
        assert browser.script("return document.documentElement.scrollWidth") <= width, view


def test_streams_and_stops(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are shown while others are still to come; Escape ends the request, in the engine too."""
    with LiveServer(byte_tokenizer(), {"step_s": 0.05}) as slow:
        browser.open(slow.url)
        browser.get("#prompt").send_keys("x", Keys.CONTROL, Keys.ENTER)
        browser.until(lambda: len(browser.tokens()) >= 2, "tokens come")
        assert browser.get("#stop").is_displayed()
        browser.press(Keys.ESCAPE)
        browser.finish()
        assert 2 <= len(browser.tokens()) < serving_engine.NATURAL_LENGTH
        figures = browser.figures()
        assert figures["ended by"] == "stopped" and 0 < float(figures["tokens/s"]) < 1000, "a token every 50 ms"
        browser.until(lambda: not slow.engine.running, "the engine has heard of it")


def test_controls_are_the_requests_fields(browser: Browser) -> None:
    """What the engine gets is what the sliders say, and only what they say; both settings have the same seed and prompt.
    The drafts of an answer are counted as ``usage`` counts them."""
    with LiveServer(byte_tokenizer(), {"draft_lanes": 2}) as server:
        browser.open(server.url)
        browser.get("#compare").click()
        for name, keys in {"threshold": 3, "loops": 1, "temperature": 2}.items():
            key = Keys.ARROW_RIGHT if name == "temperature" else Keys.ARROW_LEFT
            browser.get(f"[data-column=B] [data-name={name}]").send_keys(key * keys)
        browser.get("[data-column=B] [data-name=drafts]").click()
        Select(browser.get("[data-column=B] [data-name=gate]")).select_by_value("own")
        assert browser.get("[data-column=B] [data-name=threshold]").get_attribute("value") == "0.5", "each gate its own"
        for name, keys in {"threshold": 3, "loops": 1}.items():
            browser.get(f"[data-column=B] [data-name={name}]").send_keys(Keys.ARROW_LEFT * keys)
        browser.get("#max-tokens").send_keys(Keys.CONTROL + "a", Keys.NULL, "12")
        browser.get("#seed").send_keys(Keys.CONTROL + "a", Keys.NULL, "77")
        browser.run("x")
        a, b = sorted(server.engine.resolved, key=lambda params: not params.speculation)
        assert (a.gate, a.exit_threshold, a.max_loops, a.temperature, a.speculation) == (
            Gate.LOOKAHEAD,
            0.5,
            4,
            0,
            True,
        )
        assert (b.gate, b.max_loops, b.speculation) == (Gate.OWN, 3, False)
        assert (b.exit_threshold, b.temperature) == (pytest.approx(0.47), pytest.approx(0.1))
        assert (a.max_tokens, b.max_tokens, a.seed, b.seed) == (12, 12, 77, 77) and a.logprobs and b.logprobs
        plain = httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 12, "temperature": 0})
        drafts = plain.json()["usage"]["completion_tokens_details"]
        figures = browser.figures()
        assert figures["drafts accepted"] == str(drafts["accepted_prediction_tokens"]) != "0"
        assert figures["drafts dropped"] == str(drafts["rejected_prediction_tokens"]) != "0"
        assert "drafts accepted" not in browser.figures("B")


def test_every_character_has_its_token(browser: Browser) -> None:
    """Tokens that are parts of characters, on either route: the texts of all tokens join to the plain answer's."""
    data = "aש😀가\x0b\u2028\n".encode() + b"\xf0\x9f" + b"b\x80"
    with pytest.MonkeyPatch.context() as patch, LiveServer(byte_tokenizer()) as server:
        patch.setattr(serving_engine, "fake_token", lambda prompt, seed, position: data[position % len(data)])
        browser.open(server.url)
        plain = httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 64}).json()
        text = plain["choices"][0]["text"]
        assert "😀가" in text and "\ufffd" in text
        answers = []
        for mode in (1, 2):
            browser.get(f"#mode label:nth-of-type({mode})").click()
            browser.run("x")
            tokens = browser.tokens()
            shown = "".join(token["text"] for token in tokens if not token["blank"])
            assert shown.replace("↵", "") == text and len(tokens) == serving_engine.NATURAL_LENGTH + 1
            assert ["" if token["blank"] else token["text"] for token in tokens[:8]] == [
                "a",
                "",
                "ש",
                "",
                "",
                "",
                "😀",
                "",
            ]
            answers.append(tokens)
        assert answers[0] == answers[1]


def test_hostile_text_stays_text(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt, answer, alternatives, conversation, errors and the model's name are markup with a script: all of it is
    shown as it is written, none of it runs."""
    data = HOSTILE.encode()
    monkeypatch.setattr(serving_engine, "fake_token", lambda prompt, seed, position: data[position % len(data)])
    with LiveServer(byte_tokenizer()) as server:
        server.service.model_name = HOSTILE
        browser.open(server.url)
        assert HOSTILE in browser.get("#model").text
        browser.get("#compare").click()
        browser.get("#mode label:nth-of-type(2)").click()
        for _ in range(2):
            browser.run(HOSTILE)
        answer = "".join(token["text"] for token in browser.tokens() if not token["blank"])
        assert answer and HOSTILE.startswith(answer[: len(HOSTILE)])
        assert browser.get("#history").text.count(HOSTILE) == 2 and "assistant B" in browser.get("#history").text
        # one token that is all of it, with alternatives like it, and then an error
        event = {"text": HOSTILE, "exit_depths": [2], "token_ids": [7], "finish_reason": None, "logprobs": {
            "tokens": [HOSTILE], "token_logprobs": [-0.5], "top_logprobs": [{HOSTILE: -0.5}], "text_offset": [0]}}  # fmt: skip
        stream = f"data: {json.dumps({'choices': [event]})}\n\ndata: {json.dumps({'error': {'message': HOSTILE}})}\n\n"
        browser.get("#mode label:nth-of-type(1)").click()
        browser.script("window.fetch = async () => new Response(arguments[0])", stream)
        browser.run(HOSTILE)
        assert [token["text"] for token in browser.tokens()] == [HOSTILE]
        assert browser.get("[data-column=A] .error").text == HOSTILE
        webdriver.ActionChains(browser.driver).move_to_element(browser.get(".tok")).perform()
        assert browser.get(".tip-text").text == HOSTILE and browser.get(".tip-name").text == HOSTILE
        assert browser.all("img") == [] and len(browser.all("script")) == 1 and browser.driver.title == "depthbatch"


def test_asks_for_the_key_and_keeps_it_in_the_tab(chromium: Browser) -> None:
    """A wrong key is refused and asked for again; the right one is in sessionStorage and nowhere else."""
    with LiveServer(byte_tokenizer(), api_key="sesame") as server:
        chromium.visit(server.url)
        chromium.until(lambda: chromium.get("#key-dialog").is_displayed(), "the question for a key")
        assert chromium.complaints() == [] and chromium.focused() == "key"
        chromium.press("wrong", Keys.ENTER)
        chromium.until(lambda: "did not take" in chromium.get("#key-note").text, "the refusal")
        chromium.press("sesame", Keys.ENTER)
        chromium.until(lambda: "loops" in chromium.get("#model").text, "the page knows its model")
        assert not chromium.get("#key-dialog").is_displayed()
        chromium.run("hi")
        assert len(chromium.tokens()) == serving_engine.NATURAL_LENGTH + 1
        kept = chromium.script("return [Object.values(sessionStorage), localStorage.length, document.cookie]")
        assert kept == [["sesame"], 0, ""]
        # the browser itself notes the answer to the wrong key
        assert all("401" in line and "v1/models" in line for line in chromium.complaints())


def test_schedule_from_a_file(browser: Browser, tmp_path: Path) -> None:
    """What ``bench trace --html`` writes draws every row group of every stage, without a server."""
    page, chrome = tmp_path / "schedule.html", tmp_path / "schedule.json"
    workload = str(TRACES / "ouro_sharegpt.workload.json")
    assert main(["bench", "trace", workload, "--last", "300", "--html", str(page), "--chrome", str(chrome)]) == 0
    spans = [event for event in json.loads(chrome.read_text())["traceEvents"] if event["ph"] == "X"]
    browser.visit(page.as_uri(), width=700)
    parts = sum(len(span["args"].get("depths", (1,))) for span in spans)
    assert len(spans) == 300 and len(browser.all(".part")) == parts and len(browser.all("svg.schedule")) > 1
    browser.get(".strips").send_keys(Keys.END)
    assert browser.get(".schedule-note").text.startswith("300: coda, ")
