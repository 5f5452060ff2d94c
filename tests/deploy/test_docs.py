"""Documentation that can be wrong is checked: option reference, commands, fields and names that it speaks of."""

import re
from pathlib import Path

from depthbatch.common.config import FIELD_NAMES
from depthbatch.deploy.option_docs import option_reference
from depthbatch.frontend.http.schemas import ChatRequest, CompletionRequest
from depthbatch.frontend.http.settings import HTTP_FIELDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("getting-started.md", "operating.md", "options.md", "http-api.md", "adding-a-model.md", "zmq-api.md")


def test_option_reference_is_current() -> None:
    """The page is generated; a changed option without a new page fails here."""
    assert (ROOT / "docs" / "options.md").read_text() == option_reference()


def test_options_named_in_the_pages_exist() -> None:
    """Every --option in the prose is one of the configuration's, or of a command that is named beside it."""
    known = {name.replace("_", "-") for name in (*FIELD_NAMES, *HTTP_FIELDS)} | {"config", "print-config", "json"}
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text()
        used = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", text)) - {"upgrade", "now", "help", "output"}
        assert used <= known, page


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
