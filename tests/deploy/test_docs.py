"""Documentation that can be wrong is checked: option reference, commands, fields and names that it speaks of."""

import argparse
import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

import depthbatch
from depthbatch.benchmarks.workload import Workload
from depthbatch.common.config import FIELD_NAMES
from depthbatch.deploy.cli.main import BENCHMARKS, COMMANDS, build_parser, main
from depthbatch.deploy.cli.option_docs import option_reference
from depthbatch.frontend.http.schemas import ChatRequest, CompletionRequest
from depthbatch.frontend.http.settings import HTTP_FIELDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "getting-started.md", "operating.md", "options.md", "http-api.md", "adding-a-model.md", "zmq-api.md",
    "architecture.md", "concepts.md", "scheduling.md", "models.md", "failures.md", "python-api.md", "training.md", "sweeps.md",
    "structure.md", "names.md", "page.md", "fleet.md", "cpu.md", "gpu.md", "benchmarks.md",
)  # fmt: skip


def test_option_reference_is_current() -> None:
    """The page is generated; a changed option without a new page fails here."""
    assert (ROOT / "docs" / "options.md").read_text() == option_reference()


def test_whole_numbers_are_written_out() -> None:
    """Bug: the largest seed was given as 9.22337203685478e+18, which is not a whole number and rounds up, over it."""
    assert f"to {2**63 - 1} " in option_reference() and "e+" not in option_reference()


def options_of_commands() -> set[str]:
    """Every long option of every command and benchmark."""
    words = [[name] for name in COMMANDS] + [["bench", name] for name in BENCHMARKS]
    texts = []
    for command in words:
        parser: argparse.ArgumentParser = build_parser([*command, "--help"])
        for name in command:
            (subparsers,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
            parser = subparsers.choices[name]
        texts += [option for action in parser._actions for option in action.option_strings]
    return {text.removeprefix("--") for text in texts if text.startswith("--")}


def test_options_named_in_the_pages_exist() -> None:
    """Every --option in the prose is one of the configuration's or of some command's; the words taken off are those of
    programs that are not ours, and of scripts."""
    known = {name.replace("_", "-") for name in (*FIELD_NAMES, *HTTP_FIELDS)} | options_of_commands()
    assert len(known) > 60
    foreign = {
        "upgrade",
        "no-build-isolation",
        "chaos-s",
        "chaos-seed",
        "chaos-preemption",
        "inputs",
        "contexts",
        "shapes",
        "shape",
        "prefill",
        "now",
        "write",
        "dry-run-cpu",
        "only",
        "parent-pid",
        "run-dir",
        "kv-event-source",
        "kv-event-model",
        "kv-event-block-size",
    }
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text()
        used = set(re.findall(r"(?<![\w-])--([a-z](?:-?[a-z0-9])+)(?![\w-])", text)) - foreign
        assert used <= known, page


def test_every_benchmark_is_documented() -> None:
    """Bug: `bench trace` and `bench accuracy` were on no page."""
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for name in BENCHMARKS:
        assert f"`depthbatch bench {name} " in text, name


def test_workload_file_of_the_page_can_be_read(tmp_path: Path) -> None:
    """Bug: the format of what `bench trace` takes was on no page. The example, without its dots, is one request."""
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    example = re.search(r'^    (\{"requests": .*), \.\.\.\]\}$', text, re.MULTILINE)
    assert example is not None
    path = tmp_path / "workload.json"
    path.write_text(example[1] + "]}")
    (request,) = Workload.read(path).requests
    assert (request.output_tokens, request.exit_depths, request.arrival_s) == (3, (2, 4), 0.5)


def test_request_fields_are_documented() -> None:
    """Every body field of both generation endpoints is in the HTTP page."""
    text = (ROOT / "docs" / "http-api.md").read_text()
    for name in {*CompletionRequest.model_fields, *ChatRequest.model_fields}:
        assert f"`{name}`" in text, name


def test_files_named_in_the_pages_exist() -> None:
    """Paths in backticks that look like the repository's are there."""
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text()
        for path in re.findall(
            r"`((?:common|scheduler|worker|frontend|deploy|training|docs|tests|benchmarks)/[\w./-]*)`", text
        ):
            assert (ROOT / path).exists(), f"{page}: {path}"


def names_page(section: str) -> str:
    """A section of docs/names.md."""
    text = (ROOT / "docs" / "names.md").read_text()
    return text.split(f"## {section}\n")[1].split("\n## ")[0]


def test_names_of_commands_are_true() -> None:
    """The page of stable names and the command line list the same; a command that was renamed fails here."""
    listed = set(re.findall(r"`depthbatch ([a-z-]+) ", names_page("Commands")))
    assert listed == {*COMMANDS, "bench"}
    bench = names_page("Benchmarks").split("`depthbatch bench` has ")[1].split("([")[0]
    assert set(re.findall(r"`([a-z-]+)`", bench)) == set(BENCHMARKS)


def test_names_of_make_targets_are_true() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert set(re.findall(r"^\| `make ([\w-]+)`", names_page("Make targets"), re.MULTILINE)) == set(phony[1].split())


def test_names_of_python_are_true() -> None:
    """What the package exports is what the page lists, and every member in the tables of the Python page is there."""
    listed = set(re.findall(r"^\| `depthbatch\.(\w+)` ", names_page("Python"), re.MULTILINE))
    assert listed == set(depthbatch.__all__) - {"__version__"}
    page = (ROOT / "docs" / "python-api.md").read_text()
    for section, owner in (("LLM", depthbatch.LLM), ("AsyncEngine", depthbatch.AsyncEngine)):
        table = page.split(f"## {section}\n")[1].split("\n## ")[0].split("| member")[1]
        cells = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
        members = set(re.findall(r"`(\w+)(?:\([^`]*\))?`", cells)) - {section}
        assert len(members) >= 5
        assert {name for name in members if not hasattr(owner, name) and name not in ("info",)} == set()


def test_fields_of_sampling_params_are_documented() -> None:
    """The ZMQ page's table of ``params`` is the one list of their names, for Python too."""
    table = (ROOT / "docs" / "zmq-api.md").read_text().split("| field | type |")[1].split("\n\n")[0]
    listed = set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines()[2:])))
    assert listed == set(inspect.signature(depthbatch.SamplingParams).parameters)


def test_names_of_routes_are_true() -> None:
    """Every route of the application, but the models by name, is on the page; nothing else is."""
    source = " ".join(path.read_text() for path in (ROOT / "frontend" / "http").glob("*.py"))
    routes = set(re.findall(r"""@(?:router|app)\.(?:get|post)\(\s*"(/[^"{]*)\"""", source)) - {"/v1/models/"}
    assert len(routes) > 8
    assert set(re.findall(r"`(/[\w/.]*)`", names_page("HTTP"))) == routes | {"/openapi.json"}


def test_first_trace_of_the_concepts_is_true(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The three pictures of one workload, row for row: which loop each sequence runs in which core step."""
    page = (ROOT / "docs" / "concepts.md").read_text()
    workload = tmp_path / "workload.json"
    found = re.search(r'^    (\{"requests": .*?\]\})$', page, re.MULTILINE | re.DOTALL)
    assert found is not None
    workload.write_text(found[1])
    for policy in ("cb", "no-refill", "refill"):
        picture = page.split(f"    {policy}: ")[1].split("\n\n")[0].splitlines()
        rows = [line.split()[1:] for line in picture[1:]]
        assert main(["bench", "trace", str(workload), "--policy", policy, "--w", "3", "--m", "64", "--r-max", "4"]) == 0
        steps = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        cores = [step["depths"] for step in steps if step["stage"] == "core"]
        width = max(len(row) for row in rows)
        drawn = [Counter(row[i] for row in rows if i < len(row) and row[i] != ".") for i in range(width)]
        assert drawn == [Counter(depths) for depths in cores]
        assert int(re.search(r"(\d+) steps", picture[0])[1]) == len(cores)  # type: ignore[index]


def test_blocks_of_the_python_page_run() -> None:
    """Both examples, as they stand; they print depths and end well."""
    page = (ROOT / "docs" / "python-api.md").read_text()
    blocks = re.findall(r"(?:^    .*\n|^\n(?=\n?    ))+", page, re.MULTILINE)
    blocks = [block for block in blocks if "import" in block]
    assert len(blocks) == 2
    for block in blocks:
        code = textwrap.dedent(block)
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False)
        assert run.returncode == 0 and "[4" in run.stdout, run.stderr


def test_sweep_of_the_page_runs(tmp_path: Path) -> None:
    """Bug: the example had a K above one of its W, which the scheduler refuses."""
    found = re.search(
        r"(?:^    .*\n)*^    \[axes\]\n(?:^    .*\n)*", (ROOT / "docs" / "sweeps.md").read_text(), re.MULTILINE
    )
    assert found is not None
    path = tmp_path / "sweep.toml"
    path.write_text(textwrap.dedent(found[0]))
    assert main(["bench", "sweep", str(path), "--output-dir", str(tmp_path), "--requests", "8"]) == 0
    assert len(json.loads((tmp_path / "sweep.json").read_text())["rows"]) == 20  # 4 groups of 4 policies, and their cb
    assert (tmp_path / "w.png").stat().st_size > 0


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
