"""``depthbatch bench sweep FILE.toml``: the product of settings (docs/sweeps.md), one table, and figures."""

import argparse
import itertools
import json
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from tqdm import tqdm

from depthbatch.benchmarks.figures import PICTURES, Figure, draw, import_pyplot
from depthbatch.benchmarks.sweep_runs import NO_DRAFTS, TARGETS, Processes, Row, Runner, Simulations
from depthbatch.benchmarks.tables import auto_table, draft_table, memory_table, slots_table, table
from depthbatch.benchmarks.throughput import BASELINE
from depthbatch.common.arguments import MOST, output_directory, positive
from depthbatch.common.errors import ConfigError
from depthbatch.common.text_files import read_text

RUNNERS: dict[str, type[Runner]] = {"simulate": Simulations, "throughput": Processes}
SUMMARIES: dict[str, Callable[[Sequence[Row]], str]] = {
    "auto": auto_table,
    "drafts": draft_table,
    "memory": memory_table,
    "slots": slots_table,
}
Positive = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
AboveZero = Annotated[float, msgspec.Meta(gt=0.0)]
Seed = Annotated[int, msgspec.Meta(ge=0)]


class Axes(msgspec.Struct, frozen=True, kw_only=True):
    """What a setting says: the type of each axis, and its value where the file does not give the axis."""

    profile: str
    workload: str = "sharegpt"
    exits: str | dict[str, float] | None = None
    policy: str = "refill"
    w: Positive = 64
    k_share: Share | None = None  # K as a share of W
    s: Positive | None = None
    m: Positive = 8192
    rate: AboveZero | None = None  # requests a second; None = all at once
    boundary_layers: Annotated[int, msgspec.Meta(ge=0, le=MOST)] | None = None  # on each side; None = the profile's
    async_scheduling: str = "off"
    speculation: str | Positive = "off"  # of refill and auto; "N:D" = N draft lanes at draft depth D
    draft_depth: Positive | None = None
    draft_acceptance: Share | dict[str, Share] | None = None  # a map: of draft depth to share
    ttft_target_ms: AboveZero | None = None
    itl_target_ms: AboveZero | None = None
    kv_layout: str = "last_exited"
    kv_capacity: AboveZero | None = None  # KV blocks as a share of the most that it would use; None = never binding
    preemption: str | None = None  # with kv_capacity; "recompute:H" = with headroom H. None = recompute
    swap_space: AboveZero | None = None  # GiB, with preemption offload
    kv_blocks: Positive | None = None  # in place of kv_capacity: how many there are
    launch_us: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0  # the device waits before each captured graph
    seed: Seed | None = None  # of workload, exits and arrivals; None = the file's


_FIELDS = {field.name: field for field in msgspec.structs.fields(Axes)}
AXES: dict[str, Any] = {name: None if field.required else field.default for name, field in _FIELDS.items()}


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sweep file."""

    axes: dict[str, Annotated[list[Any], msgspec.Meta(min_length=1)]]
    title: str = ""
    runner: Literal[tuple(RUNNERS)] = "simulate"  # type: ignore[valid-type]
    requests: Positive | Literal["steady", "window", "short window"] | dict[str, Positive] = 200
    seconds: AboveZero | dict[str, AboveZero] | None = None  # of arrivals, in place of requests
    seed: Seed = 0
    figures: list[Figure] = []
    w_by_workload: dict[str, Positive] = {}
    summary: Literal[tuple(SUMMARIES)] | None = None  # type: ignore[valid-type]


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """The file and where results go."""
    parser.add_argument("file", metavar="FILE.toml", type=Path)
    parser.add_argument(
        "--output-dir", metavar="DIR", type=output_directory, default=Path("."), help="for results and figures"
    )
    parser.add_argument("--requests", type=positive, help="overrides the file's")
    parser.add_argument("--jobs", type=positive, default=1, help="processes that simulate; figures do not depend on it")
    parser.add_argument("--resume", action="store_true", help="keep rows in DIR/NAME.jsonl, and go on where it ends")
    parser.add_argument("--again", metavar="POLICY", help="with --resume: run this policy's rows anew")


def run_sweep(args: argparse.Namespace) -> int:
    """Runs the product; writes NAME.json and the figures, prints the table or the file's summary as Markdown."""
    sweep = read_sweep(args.file)
    if args.again is not None and not args.resume:
        raise ConfigError("--again needs --resume")
    if args.again not in (None, BASELINE, *sweep["axes"].get("policy", [AXES["policy"]])):
        raise ConfigError(f"--again {args.again}: no policy of {args.file}")
    if "figures" in sweep:
        import_pyplot()
    if args.requests is not None:
        sweep["requests"] = args.requests
    args.output_dir.mkdir(parents=True, exist_ok=True)
    if args.resume:
        rows = _resumed(sweep, args.output_dir / f"{args.file.stem}.jsonl", args.again, args.jobs)
    else:
        rows = run_settings(sweep, jobs=args.jobs)
    result = {"title": sweep["title"], "rows": rows}
    (args.output_dir / f"{args.file.stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    for figure in sweep.get("figures", []):
        draw(rows, figure, sweep["title"], args.output_dir / figure["file"])
    print(SUMMARIES[sweep["summary"]](rows) if "summary" in sweep else table(rows, sweep["axes"]))
    return 0


def _resumed(sweep: Mapping[str, Any], path: Path, again: str | None, jobs: int) -> list[Row]:
    """Rows of an earlier run in ``path``, those of the policy ``again`` apart, and what is missing, added as it comes."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        kept = [row for row in rows if row["axis_policy"] != again]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--resume: {path} does not hold rows of a sweep ({error})") from None
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    with path.open("a") as file:
        return run_settings(sweep, kept, lambda row: print(json.dumps(row), file=file, flush=True), jobs)


def run_settings(
    sweep: Mapping[str, Any],
    have: Sequence[Row] = (),
    note: Callable[[Row], object] = lambda row: None,
    jobs: int = 1,
) -> list[Row]:
    """One row a setting, baselines first in each group. Those in ``have`` are not run again; ``note`` is told of others,
    as they come. With ``jobs`` above 1 groups that share no baseline are simulated side by side."""
    runner = RUNNERS[sweep["runner"]](sweep)
    for setting in settings(sweep):
        runner.check(setting)
    seen = {json.dumps({key: row[key] for key in row if key.startswith("axis_")}, sort_keys=True) for row in have}
    todo: list[Row] = []
    groups: dict[str, list[int]] = {}  # what one run of cb serves -> places in todo
    for setting in settings(sweep):
        for one in (setting | NO_DRAFTS | {"policy": BASELINE, "k_share": None}, setting):
            key = json.dumps(_labels(one), sort_keys=True)
            if key not in seen:
                seen.add(key)
                shared = {name: value for name, value in one.items() if name not in _NOT_OF_CB}
                groups.setdefault(json.dumps(shared, sort_keys=True), []).append(len(todo))
                todo.append(one)
    rows: dict[int, Row] = {}
    with tqdm(total=len(todo), unit="setting", file=sys.stderr, mininterval=1.0) as bar:
        for place, row in _runs(sweep, todo, list(groups.values()), jobs):
            rows[place] = row
            note(row)
            bar.update()
    return [*have, *(rows[place] for place in sorted(rows))]


_NOT_OF_CB = {"policy", "exits", "k_share", *NO_DRAFTS}


def _runs(
    sweep: Mapping[str, Any], todo: Sequence[Row], groups: Sequence[Sequence[int]], jobs: int
) -> Iterator[tuple[int, Row]]:
    """Places in ``todo`` with their rows, group by group."""
    if jobs == 1 or sweep["runner"] != "simulate":  # real processes would disturb each other
        runner = RUNNERS[sweep["runner"]](sweep)
        for place in itertools.chain(*groups):
            yield place, _labels(todo[place]) | runner.run(todo[place])
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        parts = [pool.submit(_run_group, sweep, [todo[place] for place in group]) for group in groups]
        for group, part in zip(groups, parts, strict=True):
            yield from zip(group, part.result(), strict=True)


def _run_group(sweep: Mapping[str, Any], group: Sequence[Row]) -> list[Row]:
    runner = RUNNERS[sweep["runner"]](sweep)
    return [_labels(setting) | runner.run(setting) for setting in group]


def read_sweep(path: Path) -> dict[str, Any]:
    """A checked sweep file. Raises ConfigError naming file and key."""
    try:
        sweep = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"sweep {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"sweep {path}: not TOML ({error})") from None
    try:
        figures = msgspec.convert(sweep, File).figures
        axes = sweep["axes"]
        if "profile" not in axes:
            raise ConfigError("no axis profile")
        for name, values in axes.items():
            _check_axis(name, values)
        if len(axes.keys() & set(TARGETS)) == 1:
            raise ConfigError(f"{' and '.join(TARGETS)} are given together")
        if axes.keys() & {"preemption", "swap_space"} and not axes.keys() & {"kv_capacity", "kv_blocks"}:
            raise ConfigError("preemption and swap_space need kv_capacity or kv_blocks: memory never binds without")
        if "w" in axes and "w_by_workload" in sweep:
            raise ConfigError("w_by_workload is in place of axis w: there can be one of them")
        for figure in figures:
            _check_figure(figure)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"sweep {path}: {error}") from None
    return {"title": path.stem, "runner": "simulate"} | sweep


def _check_axis(name: str, values: Sequence[Any]) -> None:
    if name not in AXES:
        raise ConfigError(f"unknown axis {name!r}; known are {', '.join(AXES)}")
    for value in values:
        try:
            msgspec.convert(value, _FIELDS[name].type)
        except msgspec.ValidationError as error:
            raise ConfigError(f"axis {name}: {error}, {value!r}") from None


def _check_figure(figure: Figure) -> None:
    if strange := sorted(figure.axes - AXES.keys()):
        raise ConfigError(f"figure {figure.file}: {', '.join(strange)} is no axis; known are {', '.join(AXES)}")
    if Path(figure.file).suffix not in PICTURES or Path(figure.file).name != figure.file:
        raise ConfigError(f"figure {figure.file!r} is not the name of a file that ends with {', '.join(PICTURES)}")


def settings(sweep: Mapping[str, Any]) -> Iterator[Row]:
    """Every combination of the axes, as one map each; ``w_by_workload`` replaces w for the workloads it names."""
    axes = sweep["axes"]
    special = sweep.get("w_by_workload", {})
    for values in itertools.product(*axes.values()):
        setting = AXES | dict(zip(axes, values, strict=True))
        if setting["workload"] in special and "w" not in axes:
            setting["w"] = special[setting["workload"]]
        yield setting


def _labels(setting: Row) -> Row:
    """The axes of a row, so that figures find them under their own names."""
    return {f"axis_{name}": value for name, value in setting.items()} | {
        f"axis_{name}": _label(setting[name]) for name in ("exits", "draft_acceptance")
    }


def _label(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, Mapping) else value
