"""The module map in the README: one line a file, kept true. ``python tests/test_module_map.py --write`` renews it.

A line is the first sentence of the file's own docstring, so there is one place to keep right.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("common", "scheduler", "worker", "frontend", "deploy", "training", "benchmarks")
BEGIN, END = "<!-- module map: begin -->", "<!-- module map: end -->"


def first_sentence(path: Path) -> str:
    """Of a module's docstring, on one line; raises AssertionError when there is none."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, f"{path.relative_to(ROOT)} has no docstring"
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    for end in (". ", "; ", ": "):
        head, found, _ = paragraph.partition(end)
        if found and (end == ". " or len(paragraph) > 110):
            paragraph = head
    return paragraph.rstrip(".").replace("|", "\\|")


def module_map() -> str:
    """The section as it must stand in the README."""
    lines = []
    for package in PACKAGES:
        title = first_sentence(ROOT / package / "__init__.py")
        lines += [f"**`{package}/`** {title}", "", "| file | |", "|---|---|"]
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "__init__.py" and "__pycache__" not in path.parts:
                lines.append(f"| `{path.relative_to(ROOT / package)}` | {first_sentence(path)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def readme_parts() -> tuple[str, str, str]:
    """Before, inside and after the markers."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    inside, after = rest.split(END)
    return before, inside.strip(), after


def test_module_map_is_true() -> None:
    """A file that was added, removed or given another purpose shows here."""
    assert readme_parts()[1] == module_map(), "run: python tests/test_module_map.py --write"


if __name__ == "__main__" and "--write" in sys.argv:
    before, _, after = readme_parts()
    (ROOT / "README.md").write_text(f"{before}{BEGIN}\n\n{module_map()}\n\n{END}{after}", encoding="utf-8")
