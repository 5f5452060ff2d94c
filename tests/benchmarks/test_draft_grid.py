"""Sweeps of learned drafts against fixed ones: what a file says of drafts, and the table of a grid."""

from pathlib import Path

from depthbatch.benchmarks.sweep import AXES, read_sweep, run_settings
from depthbatch.benchmarks.tables import draft_ratios, draft_table

GRID = """
requests = 2
summary = "drafts"
[axes]
profile = ["h100-ouro-1.4b"]
workload = ["alpaca"]
draft_acceptance = [0.9]
policy = ["auto"]
speculation = ["off", "2:1", "2:3", "auto"]
w = [2]
"""


def test_a_sweep_names_draft_lanes_with_their_depth(tmp_path: Path) -> None:
    """A depth that is lost on the way would make both fixed settings the same; read after one loop, drafts bring more."""
    path = tmp_path / "grid.toml"
    path.write_text(GRID)
    speed = {row["axis_speculation"]: row["tokens_per_s"] for row in run_settings(read_sweep(path))}
    assert AXES["speculation"] == "off"
    assert speed["2:1"] > 1.1 * speed["2:3"] > 1.1 * speed["off"]


def row(speculation: str, tokens_per_s: float, policy: str = "auto") -> dict[str, object]:
    cell = {"profile": "p", "exits": "full", "draft_acceptance": 0.5, "w": 8, "policy": policy}
    return {f"axis_{k}": v for k, v in cell.items()} | {"axis_speculation": speculation, "tokens_per_s": tokens_per_s}


def test_ratios_are_to_the_best_fixed_setting_and_to_none() -> None:
    """cb does not count as a setting, no drafts do; a cell without auto is left out."""
    rows = [row("off", 100.0, "cb"), row("off", 50.0), row("1:1", 40.0), row("2:1", 60.0), row("auto", 59.4)]
    assert {cell: tuple(r) for cell, r in draft_ratios(rows).items()} == {("p", "full", 0.5, 8): (0.99, 1.188)}
    assert "0.990 (1.19)" in draft_table(rows) and "100.0% of cells at 0.99" in draft_table(rows)
    assert draft_table(rows[:4]) == "No cell has speculation off and auto."
