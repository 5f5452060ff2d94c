"""What comments and pages cite is there: a document of ``docs/``, a section of it, a file, the paper.

Citations look like ``docs/zmq-api.md``, ``(architecture, section 3)``, ``(scheduling.md, cost model)`` or
``(paper, A.5)``. This test reads text and knows nothing of what the code does.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGES = ("common", "scheduler", "worker", "frontend", "deploy", "training", "benchmarks", "tests")
SOURCES = ("*.py", "*.c", "*.h", "*.toml", "*.conf", "*.yml", "*.sh", "*.service")
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])

DOCUMENT = re.compile(r"(?<![\w/.-])((?:[\w-]+/)*[\w-]+\.md)\b")
SECTION = re.compile(r"\b([a-z][a-z-]*)(?:\.md)?, section (\d+)")
HEADING = re.compile(r"\((?:[^()]* )?(?:docs/)?([a-z][a-z-]*)\.md, (?!section)([^,():;]+)[,):;]")  # in brackets
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
HOP = re.compile(r"`([\w/]+\.py):(\w+)`")
NOWHERE = ("hardware notes", "hardware.md", "interfaces.md", "families.md", "house.md")


def sources() -> list[Path]:
    found = [path for package in PACKAGES for kind in SOURCES for path in sorted((ROOT / package).rglob(kind))]
    return [*found, ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "__init__.py"]


def prose(path: Path) -> str:
    """A file on one line, so that a citation may be broken over two, without the marks that begin comment lines."""
    return " ".join(re.sub(r"^[#*\s]+", "", line) for line in path.read_text(encoding="utf-8").splitlines())


def headings(name: str) -> list[str]:
    """Of a document of docs/, in lower case and without marks; none if there is no such document."""
    path = DOCS / f"{name}.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [line.lstrip("# ").replace("`", "").lower() for line in text.splitlines() if line.startswith("#")]


def anchors(path: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    found = [line.lstrip("#").strip().lower() for line in path.read_text("utf-8").splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in found}


def unknown(text: str, folder: Path) -> Iterator[str]:
    """Citations of a text that lead nowhere. ``folder``: where the text's file is."""
    for cited in DOCUMENT.findall(text):
        if not any((base / cited).is_file() for base in (ROOT, DOCS, folder)):
            yield cited
    for name, number in SECTION.findall(text):
        if not any(heading.startswith(f"{number}.") for heading in headings(name)):
            yield f"{name}, section {number}"
    for name, words in HEADING.findall(text):
        if not any(heading.removeprefix("the ").startswith(words.strip().lower()) for heading in headings(name)):
            yield f"{name}.md, {words}"
    yield from (word for word in NOWHERE if word in text)


def test_comments_cite_what_is_there() -> None:
    """Bug: 49 comments cited architecture, scheduling, models and interfaces, none of which was in the repository."""
    files = [path for path in sources() if path != Path(__file__).resolve()]
    wrong = {
        str(path.relative_to(ROOT)): lost for path in files if (lost := sorted(set(unknown(prose(path), path.parent))))
    }
    assert not wrong
    cited = sum(len(SECTION.findall(prose(path))) + len(DOCUMENT.findall(prose(path))) for path in files)
    assert cited > 30, "the test sees no citations any more"


@pytest.mark.parametrize(
    "lost", ["docs/nowhere.md", "(architecture, section 99)", "(scheduling.md, no such heading)", "(hardware notes)"]
)
def test_a_citation_that_leads_nowhere_is_seen(lost: str) -> None:
    """The test above would pass on anything if it found no citations at all."""
    assert list(unknown(f"Some text {lost} and more.", DOCS))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_the_pages_lead_somewhere(page: Path) -> None:
    """Relative links and their anchors; a page that was renamed or a heading that was changed shows here."""
    text = page.read_text(encoding="utf-8")
    for target, anchor in LINK.findall(text):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(path), f"{page.name}: {target}#{anchor}"
    assert not [word for word in NOWHERE if word in text]


def test_the_paper_is_named() -> None:
    """Bug: comments cite "the paper" and its sections, and no page said which paper it is, or where."""
    readme = prose(ROOT / "README.md")
    assert "[Depth-adaptive Inference of Looped Language Models via Continuous Depth Batching]" in readme
    assert "https://arxiv.org/abs/2608.09444" in readme


def test_life_of_a_request_is_true() -> None:
    """Every ``file.py:function`` on the pages is there; a function that is renamed or moved takes its hop with it."""
    hops = [(page, *hop) for page in PAGES for hop in HOP.findall(page.read_text(encoding="utf-8"))]
    assert len(hops) > 20
    lost = [
        f"{page.name}: {path}:{function}"
        for page, path, function in hops
        if not (ROOT / path).is_file() or not re.search(rf"def {function}\(", (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not lost
