"""The published schedules, stage by stage."""

import argparse
import json
from pathlib import Path

import pytest

from depthbatch.benchmarks.trace import add_trace_arguments, run_trace
from depthbatch.common.errors import ConfigError

TRACES = Path(__file__).parent.parent / "data" / "traces"
WORKLOAD = str(TRACES / "ouro_sharegpt.workload.json")


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    parser = argparse.ArgumentParser()
    add_trace_arguments(parser)
    assert run_trace(parser.parse_args([WORKLOAD, "--w", "64", "--m", "8192", "--r-max", "4", *options])) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("name", "options"),
    [("refill_k1", ["--policy", "refill", "--k", "1"]), ("no_refill", ["--policy", "no-refill"])],
)
def test_prints_the_published_schedule(name: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Tables 2 and 3 of the paper. The text must match byte for byte, so keys, their order and every count do."""
    expected = (TRACES / f"ouro_sharegpt.{name}.jsonl").read_text().splitlines()
    assert printed(capsys, *options, "--steps", str(len(expected))) == expected


def test_cb_runs_every_token_at_full_depth(capsys: pytest.CaptureFixture[str]) -> None:
    """The baseline must not profit from recorded exits: each cohort is r_max core steps of constant width."""
    lines = [json.loads(line) for line in printed(capsys, "--policy", "cb", "--steps", "60")]
    decode = [line for line in lines if line["stage"] != "prefill"]
    assert [line["stage"] for line in decode[:6]] == ["prelude", "core", "core", "core", "core", "coda"]
    assert all(line["batch"] == 64 for line in decode)
    assert [line["exits"] for line in decode if line["stage"] == "core"][:8] == [0, 0, 0, 64] * 2


def test_coda_waits_for_k(capsys: pytest.CaptureFixture[str]) -> None:
    """With K = 16 no coda is smaller while prompts wait (nothing forces an under-size coda before the tail)."""
    lines = [json.loads(line) for line in printed(capsys, "--policy", "refill", "--k", "16", "--steps", "200")]
    codas = [line["batch"] for line in lines if line["stage"] == "coda" and line["q_p"] > 0]
    assert len(codas) > 10 and min(codas) >= 16


def test_a_policy_may_carry_its_k(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: the page said that policies may carry a K, and this command refused them."""
    carried = printed(capsys, "--policy", "refill:16", "--k", "3", "--steps", "200")
    assert carried == printed(capsys, "--policy", "refill", "--k", "16", "--steps", "200")
    assert carried != printed(capsys, "--policy", "refill", "--k", "3", "--steps", "200")
    with pytest.raises(ConfigError, match="only refill takes a K"):
        printed(capsys, "--policy", "cb:3")


def test_kv_blocks_bind_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """--kv-blocks is not decoration: with room for few sequences the core batch stays small."""
    lines = [json.loads(line) for line in printed(capsys, "--policy", "refill", "--kv-blocks", "200", "--steps", "60")]
    assert 0 < max(line["batch"] for line in lines if line["stage"] == "core") < 16


@pytest.mark.parametrize("options", [["--w", "0"], ["--k", "65"], ["--s", "65"], ["--kv-blocks", "3"]])
def test_bad_options_are_named(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each is a ConfigError, which the command line prints as one line."""
    with pytest.raises(ConfigError):
        printed(capsys, *options)
