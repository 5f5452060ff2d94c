"""The module map, docs/structure.md: one line a file, kept true. ``python tests/test_module_map.py --write`` renews it.

A line is the first sentence of the file's own docstring, so there is one place to keep right.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "structure.md"
PACKAGES = ("common", "scheduler", "worker", "frontend", "deploy", "training", "benchmarks")
BEGIN, END = "<!-- module map: begin -->", "<!-- module map: end -->"


def first_sentence(path: Path) -> str:
    """Of a module's docstring, on one line; raises AssertionError when there is none."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, f"{path.relative_to(ROOT)} has no docstring"
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    paragraph = re.split(r"(?<=\S)\. ", paragraph)[0]
    for end in ("; ", ": "):
        if len(paragraph) > 110:
            paragraph = paragraph.partition(end)[0]
    return paragraph.rstrip(".")


def module_map() -> str:
    """The section as it must stand in the page: a heading a package, a line a file."""
    lines = []
    for package in PACKAGES:
        for init in sorted((ROOT / package).rglob("__init__.py"), key=lambda path: path.parent.parts):
            folder = init.parent
            name = f"{folder.relative_to(ROOT)}/"
            lines += [f"{'##' if folder.name == package else '###'} `{name}`", "", f"{first_sentence(init)}.", ""]
            files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
            lines += [f"- `{path.name}` {first_sentence(path)}" for path in files] + [""]
    return "\n".join(lines).rstrip()


def page_parts() -> tuple[str, str, str]:
    """Before, inside and after the markers."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    inside, after = rest.split(END)
    return before, inside.strip(), after


def test_module_map_is_true() -> None:
    """A file that was added, removed or given another purpose shows here."""
    assert page_parts()[1] == module_map(), "run: python tests/test_module_map.py --write"


if __name__ == "__main__" and "--write" in sys.argv:
    before, _, after = page_parts()
    PAGE.write_text(f"{before}{BEGIN}\n\n{module_map()}\n\n{END}{after}", encoding="utf-8")
