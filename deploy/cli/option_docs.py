"""docs/options.md from the configuration classes: ``python -m depthbatch.deploy.cli.option_docs > docs/options.md``."""

import sys
from collections.abc import Mapping

from depthbatch.common.config import FIELDS
from depthbatch.common.options import Option
from depthbatch.frontend.http.settings import HTTP_FIELDS

HEADER = """# Options

Generated from the configuration by `python -m depthbatch.deploy.cli.option_docs`; a test keeps it current.

Every option can come from the command line (`--max-num-seqs 32`), the environment (`DEPTHBATCH_MAX_NUM_SEQS=32`) or a
TOML file given with `--config` (`max_num_seqs = 32`). The command line wins over the environment, the environment over
the file. `depthbatch serve --print-config` shows what is in force, as TOML. A variable that is empty is taken for unset;
one with the prefix that names no option is an error, but for those that Kubernetes sets for a service of that name.
"""


def option_reference() -> str:
    """The whole page."""
    engine = _table("Engine", "`serve`, `generate` and the Python classes take these.", FIELDS)
    http = _table("HTTP server", "`serve` takes these, too.", HTTP_FIELDS)
    return f"{HEADER}\n{engine}\n{http}"


def _table(title: str, text: str, options: Mapping[str, Option]) -> str:
    lines = [f"## {title}", "", text, "", "| option | values | default | |", "|---|---|---|---|"]
    for name, entry in options.items():
        if name == "model":
            continue
        default = "" if entry.default is None else f"`{entry.default}`"
        lines.append(f"| `--{name.replace('_', '-')}` | {_values(entry)} | {default} | {entry.help} |")
    return "\n".join(lines) + "\n"


def _values(entry: Option) -> str:
    low, high = entry.low, entry.high
    if entry.choices:
        return ", ".join(f"`{choice}`" for choice in entry.choices)
    kind = {int: "whole number", float: "number", str: "text"}[entry.kind]
    bounds = [] if low is None else [f"from {_number(low)}"]
    bounds += [] if high is None else [f"to {_number(high)}"]
    return " ".join([kind, *bounds])


def _number(value: float) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.stdout.write(option_reference())
