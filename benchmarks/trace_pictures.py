"""A schedule (the lines of ``--stage-trace`` or ``bench trace``) as a page of its own, and as a trace for Perfetto."""

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import Stage

Line = dict[str, Any]
KINDS = tuple(stage.label for stage in Stage)
UNTIMED_US = 1000.0  # what a stage without times is drawn as long as

_STYLE = """
:root{color-scheme:light dark;--ink:#1c1f23;--dim:#5b626b;--line:#d5d9de;--paper:#fff}
@media (prefers-color-scheme:dark){:root{--ink:#e4e6e9;--dim:#9aa2ac;--line:#363c44;--paper:#15181c}}
body{font:14px/1.5 system-ui,sans-serif;margin:1.5em;color:var(--ink);background:var(--paper)}
h1{font-size:1.1em;margin:0}p{margin:.4em 0;color:var(--dim)}.strips{overflow:clip}.schedule{display:block;margin-bottom:.7em}
.legend{display:flex;flex-wrap:wrap;gap:.3em 1.2em}.chip{padding:0 .45em;font-size:.85em}
.swatch{display:inline-block;width:.8em;height:.8em;margin-right:.35em}
svg text{fill:var(--dim);font-size:11px}svg .grid{stroke:var(--line)}svg .waiting{fill:var(--dim);opacity:.55}
svg .cursor{fill:none;stroke:var(--ink)}.schedule-note{font-variant-numeric:tabular-nums;min-height:3em}
"""


def is_stage_trace(path: str) -> bool:
    """Whether a file holds stages; a workload is one object of another kind. False for what cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            first = json.loads(file.readline())
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and "stage" in first


def read_stages(path: str) -> list[Line]:
    """Of a ``--stage-trace`` file, which may still be written to. Raises ConfigError with the line that is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    lines = text.split("\n")[:-1]  # the last one may not be whole yet
    return [_stage(path, number, line) for number, line in enumerate(lines, start=1)]


def _stage(path: str, number: int, text: str) -> Line:
    try:
        line = json.loads(text)
        counts = [line["batch"], line["q_p"], *line.get("depths", {}).values()]
        times = [line[name] for name in ("start_s", "end_s") if name in line]
        good = line["stage"] in KINDS and all(type(n) is int and n >= 0 for n in counts)
        good &= all(type(t) in (int, float) for t in times) and len(times) in (0, 2)
        good &= all(loop.isdecimal() and int(loop) for loop in line.get("depths", {}))
    except (ValueError, KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise ConfigError(f"{path}, line {number}: not a stage: {text[:80]!r}")
    return dict(line)


def deepest_loop(lines: Sequence[Line]) -> int:
    """The deepest loop that any stage ran, at least 1."""
    return max((int(loop) for line in lines for loop in line.get("depths", ())), default=1)


def schedule_html(lines: Sequence[Line], name: str, total: int, max_loops: int) -> str:
    """One file that needs no other and asks nobody: data, style and script are in it. ``total``: stages of the whole trace."""
    data = json.dumps(list(lines), separators=(",", ":")).replace("<", "\\u003c")
    cores = [line["batch"] for line in lines if line["stage"] == Stage.CORE.label]
    mean = f"{len(cores)} core steps of {sum(cores) / len(cores):.1f} rows on average" if cores else "no core step"
    shown = f"{len(lines)} stages" if len(lines) == total else f"the last {len(lines)} of {total} stages"
    title = escape(name)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>Schedule of {title}</title><style>{_STYLE}</style>
<h1>Schedule of {title}</h1><p>{shown}: {mean}</p><div id="schedule"></div>
<script type="application/json" id="stages">{data}</script>
<script type="module">
{(files("depthbatch.frontend.http") / "static" / "schedule.js").read_text(encoding="utf-8")}
const stages = JSON.parse(document.getElementById("stages").textContent);
const draw = () => drawSchedule(document.getElementById("schedule"), stages, {max_loops});
addEventListener("resize", draw);
draw();
</script></html>
"""


def chrome_trace(lines: Sequence[Line]) -> dict[str, Any]:
    """The format that Perfetto and chrome://tracing open: a span a stage, a lane a kind of stage, and counters for the rows
    at each loop and the queues. Times are those of the worker; where any stage has none, a millisecond a stage."""
    timed = all("start_s" in line for line in lines)
    first_s = lines[0]["start_s"] if lines and timed else 0.0
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "depthbatch"}}]
    for lane, kind in enumerate(KINDS, start=1):
        events.append({"ph": "M", "pid": 1, "tid": lane, "name": "thread_name", "args": {"name": kind}})
    loops = [str(loop) for loop in range(1, deepest_loop(lines) + 1)]
    for index, line in enumerate(lines):
        start_us, length_us = index * UNTIMED_US, UNTIMED_US
        if timed:
            start_us, length_us = 1e6 * (line["start_s"] - first_s), 1e6 * (line["end_s"] - line["start_s"])
        args = {key: value for key, value in line.items() if key not in ("stage", "start_s", "end_s")}
        at = {"pid": 1, "ts": round(start_us, 3)}
        lane = 1 + KINDS.index(line["stage"])
        name = f"{line['stage']} {line['batch']}"
        span = {"ph": "X", "tid": lane, "name": name, "cat": line["stage"], "dur": round(length_us, 3), "args": args}
        events.append(span | at)
        if "depths" in line:
            rows = {f"loop {loop}": line["depths"].get(loop, 0) for loop in loops}
            events.append({"ph": "C", "name": "rows at loop", "args": rows} | at)
        queues = {key: value for key, value in line.items() if key.startswith("q_")}
        events.append({"ph": "C", "name": "queues", "args": queues} | at)
    clock = "the worker's" if timed else "none: launch order, a millisecond a stage"
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clock": clock}}
