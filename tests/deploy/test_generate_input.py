"""Where ``depthbatch generate`` finds its prompts."""

import argparse
import os
from pathlib import Path

import pytest

from depthbatch.common.errors import RequestError
from depthbatch.deploy.cli import generate
from depthbatch.deploy.cli.generate import DEMO_PROMPTS, add_generate_arguments


def prompts(*words: str) -> list[str]:
    parser = argparse.ArgumentParser()
    add_generate_arguments(parser)
    return generate._prompts(parser.parse_args(words))


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes, close: bool = True) -> int:
    """Standard input is a pipe that holds ``data``; the end that writes."""
    reader, writer = os.pipe()
    os.write(writer, data)
    if close:
        os.close(writer)
    monkeypatch.setattr("sys.stdin", os.fdopen(reader, "r"))
    return writer


@pytest.mark.parametrize("words", [("demo",), ("demo", "-f", "-"), ("elsewhere",)])
def test_prompts_of_a_pipe(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    """Bug: what was piped in was ignored, and "-" was a file that is not there."""
    piped(monkeypatch, "\ufeff12+30=\r\nsay a=\n".encode())
    assert prompts(*words) == ["12+30=", "say a="]


def test_a_pipe_that_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts the demo may leave its input open, or closed: it must not wait for what never comes."""
    piped(monkeypatch, b"")
    assert prompts("demo") == list(DEMO_PROMPTS)
    writer = piped(monkeypatch, b"", close=False)
    assert prompts("demo") == list(DEMO_PROMPTS)
    assert prompts("demo", "-p", "x") == ["x"]
    os.close(writer)
    with pytest.raises(RequestError, match="standard input"):
        prompts("elsewhere")


def test_blank_lines_of_a_pipe_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    piped(monkeypatch, b"a\n\nb\n")
    with pytest.raises(RequestError, match="stdin, line 2"):
        prompts("demo")
    path = tmp_path / "lines"
    path.write_text("x\ny\n")
    with path.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert prompts("demo") == ["x", "y"]
