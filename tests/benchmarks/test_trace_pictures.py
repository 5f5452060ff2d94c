"""What an engine's ``--stage-trace`` has written, read again: as text, as a page of its own, as a trace for Perfetto."""

import json
import re
from pathlib import Path

import pytest

from depthbatch.benchmarks.trace import blank_result, virtual_engine
from depthbatch.benchmarks.trace_pictures import chrome_trace, read_stages, schedule_html
from depthbatch.benchmarks.workload import Workload
from depthbatch.common.config import EngineConfig
from depthbatch.deploy.cli.main import main
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.scheduler.stage_trace import StageTrace

WORKLOAD = Path(__file__).parent.parent / "data" / "traces" / "ouro_sharegpt.workload.json"
STAGES = [
    {"stage": "prefill", "batch": 2, "prompt_tokens": 9, "q_r": 2, "q_c": 0, "q_p": 1, "start_s": 5.0, "end_s": 5.25},
    {"stage": "core", "batch": 2, "depths": {"1": 1, "3": 1}, "exits": 1, "q_r": 1, "q_c": 1, "q_p": 1, "start_s": 5.5, "end_s": 6.0},
    {"stage": "coda", "batch": 1, "q_r": 1, "q_c": 0, "q_p": 1, "start_s": 6.0, "end_s": 6.125},
]  # fmt: skip


def written(path: Path, stages: list[dict[str, object]], tail: str = "") -> str:
    path.write_text("".join(json.dumps(stage) + "\n" for stage in stages) + tail)
    return str(path)


def test_times_come_with_results(tmp_path: Path) -> None:
    """A stage is written when its result is there, with the worker's times. One that was lost with its worker, and one
    still in flight at the end, are written without; the order stays that of the launches."""
    workload = Workload(Workload.read(WORKLOAD).requests[:3])
    options = EngineConfig(policy="refill", max_num_seqs=2, preemption="off", async_scheduling="lookahead")
    scheduler = Scheduler(SchedulerConfig.resolve(options, virtual_engine(workload, 2, 4, None)))
    for index, request in enumerate(workload.requests):
        assert scheduler.submit(request.submit(index, 4)) is None
    path = tmp_path / "stages.jsonl"
    trace = StageTrace(str(path))
    stages = []
    for _ in range(3):
        stage = scheduler.next_stage(0.0)
        assert stage is not None
        stages.append(stage)
        trace.dispatched(stage, scheduler, 0)
    assert path.read_text() == ""
    trace.finished(blank_result(stages[1], 2.0, 3.0))
    assert [line.get("start_s") for line in read_stages(str(path))] == [None, 2.0]
    trace.close()
    lines = read_stages(str(path))
    assert [line.get("end_s") for line in lines] == [None, 3.0, None]
    assert [line["stage"] for line in lines] == [stage.header.stage.name.lower() for stage in stages]


def test_page_needs_nothing_else(tmp_path: Path) -> None:
    """The data come back as they were, a name cannot become markup, and no address is in the page but SVG's own name."""
    hostile = [STAGES[1] | {"note": "</script><img src=x onerror=alert(1)>"}]
    page = schedule_html(hostile, "<b>&.jsonl", 7, 3)
    data = re.search(r'<script type="application/json" id="stages">(.*?)</script>', page, re.DOTALL)
    assert data is not None and json.loads(data[1]) == hostile
    assert "<b>&.jsonl" not in page and "&lt;b&gt;&amp;.jsonl" in page and "<img" not in page
    assert set(re.findall(r"https?://[\w./]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(?:link|img|iframe)\b|\bsrc=", page.replace(data[1], ""))
    assert "the last 1 of 7 stages: 1 core steps of 2.0 rows on average" in page


def test_perfetto_gets_the_times_of_the_worker() -> None:
    """Microseconds from the first stage on, a lane a kind, and counters; without times, a millisecond a stage."""
    events = chrome_trace(STAGES)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(span["name"], span["ts"], span["dur"]) for span in spans] == [
        ("prefill 2", 0, 250_000),
        ("core 2", 500_000, 500_000),
        ("coda 1", 1_000_000, 125_000),
    ]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert [lanes[span["tid"]] for span in spans] == ["prefill", "core", "coda"]
    (rows,) = [event for event in events if event["name"] == "rows at loop"]
    assert rows["args"] == {"loop 1": 1, "loop 2": 0, "loop 3": 1} and rows["ts"] == 500_000
    lost = [{key: value for key, value in STAGES[0].items() if not key.endswith("_s")}, *STAGES[1:]]
    untimed = chrome_trace(lost)
    assert [event["ts"] for event in untimed["traceEvents"] if event["ph"] == "X"] == [0, 1000, 2000]
    assert "launch order" in untimed["otherData"]["clock"] and "worker" in chrome_trace(STAGES)["otherData"]["clock"]


def test_command_reads_what_an_engine_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As text, the last lines only, and both pictures; a line that is being written is left out. A workload is drawn, too."""
    trace = written(tmp_path / "stages.jsonl", STAGES, tail='{"stage": "co')
    assert main(["bench", "trace", trace, "--last", "2"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == STAGES[1:]
    page, chrome = tmp_path / "out.html", tmp_path / "out.json"
    assert main(["bench", "trace", trace, "--html", str(page), "--chrome", str(chrome)]) == 0
    assert capsys.readouterr().out == "" and json.loads(chrome.read_text())["traceEvents"]
    assert "stages.jsonl</h1><p>3 stages" in page.read_text() and "JSON.parse" in page.read_text()
    assert main(["bench", "trace", str(WORKLOAD), "--html", str(page)]) == 0
    assert "the last 400 of " in page.read_text()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"stage": "cora", "batch": 1, "q_p": 0}', "line 4: not a stage"),
        ('{"stage": "core", "batch": "1", "q_p": 0}', "line 4"),
        ('{"stage": "core", "batch": 1, "q_p": 0, "depths": {"<b>": 1}}', "line 4"),
        ('{"stage": "core", "batch": 1, "q_p": 0, "start_s": 1.0}', "line 4"),
        ("[]", "line 4"),
        ("{", "line 4"),
    ],
)
def test_a_line_that_is_no_stage_is_named(
    line: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr, exit code 2."""
    assert main(["bench", "trace", written(tmp_path / "t.jsonl", STAGES, tail=line + "\n")]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--policy", "cb"], ["--w", "4"], ["--live"]])
def test_options_that_do_nothing_are_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has run has its policy and width."""
    assert main(["bench", "trace", written(tmp_path / "t.jsonl", STAGES), *words]) == 2
    assert f"{words[0]} has no effect" in capsys.readouterr().err
