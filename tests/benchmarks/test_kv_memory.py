"""``bench kv-memory``: small runs say what was found in the cache, and compare like with like."""

import json
from pathlib import Path
from typing import Any

import pytest

from depthbatch.benchmarks import kv_memory
from depthbatch.benchmarks.kv_memory import add_kv_memory_arguments, run_kv_memory
from depthbatch.deploy.cli.main import OneLineParser


def measured(tmp_path: Path, *words: str) -> dict[str, Any]:
    parser = OneLineParser()
    add_kv_memory_arguments(parser)
    assert run_kv_memory(parser.parse_args([*words, "--output", str(tmp_path / "out.json")])) == 0
    return json.loads((tmp_path / "out.json").read_text())


@pytest.mark.parametrize("words", ["copies --w 4", "misses --device cpu", "hits --rounds 2", "hits --profile x"])
def test_options_of_another_measurement_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: they were taken and ignored."""
    parser = OneLineParser()
    add_kv_memory_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(words.split())
    assert f"unrecognized arguments: {words.split()[1]}" in capsys.readouterr().err


def test_hits_are_of_all_requests_but_the_first(tmp_path: Path) -> None:
    """64 tokens are four blocks of the simulated device."""
    device = "simulated:h100-ouro-1.4b"
    found = measured(tmp_path, "hits", "--device", device, "--requests", "6", "--prefix-tokens", "64")
    assert found["off"]["cached_tokens"] == 0 and found["on"]["cached_tokens"] == 5 * 64
    for name in ("mean_ttft_s", "p99_ttft_s", "tokens_per_s"):
        assert found["on_over_off"][name] == found["on"][name] / found["off"][name] > 0


def test_misses_find_nothing(tmp_path: Path) -> None:
    found = measured(tmp_path, "misses", "--requests", "4", "--rounds", "1")
    assert found["hits"] == 0 and found["core_s"]["on"] > 0
    assert found["added_us_per_request"] == pytest.approx(1e6 * (found["core_s"]["on"] - found["core_s"]["off"]) / 4)


def test_copies_are_compared_with_a_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of 16 tokens has 4 planes of 4 heads of 32 floats, K and V."""
    monkeypatch.setattr(kv_memory, "COPIED_BLOCKS", 8)
    found = measured(tmp_path, "copies", "--rounds", "1")
    assert found["block_bytes"] == 2 * 16 * 4 * 4 * 32 * 4 and found["blocks"] == 8
    assert set(found["over_plain_copy"]) == {
        f"{way}, {order}" for way in ("out", "back") for order in ("together", "scattered")
    }
