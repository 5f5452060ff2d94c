"""Pictures of ``bench accuracy``: accuracy against depth like the paper's Figure 14, and exits by difficulty class."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthbatch.benchmarks.figures import import_pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]
# one place in the colour cycle for each gate, so that pictures can be compared
_COLOURS = {
    "own": "tab:blue",
    "delayed": "tab:cyan",
    "lookahead": "tab:green",
    "preloop": "tab:red",
    "convergence": "tab:purple",
}


def draw_figures(report: Mapping[str, Any], directory: Path) -> list[Path]:
    """Draws ``accuracy-MODEL.png`` and ``exits-MODEL.png`` of a report; returns their paths. Raises ConfigError."""
    plt = import_pyplot()
    paths = [directory / f"{kind}-{report['model']}.png" for kind in ("accuracy", "exits")]
    gated = report["by_threshold"]
    canvas, axes = plt.subplots(1, 3, figsize=(13.5, 3.9), layout="constrained")
    _frontier(axes[0], report["by_fixed_depth"], gated)
    _depth_by_threshold(axes[1], gated)
    shown = "own" if any(row["gate"] == "own" for row in gated) else None
    rows = [row for row in gated if row["gate"] == shown]
    _distributions(axes[2], plt, [(f"{row['threshold']:g}", row["histogram"]) for row in rows], report["r_max"])
    axes[2].set_title(f"exit depths of gate {shown}" if shown else "no gate", fontsize=10)
    axes[2].set_xlabel("threshold")
    canvas.suptitle(f"{report['model']}: {report['examples']} held-out questions, greedy, exact match", fontsize=11)
    canvas.savefig(paths[0], dpi=110)
    plt.close(canvas)

    setting = report["by_class_setting"]
    canvas, ax = plt.subplots(figsize=(6.5, 3.9), layout="constrained")
    classes = [
        (f"{row['class']}\n{100 * row['accuracy']:.1f} %\n{row['mean_depth']:.2f} loops", row["histogram"])
        for row in report["by_class"]
    ]
    _distributions(ax, plt, classes, report["r_max"])
    at = "" if setting["threshold"] is None else f" at threshold {setting['threshold']:g}"
    ax.set_title(f"{report['model']}: exit depths by class, gate {setting['gate']}{at}", fontsize=10)
    canvas.savefig(paths[1], dpi=110)
    plt.close(canvas)
    return paths


def _gates(gated: Rows) -> list[str]:
    return list(dict.fromkeys(row["gate"] for row in gated))


def _frontier(ax: "Axes", fixed: Rows, gated: Rows) -> None:
    ax.plot(
        [row["depth"] for row in fixed],
        [100 * row["accuracy"] for row in fixed],
        "o--",
        color="0.35",
        label="fixed depth",
        markersize=4,
    )
    for gate in _gates(gated):
        rows = sorted((row for row in gated if row["gate"] == gate), key=lambda row: row["mean_depth"])
        xs, ys = [row["mean_depth"] for row in rows], [100 * row["accuracy"] for row in rows]
        ax.plot(xs, ys, "o-", color=_COLOURS[gate], label=gate, markersize=3.5)
    ax.set_title("accuracy against depth", fontsize=10)
    ax.set_xlabel("mean depth of decode tokens (loops)")
    ax.set_ylabel("exact match (%)")
    ax.legend(fontsize=8)
    ax.grid(alpha=0.3)


def _depth_by_threshold(ax: "Axes", gated: Rows) -> None:
    for gate in _gates(gated):
        rows = [row for row in gated if row["gate"] == gate]
        xs, ys = [row["threshold"] for row in rows], [row["mean_depth"] for row in rows]
        ax.plot(xs, ys, "o-", color=_COLOURS[gate], label=gate, markersize=3.5)
    ax.set_title("mean depth by threshold", fontsize=10)
    ax.set_xlabel("threshold")
    ax.set_ylabel("mean depth (loops)")
    ax.grid(alpha=0.3)


def _distributions(ax: "Axes", plt: Any, bars: Sequence[tuple[str, Mapping[int, int]]], r_max: int) -> None:
    """Stacked bars of the share of tokens at every depth; deep is dark."""
    bottom = [0.0] * len(bars)
    names = [name for name, _ in bars]
    for depth in range(1, r_max + 1):
        shares = [100 * counts.get(depth, 0) / max(1, sum(counts.values())) for _, counts in bars]
        if any(shares):
            colour = plt.get_cmap("viridis_r")((depth - 1) / max(1, r_max - 1))
            ax.bar(names, shares, bottom=bottom, color=colour, label=str(depth))
            bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    ax.set_ylabel("decode tokens (%)")
    ax.tick_params(axis="x", labelsize=8, rotation=45 if len(bars) > 8 else 0)
    if bars:
        ax.legend(title="depth", fontsize=7, title_fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
