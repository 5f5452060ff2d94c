"""``bench perplexity``: of the demo model's own verse, by loops, with and without int8 layers."""

import json
from pathlib import Path

import pytest

from depthbatch.deploy.cli.main import main

VERSE = Path(__file__).resolve().parents[2] / "training" / "sonnets.txt"


def test_more_loops_foresee_better_and_int8_hardly_worse(tmp_path: Path) -> None:
    """The demo has learnt the text; a loop count that is not passed on, or weights that are not quantised, would give equal
    figures."""
    output = tmp_path / "out.json"
    sizes = ["--length", "64", "--pieces", "6", "--loops", "1", "4", "--threads", "1"]
    command = ["bench", "perplexity", "demo", "--text", str(VERSE), *sizes, "--quantization", "int8"]
    assert main([*command, "--output", str(output)]) == 0
    first, full = json.loads(output.read_text())["rows"]
    assert first["perplexity"]["as stored"] > 1.1 * full["perplexity"]["as stored"] > 2
    assert 0 < abs(full["increase"]["int8"]) < 0.02
    assert full["perplexity"]["int8"] == pytest.approx(full["perplexity"]["as stored"] * (1 + full["increase"]["int8"]))


def test_a_text_that_is_too_short_or_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Shall I compare thee")
    assert main(["bench", "perplexity", "demo", "--text", str(tmp_path / "none.txt")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["bench", "perplexity", "demo", "--text", str(short), "--length", "1"]) == 2
    assert "--length 1 --pieces 16: there is nothing to foresee" in capsys.readouterr().err
    assert main(["bench", "perplexity", "demo", "--text", str(short), "--threads", "1"]) == 2
    assert "tokens are less than --pieces x --length" in capsys.readouterr().err


def test_all_loop_counts_are_checked_before_any_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: --loops 1 9 measured one loop, minutes for a large model, and then refused nine."""
    sizes = ["--length", "16", "--pieces", "2", "--threads", "1"]
    assert main(["bench", "perplexity", "demo", "--text", str(VERSE), *sizes, "--loops", "1", "9"]) == 2
    said = capsys.readouterr().err
    assert "9" in said and "perplexity" not in said and "as stored" not in said
