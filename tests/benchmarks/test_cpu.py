"""``bench cpu``, ``bench scheduler``, ``bench device-clock``: they run, and their figures are of what they name. How fast
the machine is decides nothing here."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from depthbatch.benchmarks import cpu_drafts, cpu_step, cpu_tokens, device_clock, scheduler_cost
from depthbatch.benchmarks import cpu_speed as cpu
from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import Stage
from depthbatch.deploy.cli.main import OneLineParser
from depthbatch.worker.layers.cpu.library import cpu_kernels
from depthbatch.worker.layers.linear import PackedProduct, choose_product


def parsed(*options: str) -> argparse.Namespace:
    parser = OneLineParser()
    cpu.add_cpu_arguments(parser)
    return parser.parse_args(options)


def test_kernels_of_a_step_are_timed_beside_the_plain_way(tmp_path: Path) -> None:
    """Each product, the attention and the whole step, once a batch; all sides of a row are measured. Bug: on a processor without
    AVX-512 blocked weights of oneDNN ended the run."""
    output = tmp_path / "step.json"
    sizes = ["--batches", "2", "--contexts", "16", "--seconds", "0.001", "--threads", "1"]
    assert cpu.run_cpu(parsed("step", *sizes, "--output", str(output))) == 0
    rows = json.loads(output.read_text())["rows"]
    products = [name for product in cpu_step.products_of(cpu.SHAPE) for name in (product, f"int8 {product}")]
    assert [row["kernel"] for row in rows] == [*products, "attention at 16", "core step at 16", "int8 core step at 16"]
    for row in rows:
        assert row["batch"] == 2 and row["bound_us"] > 0 and len(row["times_us"]) >= 2
        assert row["of_bound"] == pytest.approx(next(iter(row["times_us"].values())) / row["bound_us"])


def test_steps_with_quantised_k_and_v_are_timed_beside_plain_ones(tmp_path: Path) -> None:
    """In one run, every kind; what is read shrinks from 128 bytes a vector of 64 bf16 to 66."""
    output = tmp_path / "kv.json"
    sizes = ["--batches", "2", "--contexts", "40", "--seconds", "0.001", "--threads", "1"]
    assert cpu.run_cpu(parsed("kv", *sizes, "--output", str(output))) == 0
    (row,) = json.loads(output.read_text())["rows"]
    kinds = row["by_kv_cache_dtype"]
    assert list(kinds) == ["auto", "int8", "fp8"] and (row["batch"], row["context"]) == (2, 40)
    assert [kind["kv_bytes"] for kind in kinds.values()] == [12 * 2 * 2 * 40 * 8 * size for size in (128, 66, 66)]
    for kind in kinds.values():
        assert kind["attention_us"] > 0 and kind["core_step_us"] > 0
        assert kind["core_step_speedup"] == kinds["auto"]["core_step_us"] / kind["core_step_us"]


def test_a_step_is_divided_into_kernel_operators_and_the_rest() -> None:
    """The clock must be in the core step that the engine runs, and gone afterwards. Bug: where oneDNN multiplies (AMX) its operators
    were not counted, so that nearly all of a step seemed to be outside."""
    kernels = cpu_kernels()
    assert kernels is not None
    plain = kernels.by_type[torch.bfloat16].core
    with cpu.dummy_model() as directory:
        shares = cpu.core_step(directory, 2, 1)
    assert kernels.by_type[torch.bfloat16].core is plain
    fused = isinstance(choose_product(torch.zeros(64, 64, dtype=torch.bfloat16)), PackedProduct)
    assert shares["kernel_share" if fused else "operator_share"] > 0.3
    assert shares["kernel_share"] + shares["operator_share"] + shares["share_outside"] == pytest.approx(1.0)


def test_policies_are_summed_up_round_by_round() -> None:
    """The best fixed policy is that of the best median; auto is held against it within each round."""
    rounds = [{"cb": 1.0, "refill:1": 2.0, "auto": 3.0}, {"cb": 2.0, "refill:1": 4.0, "auto": 4.0}]
    result = cpu.summary(rounds)
    assert result["best_fixed"] == "refill:1" and result["rounds"] == 2
    assert result["auto_vs_best_quartiles"] == [1.125, 1.25, 1.375]
    assert result["relative_to_cb"]["refill:1"] == 2.0 and result["median_tokens_per_s"]["auto"] == 3.5


def test_all_reduce_runs_on_every_rank(tmp_path: Path) -> None:
    """A real second process over gloo, which is gone afterwards; a time for each batch."""
    output = tmp_path / "sums.json"
    assert cpu.run_cpu(parsed("all-reduce", "--hidden", "8", "--batches", "1", "3", "--output", str(output))) == 0
    result = json.loads(output.read_text())
    assert [row["batch"] for row in result["rows"]] == [1, 3] and result["ranks"] == 2
    assert all(0 < row["least_us"] <= row["median_us"] for row in result["rows"])


def test_a_token_is_a_prelude_all_loops_and_a_coda(tmp_path: Path) -> None:
    """Of either kind of weights, with its parts; bf16 is held to all of its bytes and operations, int8 to half the bytes."""
    output = tmp_path / "tokens.json"
    sizes = ["--layers", "1", "--batches", "1", "3", "--context", "20", "--prefill", "24"]
    assert cpu.run_cpu(parsed("tokens", *sizes, "--seconds", "0.001", "--threads", "1", "--output", str(output))) == 0
    result = json.loads(output.read_text())
    assert [(row["kind"], row["batch"]) for row in result["rows"]] == [
        ("bf16", 1),
        ("int8", 1),
        ("bf16", 3),
        ("int8", 3),
    ]
    for row in result["rows"]:
        us = row["us"]
        token_us = us["prelude"] + 4 * us["core"] + us["coda"]
        assert row["tokens_per_s"] == pytest.approx(1e6 * row["batch"] / token_us)
        assert sum(row["share"].values()) == pytest.approx(1.0)
    assert [(row["kind"], row["tokens"]) for row in result["prefill"]] == [("bf16", 24), ("int8", 24)]
    slow = cpu_step.Machine(1.0, 1e30, 1e30)  # that reads a byte a second: bounds are bytes
    shape = cpu.SHAPE._replace(layers=1)
    numbers = sum(rows * columns for rows, columns in cpu_step.products_of(shape).values())
    kv = 3 * 20 * 2 * 2 * shape.hidden
    bounds = [cpu_tokens.token_bound_us(slow, kind, shape, 3, 20)["core"] for kind in ("bf16", "int8")]
    assert bounds == pytest.approx([1e6 * (2 * numbers + kv), 1e6 * (numbers + kv)])


def test_rows_of_a_token_have_kv_of_their_own() -> None:
    """Bug: rows that all read one block have it in the first-level cache."""
    worker = cpu_tokens.Worker("bf16", cpu.SHAPE._replace(layers=1), 3, 20, 24, 1)
    blocks = worker.table[1:4, :2].flatten().tolist()
    assert len(set(blocks)) == 6 and 0 not in blocks
    before = worker.table.clone()
    with torch.inference_mode():
        worker.stage(Stage.PRELUDE, 3)()
    assert torch.equal(worker.table, before)


def test_without_kernels_there_is_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPTHBATCH_CPU_KERNELS", "torch")
    with pytest.raises(ConfigError, match="C kernels"):
        cpu.run_cpu(parsed("step"))


def test_scheduler_cost_counts_every_stage() -> None:
    """A full engine runs more than a core stage each loop, and their time is part of the loop's."""
    row = scheduler_cost.measure(4, 10, 50, "off")
    assert row["w"] == 4 and row["stages_per_core"] > 1
    assert row["loop_us"]["p50"] > row["core_us"]["p50"] > 0  # type: ignore[index]


def test_device_keeps_its_profiles_time() -> None:
    """A result is never sent before its stage's end, and the device does not run ahead of its profile."""
    figures = device_clock.measure("h100-ouro-1.4b", 6, 2, 4)
    assert figures["stages"] == 6 and figures["stage_ms"] > 5
    assert figures["late_us_p99"] >= figures["late_us_p50"] >= 0 and figures["gap_us_p50"] >= 0


def test_drafts_are_measured_beside_none(tmp_path: Path) -> None:
    """Both engines give the same tokens, drafts are made and some are right; the first round does not count."""
    output = tmp_path / "drafts.json"
    load = ["--streams", "1", "--requests-per-stream", "1", "--tokens", "12", "--seconds", "0"]
    drafts = ["--speculation", "2", "--draft-depth", "2", "--gate", "none", "--dtype", "float32"]
    assert cpu.run_cpu(parsed("drafts", "demo", *load, *drafts, "--output", str(output))) == 0
    [row] = json.loads(output.read_text())["by_streams"]
    assert (row["streams"], row["rounds"], row["gate"], row["mean_depth"]) == (1, 1, "none", 4.0)
    assert row["equal_outputs"] == 1.0 and row["acceptance"] > 0.3 and row["draft_lanes_mean"] > 0.3
    assert row["tokens_per_s"]["drafts"] > 0 and len(row["ratio_quartiles"]) == 3


def test_drafts_and_none_have_equal_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: every round asked the same prompts with the prefix cache on, so that what was measured began behind them."""
    seen: list[EngineConfig] = []
    monkeypatch.setattr(cpu_drafts, "_measure", lambda config, streams, args: seen.append(config))
    cpu_drafts.run_cpu_drafts(parsed("drafts", "demo", "--streams", "3", "--speculation", "2"))
    with_drafts, without = cpu_drafts._configs(seen[0], 3)
    assert with_drafts.prefix_caching == without.prefix_caching == "off"
    assert with_drafts.max_num_seqs == 3 and (with_drafts.draft_lanes, without.draft_lanes) == (2, 0)


def test_drafts_that_are_off_are_not_compared() -> None:
    """Ratios of none with none would look like a finding."""
    with pytest.raises(ConfigError, match="needs --speculation"):
        cpu.run_cpu(parsed("drafts", "demo"))
