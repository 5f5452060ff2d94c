"""Every row of the table of what must never happen has a test whose docstring quotes it.

``tests/data/failure_rows.txt`` is the symptom column of docs/failures.md, one row a line; a row's parts, which ";" separates, may
be quoted by different tests. This test reads the tests' source and knows nothing of what they do.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = (ROOT / "tests" / "data" / "failure_rows.txt").read_text(encoding="utf-8").splitlines()
TABLE = ROOT / "docs" / "failures.md"


def one_line(text: str) -> str:
    return " ".join(text.split())


def quotations() -> dict[str, str]:
    """Docstring of every test function, by file and name."""
    found = {}
    for folder in ("tests", "tests/clients"):
        for path in sorted((ROOT / folder).rglob("test_*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                    found[f"{path.relative_to(ROOT)}::{node.name}"] = one_line(ast.get_docstring(node) or "")
    return found


DOCSTRINGS = quotations()


def named_by(part: str) -> list[str]:
    return [name for name, text in DOCSTRINGS.items() if part in text and not name.startswith("tests/test_failures.py")]


@pytest.mark.parametrize("row", ROWS)
def test_row_has_a_test(row: str) -> None:
    """Each part of the row is quoted, word for word: a row that loses its test, or a new one without, fails here."""
    for part in row.split("; "):
        assert named_by(part), f"no test's docstring quotes {part!r}"


def test_a_row_that_nobody_tests_is_seen() -> None:
    """The test above would pass on anything if every text were found everywhere."""
    assert len(ROWS) > 30 and not named_by("a symptom that no row has")


def test_rows_are_those_of_the_table() -> None:
    """A row that is taken off the page, or changed on one side alone, fails here."""
    cells = [line.strip("|\n").split("|")[0].strip() for line in TABLE.open(encoding="utf-8") if line.startswith("|")]
    assert cells[2:] == ROWS


if __name__ == "__main__":
    for row in ROWS:
        for part in row.split("; "):
            print(part, *named_by(part), sep="\n    ")
