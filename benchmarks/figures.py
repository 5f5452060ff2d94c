"""Pictures of benchmark results (matplotlib, an optional dependency): lines over an axis, one panel a value.

A figure is a map: ``file``, ``x``, ``y``, ``lines``, and optionally ``panels``, ``bounds`` (more keys of the rows, drawn
dashed), ``log_x``, ``log_y``, ``x_label``, ``y_label``, ``y_max``. ``x``, ``lines`` and ``panels`` are axes of the sweep.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthbatch.common.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
_KEYS = {"file", "x", "y", "lines", "panels", "bounds", "log_x", "log_y", "x_label", "y_label", "y_max", "title"}
_LABELS = {
    "relative_to_cb": "throughput / CB",
    "tokens_per_s": "tokens/s",
    "normalized_latency_s": "normalized latency (s/token)",
    "idle_share": "idle share",
    "w": "W",
    "exits": "exit threshold",
    "rate": "requests/s",
    "k_share": "K / W",
}
# a fixed place in the colour cycle for each policy, so that pictures can be compared
_COLOURS = {"cb": "0.35", "no-refill": "tab:orange", "refill": "tab:blue", "auto": "tab:green"}
_OTHER_COLOURS = ("tab:purple", "tab:red", "tab:brown", "tab:pink", "tab:cyan", "tab:olive", "k", "y")


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
    """Draws one figure to a PNG file. Raises ConfigError for an unknown key or a column that the rows lack."""
    unknown = sorted(set(figure) - _KEYS)
    if unknown:
        raise ConfigError(f"figure {figure.get('file')}: unknown key {', '.join(unknown)}")
    for column in (figure["y"], *figure.get("bounds", ())):
        if not rows or column not in rows[0]:
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


def _draw_panel(ax: "Axes", rows: Sequence[Row], figure: Mapping[str, Any]) -> None:
    x_axis, line_axis = f"axis_{figure['x']}", f"axis_{figure['lines']}"
    others = iter(_OTHER_COLOURS)
    for line in _values(rows, figure["lines"]):
        colour = _COLOURS[line] if line in _COLOURS else next(others)
        found = [row for row in rows if row[line_axis] == line and row[x_axis] is not None]
        if not found:
            continue
        xs = [row[x_axis] for row in found]
        ys = [row[figure["y"]] for row in found]
        ax.plot(xs, ys, marker="o", markersize=3.5, label=str(line), color=colour)
        if line == _last_line(rows, line_axis):
            for bound in figure.get("bounds", ()):
                ax.plot(xs, [row[bound] for row in found], "--", color="0.5", linewidth=1, label=bound)
    ax.set_xlabel(figure.get("x_label", _LABELS.get(figure["x"], figure["x"])))
    if figure.get("log_x"):
        ax.set_xscale("log", base=2)
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
