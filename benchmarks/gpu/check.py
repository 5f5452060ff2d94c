"""Everything that only a GPU can show, in one run: ``benchmarks/gpu_check.sh`` (docs/gpu.md).

Sections run one after the other, each in a process of its own within what is left of the time; the JSON is rewritten
after every one, so neither a failure nor a lost machine takes more than its own section with it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"


class Section(NamedTuple):
    """A part of the check and the most time it may take."""

    name: str
    limit_s: float


SECTIONS = (
    Section("environment", 60),
    Section("tests.gpu", 120),
    Section("fidelity", 90),
    Section("ouro.steps", 120),
    Section("ouro.engines", 150),
    Section("huginn.steps", 120),
    Section("huginn.engines", 150),
    Section("ouro.speculation", 120),
    Section("huginn.speculation", 120),
    Section("ranks", 150),
    Section("tests.cpu-side", 90),
)
BUDGET_S = 450.0  # of the 8 minutes that a check may take


class Report:
    """The JSON file: one entry a result, with its status."""

    def __init__(self, path: Path, dry_run: bool) -> None:
        self.path = path
        self.failed = False
        self.data: dict[str, Any] = {"dry_run": dry_run, "results": {}}

    def put(self, name: str, status: str, **values: Any) -> None:
        self.failed |= status == "failed"
        self.data["results"][name] = {"status": status, **values}
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")
        print(f"{name}: {status} {json.dumps(values)[:400]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="depthbatch.benchmarks.gpu.check", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="the JSON")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="what does not fit is skipped")
    parser.add_argument("--only", action="append", metavar="SECTION", help="of: " + ", ".join(s.name for s in SECTIONS))
    parser.add_argument("--dry-run-cpu", action="store_true", help="the same code on the CPU, with tiny models")
    parser.add_argument("--run-section", help=argparse.SUPPRESS)  # of a child
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_section:
        return run_section(arguments.run_section, arguments.dry_run_cpu, arguments.work, arguments.into)
    unknown = set(arguments.only or ()) - {section.name for section in SECTIONS}
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}")
    report = Report(arguments.output, arguments.dry_run_cpu)
    end_s = time.monotonic() + arguments.budget_s
    with tempfile.TemporaryDirectory(prefix="gpu_check") as work:
        for section in SECTIONS:
            if arguments.only is None or section.name in arguments.only:
                check(section, report, end_s - time.monotonic(), Path(work), arguments.dry_run_cpu)
    return 1 if report.failed else 0


def check(section: Section, report: Report, left_s: float, work: Path, dry_run: bool) -> None:
    """Runs a section, within the time that is left, and reports what it gave."""
    if left_s < 10.0:
        report.put(section.name, "skipped", reason="no time left")
        return
    start_s = time.monotonic()
    limit_s = min(section.limit_s, left_s)
    if section.name.startswith("tests."):
        run_tests(section.name, report, limit_s, dry_run)
    else:
        run_child(section.name, report, limit_s, work, dry_run)
    report.put(f"{section.name}.seconds", "ok", seconds=round(time.monotonic() - start_s, 1))


def run_tests(name: str, report: Report, limit_s: float, dry_run: bool) -> None:
    """The tests that need a GPU; or those of the CUDA path that need none, under this machine's versions."""
    if name == "tests.gpu":
        chosen, interpret = [str(TESTS / "cuda" / "test_gpu.py")], "0"
    elif dry_run:
        report.put(name, "skipped", reason="these are the tests of the CUDA path themselves")
        return
    else:
        chosen, interpret = [str(TESTS / "cuda"), "-m", "not gpu", "--deselect", "tests/cuda/test_gpu_check.py"], "1"
    command = [sys.executable, "-m", "pytest", *chosen, "-rs", "-p", "no:cacheprovider", "--tb=short"]
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    try:
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        report.put(name, "failed", error=f"over {limit_s:.0f} s", tail=str(error.stdout or "")[-3000:])
        return
    report.put(name, "failed" if ran.returncode else "ok", tail=ran.stdout[-6000:])


def run_child(name: str, report: Report, limit_s: float, work: Path, dry_run: bool) -> None:
    """A section in a process of its own; what it had given before it failed counts."""
    into = work / f"{name}.jsonl"
    command = [sys.executable, "-m", "depthbatch.benchmarks.gpu.check", "--run-section", name]
    command += ["--into", str(into), "--work", str(work), *(["--dry-run-cpu"] if dry_run else [])]
    error = None
    # stdin: a child that dies with its parent takes the end of a pipe there for the parent's death
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=work) as child:
        try:
            _, errors = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            child.terminate()  # its engines end with it
            _, errors = child.communicate()
            error = f"over {limit_s:.0f} s"
    told = False
    for result in _lines(into):
        report.put(result["name"], result["status"], **result["values"])
        told |= result["status"] == "failed"
    if error is None and child.returncode and not told:  # it died without a word
        error = f"exit status {child.returncode}"
    if error is not None:
        report.put(name, "failed", error=error, tail=errors[-3000:])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text().splitlines():
            yield json.loads(line)


def run_section(name: str, dry_run: bool, work: Path, into: Path) -> int:
    """A section in this process: one line of JSON a result as soon as it is there."""
    from depthbatch.benchmarks.gpu import ranks, sections, speculation
    from depthbatch.common.os_process import die_with_parent

    die_with_parent(os.getppid())
    setup = sections.Setup(dry_run, work, TESTS / "data" / "fidelity")
    model, _, part = name.rpartition(".")
    function = getattr({"speculation": speculation, "ranks": ranks}.get(part, sections), part)
    with into.open("a") as file:

        def put(name: str, status: str, **values: Any) -> None:
            file.write(json.dumps({"name": name, "status": status, "values": values}) + "\n")
            file.flush()

        try:
            for found, result in function(setup, model) if model else function(setup):
                put(found, "ok", **result)
        except sections.Skipped as reason:
            put(name, "skipped", reason=str(reason))
        except Exception as error:
            put(name, "failed", error=f"{type(error).__name__}: {error}", trace=traceback.format_exc()[-3000:])
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
