"""Pictures of benchmark results (matplotlib, an optional dependency): of sweeps and of accuracy."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from depthbatch.common.arguments import output_file
from depthbatch.common.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
PICTURES = (".pdf", ".png", ".svg")
_LABELS = {
    "relative_to_cb": "throughput / CB",
    "tokens_per_s": "tokens/s",
    "normalized_latency_s": "normalized latency (s/token)",
    "idle_share": "idle share",
    "w": "W",
    "exits": "exit threshold",
    "rate": "requests/s",
    "k_share": "K / W",
    "draft_acceptance": "acceptance",
    "launch_us": "launch (us)",
    "mean_batch.core": "mean core batch",
    "p99_itl_s": "p99 ITL (s)",
    "s": "S",
    "kv_capacity": "KV memory / need",
}
# a fixed place in the colour cycle for each policy and gate, so that pictures can be compared
_COLOURS = {"cb": "0.35", "no-refill": "tab:orange", "refill": "tab:blue", "auto": "tab:green"}
_GATE_COLOURS = {
    "own": "tab:blue",
    "delayed": "tab:cyan",
    "lookahead": "tab:green",
    "preloop": "tab:red",
    "convergence": "tab:purple",
}
_FEW_POINTS = 8  # that an x axis marks one by one
_OTHER_COLOURS = ("tab:purple", "tab:red", "tab:brown", "tab:pink", "tab:cyan", "tab:olive", "k", "y")


class Figure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sweep file says of a figure: ``lines``, ``panels`` and ``where`` are axes of the sweep, ``x`` is an axis or a key
    of the rows, ``y`` and ``bounds`` (drawn dashed) are keys of the rows; ``mean_batch.core`` is ``core`` of ``mean_batch``.
    ``where``: only rows that have these values, or one of a list of them. ``x_line``: a key of the rows whose mean in a panel
    is marked on its x axis."""

    file: str
    x: str
    y: str
    lines: str
    panels: str | None = None
    where: dict[str, Any] = {}
    bounds: list[str] = []
    x_line: str | None = None
    log_x: bool = False
    log_y: bool = False
    x_label: str = ""
    y_label: str = ""
    y_max: float = 0.0
    title: str = ""

    @property
    def axes(self) -> set[str]:
        """All that must be axes."""
        return {self.lines, *self.where} | ({self.panels} if self.panels else set())


def picture_file(text: str) -> Path:
    """The path of a picture that can be written, for argparse."""
    path = Path(output_file(text))
    if path.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text}: a picture's name ends with {', '.join(PICTURES)}")
    return path


def import_pyplot() -> Any:
    """matplotlib.pyplot without a display; ConfigError says what to install."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install 'depthbatch[bench]'") from None
    return plt


def draw(rows: Sequence[Row], figure: Mapping[str, Any], title: str, path: Path) -> None:
    """Draws one ``Figure``, as the sweep file has it. Raises ConfigError for a column that the rows lack."""
    rows = [row for row in rows if _has(row, figure.get("where", {}))]
    for column in (figure["x"], figure["y"], *figure.get("bounds", ())):
        if not rows or not {column.partition(".")[0], f"axis_{column}"} & rows[0].keys():
            raise ConfigError(f"figure {figure['file']}: the results have no {column!r}")
    plt = import_pyplot()
    panel_axis = figure.get("panels")
    panels = _values(rows, panel_axis) if panel_axis else [None]
    size = (max(4.4 * len(panels), 6.0), 3.6)
    canvas, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for ax, panel in zip(axes[0], panels, strict=True):
        _draw_panel(ax, [row for row in rows if panel_axis is None or row[f"axis_{panel_axis}"] == panel], figure)
        ax.set_title(str(panel) if panel is not None else "", fontsize=10)
    axes[0][0].set_ylabel(figure.get("y_label", _LABELS.get(figure["y"], figure["y"])))
    axes[0][-1].legend(fontsize=8)
    canvas.suptitle(figure.get("title", title), fontsize=11)
    canvas.savefig(path, dpi=110)
    plt.close(canvas)


def _has(row: Row, where: Mapping[str, Any]) -> bool:
    return all(row[f"axis_{axis}"] in (v if isinstance(v, list) else [v]) for axis, v in where.items())


def figure_value(row: Row, key: str) -> Any:
    """A figure of a row; ``mean_batch.core`` is one within another."""
    outer, _, inner = key.partition(".")
    return row[outer][inner] if inner else row[outer]


def _draw_panel(ax: "Axes", rows: Sequence[Row], figure: Mapping[str, Any]) -> None:
    line_axis = f"axis_{figure['lines']}"
    x_axis = f"axis_{figure['x']}" if f"axis_{figure['x']}" in rows[0] else figure["x"]
    others = iter(_OTHER_COLOURS)
    for line in _values(rows, figure["lines"]):
        colour = _COLOURS[line] if line in _COLOURS else next(others)
        found = [row for row in rows if row[line_axis] == line and row[x_axis] is not None]
        if not found:
            continue
        xs = [row[x_axis] for row in found]
        ys = [figure_value(row, figure["y"]) for row in found]
        ax.plot(xs, ys, marker="o", markersize=3.5, label=str(line), color=colour)
        if line == _last_line(rows, line_axis):
            for bound, style in zip(figure.get("bounds", ()), ("--", "-."), strict=False):
                ax.plot(xs, [row[bound] for row in found], style, color="0.5", linewidth=1, label=bound)
    if "x_line" in figure:
        at = float(np.mean([row[figure["x_line"]] for row in rows]))
        ax.axvline(at, linestyle=":", color="0.4", linewidth=1.2, label="B*")
    ax.set_xlabel(figure.get("x_label", _LABELS.get(figure["x"], figure["x"])))
    if figure.get("log_x"):
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
    elif len(points := {row[x_axis] for row in rows}) <= _FEW_POINTS and all(isinstance(x, float) for x in points):
        ax.set_xticks(sorted(points))
        ax.xaxis.set_major_formatter("{x:g}")
    if figure.get("log_y"):
        ax.set_yscale("log")
    if "y_max" in figure:
        ax.set_ylim(0, figure["y_max"])
    ax.grid(alpha=0.3)


def _last_line(rows: Sequence[Row], line_axis: str) -> Any:
    """The line whose bounds are drawn: the last one, which is never the baseline alone."""
    return rows[-1][line_axis]


def _values(rows: Sequence[Row], axis: str) -> list[Any]:
    """Values of an axis in the order of the rows."""
    return list(dict.fromkeys(row[f"axis_{axis}"] for row in rows))


# --- accuracy


def draw_accuracy(report: Mapping[str, Any], directory: Path) -> list[Path]:
    """Accuracy against depth like the paper's Figure 14, ``accuracy-MODEL.png``, exits by difficulty class,
    ``exits-MODEL.png``, and, where drafts were read, how many are right, ``drafts-MODEL.png``, of a report of
    ``bench accuracy``; returns their paths. Raises ConfigError."""
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
    drafts = [row for row in report["by_draft_depth"] if row["drafts"]]
    if not drafts:
        return paths
    canvas, ax = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
    for gate, threshold in dict.fromkeys((row["gate"], row["threshold"]) for row in drafts):
        rows = [row for row in drafts if (row["gate"], row["threshold"]) == (gate, threshold)]
        label = "full depth" if threshold is None else f"gate {gate} at {threshold:g}"
        ax.plot(
            [row["depth"] for row in rows], [100 * row["acceptance"] for row in rows], "o-", label=label, markersize=4
        )
    ax.set_title(f"{report['model']}: drafts that are right", fontsize=10)
    ax.set_xlabel("loops after which the draft is read")
    ax.set_xticks(sorted({row["depth"] for row in drafts}))
    ax.set_ylabel("right (%)")
    ax.set_ylim(0, 102)
    ax.legend(fontsize=8)
    ax.grid(alpha=0.3)
    canvas.savefig(directory / f"drafts-{report['model']}.png", dpi=110)
    plt.close(canvas)
    return [*paths, directory / f"drafts-{report['model']}.png"]


def draw_loops(report: Mapping[str, Any], path: Path) -> None:
    """Perplexity by loops, exit depths at the last threshold, and those of some tokens, of a report of ``train-loops``.
    Raises ConfigError."""
    plt = import_pyplot()
    canvas = plt.figure(figsize=(9.5, 5.8), layout="constrained")
    grid = canvas.add_gridspec(2, 2, height_ratios=(3, 2))
    left, right, below = (canvas.add_subplot(place) for place in (grid[0, 0], grid[0, 1], grid[1, :]))
    example = report["example"]
    for name, colour in (("before", "0.5"), ("after", "tab:blue")):
        rows, exits = report[name]["perplexity"], report[name]["exits"][-1]
        left.plot([r["loops"] for r in rows], [r["perplexity"] for r in rows], "o-", color=colour, label=name)
        total = sum(exits["histogram"].values())
        shift = -0.2 if name == "before" else 0.2
        depths = [int(depth) + shift for depth in exits["histogram"]]
        right.bar(depths, [n / total for n in exits["histogram"].values()], 0.4, color=colour, label=name)
        below.bar([i + shift for i in range(len(example))], [t[name] for t in example], 0.4, color=colour)
    left.axvline(report["run"]["loops"], color="0.8", linestyle=":", zorder=0)
    left.set(xlabel="loops (dotted: the most that were trained)", ylabel="perplexity of held-out text")
    right.set_xticks(
        range(2, 1 + max(int(d) for when in ("before", "after") for d in report[when]["exits"][-1]["histogram"]))
    )
    right.set(xlabel=f"exit depth at convergence {exits['threshold']:g}", ylabel="share of tokens")
    below.set_xticks(range(len(example)), [t["token"].strip() or "\u2423" for t in example], rotation=90, fontsize=7)
    below.set(ylabel="exit depth", title="the first held-out tokens")
    left.legend(fontsize=8)
    canvas.savefig(path, dpi=110)
    plt.close(canvas)


def draw_scores(report: Mapping[str, Any], path: Path) -> None:
    """Scores against the mean depth, a line a task and metric at fixed depths, and a dashed one at thresholds, of a report
    of ``bench eval``. Raises ConfigError."""
    plt = import_pyplot()
    canvas, ax = plt.subplots(figsize=(6.5, 3.9), layout="constrained")
    rows = [row for row in report["rows"] if row["mean_depth"] is not None]
    for number, (task, metric) in enumerate(dict.fromkeys((row["task"], row["metric"]) for row in rows)):
        for fixed, style in ((True, "o-"), (False, "s--")):
            own = sorted(
                (row["mean_depth"], 100 * row["score"])
                for row in rows
                if (row["task"], row["metric"], row["num_loops"] is not None) == (task, metric, fixed)
            )
            if own:
                label = f"{task}, {metric}, {'fixed depth' if fixed else 'gate'}"
                ax.plot(*zip(*own, strict=True), style, color=f"C{number}", label=label, markersize=4)
    ax.set(
        xlabel="mean loops a token", ylabel="score (%)", title=f"{report['model']}, {report['size']} questions a task"
    )
    ax.legend(fontsize=8)
    ax.grid(alpha=0.3)
    canvas.savefig(path, dpi=110)
    plt.close(canvas)


def _gates(gated: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["gate"] for row in gated))


def _frontier(ax: "Axes", fixed: Sequence[Row], gated: Sequence[Row]) -> None:
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
        ax.plot(xs, ys, "o-", color=_GATE_COLOURS[gate], label=gate, markersize=3.5)
    ax.set_title("accuracy against depth", fontsize=10)
    ax.set_xlabel("mean depth of decode tokens (loops)")
    ax.set_ylabel("exact match (%)")
    ax.legend(fontsize=8)
    ax.grid(alpha=0.3)


def _depth_by_threshold(ax: "Axes", gated: Sequence[Row]) -> None:
    for gate in _gates(gated):
        rows = [row for row in gated if row["gate"] == gate]
        xs, ys = [row["threshold"] for row in rows], [row["mean_depth"] for row in rows]
        ax.plot(xs, ys, "o-", color=_GATE_COLOURS[gate], label=gate, markersize=3.5)
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
