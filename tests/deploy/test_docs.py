"""Documentation that can be wrong is checked: option reference, commands, fields and names that it speaks of."""

import re
from pathlib import Path

from depthbatch.benchmarks.workload import Workload
from depthbatch.common.config import FIELD_NAMES
from depthbatch.deploy.cli.main import BENCHMARKS
from depthbatch.deploy.cli.option_docs import option_reference
from depthbatch.frontend.http.schemas import ChatRequest, CompletionRequest
from depthbatch.frontend.http.settings import HTTP_FIELDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("getting-started.md", "operating.md", "options.md", "http-api.md", "adding-a-model.md", "zmq-api.md")


def test_option_reference_is_current() -> None:
    """The page is generated; a changed option without a new page fails here."""
    assert (ROOT / "docs" / "options.md").read_text() == option_reference()


def test_whole_numbers_are_written_out() -> None:
    """Bug: the largest seed was given as 9.22337203685478e+18, which is not a whole number and rounds up, over it."""
    assert f"to {2**63 - 1} " in option_reference() and "e+" not in option_reference()


def test_options_named_in_the_pages_exist() -> None:
    """Every --option in the prose is one of the configuration's, or of a command that is named beside it."""
    known = {name.replace("_", "-") for name in (*FIELD_NAMES, *HTTP_FIELDS)} | {"config", "print-config", "json"}
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text()
        used = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", text)) - {"upgrade", "now", "help", "output"}
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
        for path in re.findall(r"`((?:common|scheduler|worker|frontend|deploy|docs|tests|benchmarks)/[\w./-]*)`", text):
            assert (ROOT / path).exists(), f"{page}: {path}"
