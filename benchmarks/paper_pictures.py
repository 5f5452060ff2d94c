"""Pictures of the report on the paper that no sweep file describes: idle time (figure 3), step latency (4, 9), the effect of K
(7), and the inputs, lengths (10) and exit depths (11)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from depthbatch.benchmarks.figures import import_pyplot
from depthbatch.benchmarks.sources import load_workload
from depthbatch.benchmarks.synthetic import HUGINN_EXITS, HUGINN_WIDE, LENGTH_LAWS, OURO_EXITS
from depthbatch.worker.device_profile import CoreCost, DeviceProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
_PICTURE_REQUESTS = 20_000
_CONTEXTS = (128, 512, 2048, 8192)
_MODES = {"off": "0.6", "async": "tab:orange", "lookahead": "tab:green"}


def draw_idle(rows_by_model: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Idle share by scheduling mode and W, a panel a model, of sweeps over ``async_scheduling`` (Fig. 3 right)."""
    plt = import_pyplot()
    canvas, axes = plt.subplots(
        1, len(rows_by_model), figsize=(4.6 * len(rows_by_model), 3.4), squeeze=False, sharey=True, layout="constrained"
    )
    for ax, (model, rows) in zip(axes[0], rows_by_model.items(), strict=True):
        rows = [row for row in rows if row["axis_policy"] != "cb"]
        widths = list(dict.fromkeys(row["axis_w"] for row in rows))
        for number, (mode, colour) in enumerate(_MODES.items()):
            by_width = {row["axis_w"]: 100 * row["idle_share"] for row in rows if row["axis_async_scheduling"] == mode}
            places = [place + 0.27 * (number - 1) for place in range(len(widths))]
            bars = ax.bar(places, [by_width[w] for w in widths], 0.25, color=colour, label=mode)
            ax.bar_label(bars, fmt="%.1f", fontsize=8)
        ax.set_xticks(range(len(widths)), [f"W = {w}" for w in widths])
        ax.set_title(model, fontsize=10)
    axes[0][0].set_ylabel("device idle (%)")
    axes[0][-1].legend(fontsize=8, title="async_scheduling", title_fontsize=8)
    canvas.savefig(path, dpi=110)
    plt.close(canvas)


def draw_k(ouro: Sequence[Row], huginn: Sequence[Row], layers: Sequence[Row], path: Path, w: int = 64) -> None:
    """Fig. 7's four panels, of sweeps over ``k_share``: batch sizes and throughput against K at one W, throughput over that of
    the best K for every W, and other layer splits."""
    plt = import_pyplot()
    canvas, (batches, models, widths, splits) = plt.subplots(1, 4, figsize=(17.5, 3.7), layout="constrained")
    own = _by_k(huginn, axis_w=w)
    for stage, colour in (("core", "tab:blue"), ("coda", "tab:cyan")):
        _line(batches, own, [row["mean_batch"][stage] for row in own], label=f"{stage}, Huginn", color=colour)
    batches.set(ylabel="mean batch", title=f"batch sizes, W = {w}")
    for name, rows, colour in (("Ouro", ouro, "tab:orange"), ("Huginn", huginn, "tab:blue")):
        own = _by_k(rows, axis_w=w)
        _line(models, own, [row["relative_to_cb"] for row in own], label=name, color=colour)
    models.set(ylabel="throughput / CB", title=f"throughput, W = {w}")
    sizes = list(dict.fromkeys(row["axis_w"] for row in huginn))
    for number, size in enumerate(sizes):
        own = _by_k(huginn, axis_w=size)
        speed = np.array([row["tokens_per_s"] for row in own])
        colour = plt.get_cmap("Blues")(0.3 + 0.7 * number / max(1, len(sizes) - 1))
        _line(widths, own, speed / speed.max(), label=f"W = {size}", color=colour)
        best = int(speed.argmax())
        widths.plot(own[best]["axis_k_share"], 1.0, "*", color=colour, markersize=11)
    widths.axvline(0.25, linestyle=":", color="0.4")
    widths.set(ylabel="throughput / that of the best K", title="Huginn by W, best K starred")
    for number, split in enumerate(dict.fromkeys(row["axis_boundary_layers"] for row in layers)):
        own = _by_k(layers, axis_boundary_layers=split)
        _line(splits, own, [row["relative_to_cb"] for row in own], label=f"{split}-4-{split}", color=f"C{number}")
        splits.plot([row["axis_k_share"] for row in own], [row["s_e2e"] for row in own], "--", color=f"C{number}", lw=1)
    splits.set(ylabel="throughput / CB (dashed: S_e2e)", title=f"Huginn with fewer boundary layers, W = {w}")
    for ax in (batches, models, widths, splits):
        ax.set_xlabel("K / W (leftmost: K = 1)")
        ax.title.set_size(10)
        ax.legend(fontsize=8)
        ax.grid(alpha=0.3)
    canvas.savefig(path, dpi=110)
    plt.close(canvas)


def _by_k(rows: Sequence[Row], **having: Any) -> list[Row]:
    return [row for row in rows if row["axis_policy"] == "refill" and all(row[key] == v for key, v in having.items())]


def _line(ax: "Axes", rows: Sequence[Row], values: Any, **style: Any) -> None:
    ax.plot([row["axis_k_share"] for row in rows], values, marker="o", markersize=3.5, **style)


def draw_step_latency(profiles: Sequence[DeviceProfile], measured: Sequence[Row], path: Path) -> None:
    """t(B) of a core step at several context lengths: of device profiles (Fig. 4, 9), and measured, points over their fit, of
    maps with ``model``, ``device``, ``points`` [{``batch``, ``context``, ``core_ms``}] and ``core``, a CoreCost."""
    plt = import_pyplot()
    count = len(profiles) + len(measured)
    canvas, axes = plt.subplots(1, count, figsize=(4.4 * count, 3.6), squeeze=False, layout="constrained")
    for ax, profile in zip(axes[0], profiles, strict=False):
        _latency_panel(ax, profile.core, _CONTEXTS, 512)
        ax.set_title(f"{profile.name} (profile)", fontsize=10)
    for ax, row in zip(axes[0][len(profiles) :], measured, strict=True):
        core = CoreCost(**row["core"])
        contexts = sorted({point["context"] for point in row["points"]})
        _latency_panel(ax, core, contexts, max(point["batch"] for point in row["points"]))
        for number, context in enumerate(contexts):
            found = [point for point in row["points"] if point["context"] == context]
            ax.plot([p["batch"] for p in found], [p["core_ms"] for p in found], "o", color=f"C{number}", markersize=4)
        ax.set_title(f"{row['model']} on this {row['device']} (measured)", fontsize=10)
    axes[0][0].set_ylabel("core step (ms)")
    canvas.savefig(path, dpi=110)
    plt.close(canvas)


def _latency_panel(ax: "Axes", core: CoreCost, contexts: Sequence[float], most: int) -> None:
    batches = np.unique(np.geomspace(1, most, 60).astype(int))
    for number, context in enumerate(contexts):
        slope = core.gamma_ms + core.alpha_ms * context
        times, saturation = core.delta_ms + slope * batches, core.delta_ms / slope
        ax.plot(batches, times, color=f"C{number}", label=f"L = {context:.0f}, B* = {saturation:.3g}")
        if saturation <= most:
            ax.plot([saturation], [2 * core.delta_ms], "|", color=f"C{number}", markersize=14)
    ax.axhline(core.delta_ms, linestyle=":", color="0.4")
    ax.set(xscale="log", yscale="log", xlabel="batch size")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.legend(fontsize=8)
    ax.grid(alpha=0.3)


def draw_lengths(path: Path) -> None:
    """Empirical CDFs of prompt and output tokens."""
    plt = import_pyplot()
    canvas, axes = plt.subplots(1, 2, figsize=(9.2, 3.4), layout="constrained")
    for name in LENGTH_LAWS:
        requests = load_workload(name, _PICTURE_REQUESTS, {}, 4).requests
        for ax, values in zip(
            axes, ([r.prompt_tokens for r in requests], [r.output_tokens for r in requests]), strict=True
        ):
            ax.plot(np.sort(values), np.linspace(0, 1, len(values)), label=f"{name}, mean {np.mean(values):.0f}")
    for ax, label in zip(axes, ("prompt tokens", "output tokens"), strict=True):
        ax.set(xscale="log", xlabel=label, ylabel="share of requests")
        ax.legend(fontsize=8)
        ax.grid(alpha=0.3)
    canvas.savefig(path, dpi=110)
    plt.close(canvas)


def draw_exits(path: Path) -> None:
    """Share of tokens by depth and threshold."""
    plt = import_pyplot()
    canvas, axes = plt.subplots(1, 2, figsize=(10.0, 3.4), layout="constrained", width_ratios=(1, 2.6))
    tables = {
        "Ouro": {f"q={q}": weights for q, weights in OURO_EXITS.items()},
        "Huginn": {f"q={q}": w for q, w in HUGINN_EXITS.items()} | {"wide": HUGINN_WIDE},
    }
    for ax, (model, table), r_max in zip(axes, tables.items(), (4, 16), strict=True):
        grid = np.array([[weights.get(d, 0.0) for d in range(1, r_max + 1)] for weights in table.values()])
        ax.imshow(grid, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        for (row, column), value in np.ndenumerate(grid):
            if value:
                ax.text(
                    column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color="k" if value < 0.6 else "w"
                )
        ax.set(title=model, xlabel="exit depth", xticks=range(r_max), yticks=range(len(table)))
        ax.set_xticklabels(range(1, r_max + 1))
        ax.set_yticklabels(list(table))
    canvas.savefig(path, dpi=110)
    plt.close(canvas)
