"""``bench throughput``: records follow from counters, bounds from the paper's equations, and one run through the real
processes on a simulated device."""

import argparse
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from depthbatch.benchmarks.flops import count_flops, stage_flops
from depthbatch.benchmarks.record import Setting, decode_speedup, make_record
from depthbatch.benchmarks.sources import describe_exits, workload_from_arguments
from depthbatch.benchmarks.throughput import add_throughput_arguments, fitting, measure, run_throughput
from depthbatch.benchmarks.trace import PolicyChoice
from depthbatch.benchmarks.workload import Window, Workload, WorkloadRequest
from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.messages import SchedulerStats
from depthbatch.common.stats import CoreStats, HistogramStats, StageStats, WorkerStats
from depthbatch.deploy.cli.main import OneLineParser
from depthbatch.worker.device_profile import StageFlops
from depthbatch.worker.models.family import TensorTable
from fakes.checkpoints import FIDELITY

FLOPS = StageFlops(core=3.0, boundary=2.0)


def counters(prefill_s: float, codas: int, rows: int, depth_sum: int, prefilled: int) -> SchedulerStats:
    core = CoreStats(
        generation_tokens=rows + prefilled,
        finished={"length": prefilled},
        queue_time_s=HistogramStats(count=prefilled),
        stages={
            "prefill": StageStats(seconds=prefill_s),
            "coda": StageStats(steps=codas, rows=HistogramStats(count=codas, sum=rows)),
        },
        exit_depth=HistogramStats(count=rows + prefilled, sum=depth_sum + 4 * prefilled),
    )
    return SchedulerStats(core, WorkerStats(0.0, 0.5, 0.0), {"schedule": 1e-4 * codas}, {"0.50": 40.0})


def test_record_is_the_difference_of_two_readings() -> None:
    """Warm-up before the first reading must not count; tokens of prefill are not decode tokens."""
    before, after = counters(1.0, 10, 100, 300, 20), counters(3.0, 30, 300, 800, 60)
    record = make_record(Setting("refill", 8, 2, 4), before, after, 10.0, FLOPS)
    assert record.tokens_per_s == 24.0
    assert record.mean_depth == 2.5
    assert record.prefill_share == 0.2
    assert record.mean_batch["coda"] == 10.0 and record.mean_batch["core"] == 0.0
    assert record.requests_finished == 40
    assert record.scheduler_us_per_stage == {"p50": 40.0, "p99": None, "mean": pytest.approx(100.0)}


def test_bounds_are_equations_one_and_two() -> None:
    record = make_record(Setting("refill", 8, 1, 4), SchedulerStats(), counters(2.0, 1, 200, 500, 40), 10.0, FLOPS)
    baseline = make_record(Setting("cb", 8, None, 4), SchedulerStats(), counters(4.0, 1, 200, 800, 40), 16.0, FLOPS)
    record.compare_with(baseline)
    s_dec = (2 + 4 * 3) / (2 + 2.5 * 3)
    assert record.s_dec == pytest.approx(s_dec) == decode_speedup(FLOPS, 4, 2.5)
    assert record.s_e2e == pytest.approx(1 / (0.25 + 0.75 / s_dec))
    assert record.relative_to_cb == pytest.approx(1.6)
    assert record.realized == pytest.approx(1.6 / record.s_e2e)


def test_flops_count_each_matrix_once() -> None:
    """A norm, an untied embedding and a gate cost nothing; a tied embedding is the head."""
    core = {"layer.up": (8, 4), "layer.norm": (4,)}
    embed, head, gate = {"embed": (16, 4)}, {"head": (16, 4)}, {"gate": (1, 4)}
    untied = TensorTable(core | embed | head | gate, core=frozenset(core), looked_up=frozenset(embed) | frozenset(gate))
    assert count_flops(untied) == StageFlops(core=64.0, boundary=128.0)
    assert count_flops(TensorTable(core | embed, core=frozenset(core))) == StageFlops(core=64.0, boundary=128.0)


@pytest.mark.parametrize(
    ("model", "core", "boundary"),
    [
        ("ouro-tiny", ("model.layers.",), ("lm_head.",)),
        ("huginn-tiny", ("transformer.core_block.", "transformer.adapter."), ("transformer.",)),
        (
            "retro-llama-tiny",
            ("transformer.core_block.", "transformer.adapter."),
            ("transformer.prelude", "transformer.coda", "lm_head."),
        ),
    ],
)
def test_flops_of_stored_checkpoints(model: str, core: tuple[str, ...], boundary: tuple[str, ...]) -> None:
    """What a family declares, against the matrices in a file of its format by their names: a plan that leaves the adapter
    out of the core, or counts an embedding that is only looked up, changes a bound that benchmarks print."""
    stored = load_file(FIDELITY / model / "model.safetensors")
    matrices = {name: 2.0 * tensor.numel() for name, tensor in stored.items() if tensor.dim() == 2}
    in_core = sum(flops for name, flops in matrices.items() if name.startswith(core))
    outside = sum(f for name, f in matrices.items() if name.startswith(boundary) and not name.startswith(core))
    assert stage_flops(EngineConfig.from_values({"model": str(FIDELITY / model)})) == StageFlops(in_core, outside)


@pytest.mark.parametrize("bad", ["fast", "refill:0", "refill:x", "no-refill:3"])
def test_bad_policies_are_named(bad: str) -> None:
    with pytest.raises(ConfigError, match="policy"):
        PolicyChoice.parse(bad)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "exit depths: drawn (2: 50%, 3: 40%, 4: 10%; "),
        (
            ["--exits", '{"2": 3, "4": 1}'],
            "exit depths: drawn (2: 75%, 4: 25%; --exits), not chosen by the model's gate",
        ),
        (["--exits", "full"], "exit depths: every token runs all 4 loops"),
        (["--workload", "FILE"], "exit depths: those recorded in FILE"),
    ],
)
def test_it_is_said_where_depths_come_from(
    options: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: depths were drawn and nothing said so; newcomers took them for the gate's."""
    monkeypatch.chdir(tmp_path)
    Workload((WorkloadRequest(5, 3, exit_depths=(2, 3)),)).write(tmp_path / "FILE")
    args = arguments("--requests", "5", *options)
    assert describe_exits(args, workload_from_arguments(args, 4, 0), 4).startswith(line)


def test_requests_beyond_the_models_positions_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    """A ShareGPT prompt of 3,000 tokens must not end the benchmark of a model with 2,048 positions."""
    workload = Workload((WorkloadRequest(10, 5), WorkloadRequest(3000, 5), WorkloadRequest(2043, 5)))
    assert [r.prompt_tokens for r in fitting(workload, 2048).requests] == [10, 2043]
    assert "1 of 3 requests" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="fits into 4 tokens"):
        fitting(workload, 4)


def arguments(*options: str) -> argparse.Namespace:
    parser = OneLineParser()
    add_throughput_arguments(parser)
    return parser.parse_args(options)


def tiny_profile(directory: Path) -> Path:
    profile = directory / "tiny.json"
    stage = {"delta_ms": 0.2, "gamma_ms": 0.001}
    core = stage | {"alpha_ms": 0.0}
    text = {"name": "tiny", "r_max": 4, "bytes_per_kv_token": 64, "core": core, "prelude": stage, "coda": stage}
    profile.write_text(json.dumps(text | {"prefill": stage, "flops": {"core": 3.0, "boundary": 2.0}}))
    return profile


def test_real_processes_on_a_simulated_device(tmp_path: Path) -> None:
    """cb comes first, every policy finishes the same work, and the depths replayed are those asked for. Speed is not
    judged: the machine decides it."""
    profile = tiny_profile(tmp_path)
    output = tmp_path / "out.json"
    options = ["--device", f"simulated:{profile}", "--workload", "alpaca", "--requests", "6", "--w", "4"]
    exits = ["--exits", '{"2": 1}', "--policy", "refill:2", "--policy", "auto", "--output", str(output)]
    assert run_throughput(arguments(*options, *exits)) == 0
    records = json.loads(output.read_text())
    assert [record["policy"] for record in records] == ["cb", "refill", "auto"]
    assert [record["k"] for record in records] == [None, 2, None]
    assert [record["mean_depth"] for record in records] == [4.0, 2.0, 2.0]
    assert {record["requests_finished"] for record in records} == {6}
    assert records[1]["s_dec"] == pytest.approx((2 + 12) / (2 + 6))
    assert records[0]["relative_to_cb"] == records[0]["realized"] == 1.0
    assert all(record["tokens_per_s"] > 0 and record["duration_s"] > 0 for record in records)
    for record in records:  # measured in the scheduler process
        assert 0 < record["scheduler_us_per_stage"]["p50"] <= record["scheduler_us_per_stage"]["p99"]


def test_drafts_on_a_simulated_device(tmp_path: Path) -> None:
    """cb, which has no rows to give, runs without what was asked of the policies; no-refill is not tried by default. Depths are
    those replayed, however many rows were drafts."""
    output = tmp_path / "out.json"
    options = ["--device", f"simulated:{tiny_profile(tmp_path)}", "--workload", "alpaca", "--requests", "4", "--w", "2"]
    drafts = ["--speculation", "2", "--draft-depth", "1", "--kv-layout", "last_exited", "--acceptance", "0.6"]
    assert (
        run_throughput(
            arguments(*options, *drafts, "--policy", "refill", "--exits", '{"2": 1}', "--output", str(output))
        )
        == 0
    )
    record = json.loads(output.read_text())
    assert (record["policy"], record["mean_depth"], record["requests_finished"]) == ("refill", 2.0, 4)
    assert record["acceptance"] == pytest.approx(0.6, abs=0.2) and record["draft_lanes_mean"] > 0
    assert record["cb_tokens_per_s"] > 0


def test_window_of_the_real_processes() -> None:
    """Bug: figure 3 at W = 64 was that of runs whose mean core batch was 17 rows: most of the time the last long answers ran
    alone. A window ends before that; what still runs is aborted, and only what is within it counts."""
    config = EngineConfig(device="simulated:h100-ouro-1.4b", max_num_seqs=4, policy="refill", min_free_slots=1)
    short, long = WorkloadRequest(4, 6, exit_depths=(2,) * 5), WorkloadRequest(4, 400, exit_depths=(2,) * 399)
    workload = Workload((*[short] * 40, long))
    record = measure(config, workload, FLOPS, Window(24, 96))
    assert 0.8 * 4 < record.mean_batch["core"] <= 4
    assert 96 / 6 - 4 <= record.requests_finished <= 96 / 6 + 4
    assert record.mean_depth == 2.0
    assert record.tokens_per_s * record.duration_s == pytest.approx(96, abs=8)
