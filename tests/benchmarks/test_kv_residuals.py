"""``bench kv-residuals``: what the formats give back and take, and what the demo answers over them."""

import json
from pathlib import Path

import pytest
import torch

from depthbatch.benchmarks.kv_codecs import Odd, Residual, Stored, Uniform, rotate
from depthbatch.benchmarks.kv_residuals import CODECS, INT8, Cache, Formats, forward
from depthbatch.common.kv_cache_dtype import KVCacheDtype
from depthbatch.deploy.cli.main import main
from depthbatch.worker.models.loader import load_model

VERSE = Path(__file__).resolve().parents[2] / "training" / "sonnets.txt"


def error(codec: Uniform | Residual | Stored | Odd, x: torch.Tensor) -> float:
    return float((codec(x) - x).norm() / x.norm())


def test_sizes_are_those_of_the_publications() -> None:
    """ResidualQuant says 80.7 % less than BF16 for Ouro-1.4B: 4 planes, heads of 128, groups of 32."""
    assert 1 - Residual("last", 4, 2).stored_bits(4, 128) / 16 == pytest.approx(0.807, abs=5e-4)
    assert Residual("last", 4, 2).read_bits(4, 128) == pytest.approx(4.5 + 0.75 * 2.625)
    assert Residual("previous", 4, 2).read_bits(4, 128) == pytest.approx(4.5 + (1 + 2 + 3) / 4 * 2.625)
    assert Uniform(4).stored_bits(4, 128) == Uniform(4).read_bits(4, 128) == 4.5
    assert Odd().stored_bits(4, 128) == Odd().read_bits(4, 128) == 4.125
    assert Stored(KVCacheDtype.INT8).stored_bits(4, 128) == 8.125


def test_turned_by_a_hadamard_matrix() -> None:
    """Against the matrix itself, for heads of 24: three of 8. What is a code when it is turned is read back as it was."""
    matrix = torch.ones(1, 1)
    for _ in range(3):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    turn = torch.block_diag(matrix, matrix, matrix) / 8**0.5
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotate(x), x @ turn)
    torch.testing.assert_close(rotate(rotate(x)), x)
    codes = 2.0 * torch.randint(0, 16, (40, 24), generator=torch.Generator().manual_seed(1)) - 15
    codes[:, 5] = -15  # the largest there is, so that the scale is 1
    torch.testing.assert_close(Odd()(codes @ turn), codes @ turn)


@pytest.mark.parametrize("anchor", ["last", "first", "previous"])
def test_residuals_gain_where_planes_are_alike_and_lose_where_they_are_not(anchor: str) -> None:
    """Planes that are multiples of the anchor are read as the anchor is; of planes that have nothing to do with each other
    two bits are as bad as two bits of the planes themselves; in between lies what the anchor tells."""
    torch.manual_seed(0)
    one, others = torch.randn(50, 2, 64), torch.randn(4, 50, 2, 64)
    codec, alone = Residual(anchor, 4, 2), Uniform(4, rotated=True)
    factors = torch.tensor([0.5, -1.0, 2.0, 1.0])[:, None, None, None]
    same = factors * one
    assert error(codec, same) < 1.2 * error(alone, same)
    three_of_four = 0.75**0.5 * error(Uniform(2, rotated=True), others)
    assert error(codec, others) == pytest.approx(three_of_four, rel=0.1)
    assert error(codec, same) < error(codec, same + 0.2 * others) < 0.7 * error(codec, others)


def test_each_anchor_is_the_plane_that_it_says() -> None:
    """A first plane that stands alone spoils the first as anchor; planes that drift are nearest to the one before, and to
    the first only at the begin."""
    torch.manual_seed(0)
    alone, one = torch.randn(2, 50, 2, 64)
    apart = torch.stack((alone, one, one, one))
    first, last, previous = (error(Residual(anchor, 4, 2), apart) for anchor in ("first", "last", "previous"))
    assert last < 0.7 * first and previous < 0.9 * first
    drift = one + 0.4 * torch.randn(6, 50, 2, 64).cumsum(0)
    first, last, previous = (error(Residual(anchor, 4, 2), drift) for anchor in ("first", "last", "previous"))
    assert previous < 0.8 * first and previous < 0.8 * last


def test_tokens_one_by_one_are_the_whole_sequence() -> None:
    """A cache that nothing is coded in holds what a forward pass over all tokens holds, and so do its logits."""
    model = load_model("demo")
    ids = torch.randint(4, 200, (3, 9), generator=torch.Generator().manual_seed(0))
    whole, stepwise = (Cache(model, *ids.shape) for _ in range(2))
    with torch.inference_mode():
        wanted = forward(model, whole, ids, 0)
        got = torch.cat([forward(model, stepwise, ids[:, t : t + 1], t) for t in range(9)], 1)
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(stepwise.keys, whole.keys, atol=1e-4, rtol=1e-4)
    assert whole.keys[0].shape == (4, 3, 9, 4, 32) and whole.keys[0].abs().amax((1, 2, 3, 4)).min() > 0


def test_the_demo_answers_over_coded_planes(tmp_path: Path) -> None:
    """Fewer bits, more errors: a codec that is not applied would answer as the first, and one that reaches the token at hand
    too early or a wrong plane could not answer over int8."""
    output = tmp_path / "out.json"
    names = [
        "as computed",
        "int8",
        "int4, rotated",
        "int2 in groups, rotated",
        "last plane int4, others by int2, not rotated",
    ]
    command = ["bench", "kv-residuals", "demo", "--examples", "36", "--codecs", *names, "--output", str(output)]
    assert main(command) == 0
    report = json.loads(output.read_text())
    assert [row["codec"] for row in report["rows"]] == names and (report["planes"], report["head_dim"]) == (4, 32)
    exact, int8, int4, int2, residual = report["rows"]
    assert exact["accuracy"] == int8["accuracy"] == 1.0 and int4["accuracy"] > 0.9 > int2["accuracy"]
    assert exact["error"] == 0 < int8["error"] < 0.01 < int4["error"] < 0.12 < residual["error"] < int2["error"]
    assert exact["perplexity"] <= int8["perplexity"] + 1e-4 < int2["perplexity"]
    by_anchor = {(row["of"], row["without"]): row for row in report["likeness"]}
    assert len(by_anchor) == 6
    for row in by_anchor.values():
        assert 0 < row["rotation and factor"] < row["factor"] < row["as it is"]
        assert len(row["factor_by_plane"]) == 3


def test_a_text_is_foreseen(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    sizes = ["--text", str(VERSE), "--length", "24", "--pieces", "3", "--max-loops", "2"]
    assert main(["bench", "kv-residuals", "demo", *sizes, "--codecs", "as computed", "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert (report["planes"], report["text"], report["pieces"], report["layers"]) == (2, "sonnets.txt", 3, "looped")
    assert report["rows"][0]["perplexity"] > 2 and report["rows"][0]["accuracy"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-loops", "1"], "--max-loops 1: there is one plane"),
        (["--text", str(VERSE), "--length", "90000"], "tokens are less than --pieces x --length"),
        (["--text", "/nowhere/text"], "--text /nowhere/text: [Errno 2]"),
        (["--codecs", "int5"], "invalid choice: 'int5'"),
    ],
)
def test_what_cannot_be_compared_is_said(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(["bench", "kv-residuals", "demo", *options]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert message in capsys.readouterr().err


def test_every_format_reads_what_it_has_a_name_for() -> None:
    x = torch.randn(4, 6, 2, 32, generator=torch.Generator().manual_seed(1))
    for codec in (codec for formats in CODECS.values() for codec in formats):
        if codec is not None:
            assert codec(x).shape == x.shape and float((codec(x) - x).norm() / x.norm()) < 0.4
            assert codec.stored_bits(4, 32) <= codec.read_bits(4, 32) < 17


def test_what_is_coded_is_what_was_asked_for() -> None:
    """K, V or both, of the tokens at hand, in looped layers or in all: demo-huginn has a layer on each side of its loop."""
    model = load_model("demo-huginn", r_max=2)
    ids = torch.randint(4, 200, (2, 6), generator=torch.Generator().manual_seed(0))
    for formats in (Formats(INT8, INT8), Formats(INT8, None), Formats(None, INT8)):
        for every_layer in (False, True):
            cache = Cache(model, *ids.shape)
            with torch.inference_mode():
                forward(model, cache, ids, 0)
                before = [x.clone() for x in cache.keys + cache.values]
                cache.start, cache.count = 2, 3
                assert 0 < cache.code(formats, every_layer) < 0.01
            for i, (was, now) in enumerate(zip(before, cache.keys + cache.values, strict=True)):
                codec = formats[i // 3]
                if codec is None or (cache.planes[i % 3] == 1 and not every_layer):
                    assert torch.equal(now, was)
                else:
                    assert torch.equal(now[:, :, 2:5], codec(was[:, :, 2:5])) and not torch.equal(now, was)
                    assert torch.equal(now[:, :, :2], was[:, :, :2]) and torch.equal(now[:, :, 5:], was[:, :, 5:])
