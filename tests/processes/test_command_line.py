"""The command as users run it: output, one-line errors with exit code 2, signals, and never a process left behind."""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from depthbatch.deploy.cli.generate import _prompts
from fakes.marked import Family

OURO = Path(__file__).parent.parent / "data" / "fidelity" / "ouro-tiny"
SMALL = ("--kv-blocks", "64", "--max-num-seqs", "8", "--threads", "1", "--device", "cpu")


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    family = Family(tmp_path)
    yield family
    for pid in family.alive():
        os.kill(pid, signal.SIGKILL)


def run_dirs(tmp_path: Path) -> list[Path]:
    return [path for path in tmp_path.glob("depthbatch-*/*") if path.is_dir()]


# --- bad input


def no_config(model: Path) -> None:
    (model / "config.json").unlink()


def broken_config(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": ')


def unknown_architecture(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def broken_weights(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\x00" * 100)


def wrong_shape(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].contiguous()
    save_file(tensors, model / "model.safetensors")


def broken_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{")


BAD_MODELS: list[tuple[Callable[[Path], None], str]] = [
    (no_config, "config.json"),
    (broken_config, "config.json"),
    (unknown_architecture, "llama|Llama"),
    (no_weights, "safetensors"),
    (broken_weights, "model.safetensors"),
    (wrong_shape, "model.norm.weight"),
    (broken_tokenizer, "tokenizer"),
]
BAD_OPTIONS: list[tuple[tuple[str, ...], str]] = [
    (("/no/such/model",), "/no/such/model"),
    (("MODEL", "--polcy", "cb"), "--polcy"),
    (("MODEL", "--policy", "fastest"), "--policy.*fastest"),
    (("MODEL", "--max-num-seqs", "many"), "--max-num-seqs.*many"),
    (("MODEL", "--exit-threshold=-1"), "exit-threshold.*-1"),
    (("MODEL", "--config", "BAD.toml"), "BAD.toml.*polcy"),
    (("MODEL", "--kv-layout", "depth_indexed", "--gate", "own"), "depth_indexed.*own"),
    (("MODEL", "--temperature", "-2"), "temperature.*-2"),
    (("MODEL", "-f", "/no/such/file"), "/no/such/file"),
    (("MODEL", "-p", "not numbers"), "no tokenizer"),
    (("MODEL", "--kv-blocks", "1000000000"), "kv_blocks.*GiB"),
    (("MODEL", "--max-loops", "9"), "max_loops|loops"),
    (("MODEL", "--gate", "lookahead"), "lookahead.*none, fixed, replay, own, delayed"),
    (("MODEL", "--max-tokens", "2000"), "max_tokens 2000.*max_model_len"),
    (("MODEL", "--num-loops", "7"), "num_loops 7.*4"),
]


def check_refused(process: "subprocess.Popen[str]", pattern: str, family: Family, tmp_path: Path) -> None:
    out, err = process.communicate(timeout=180)
    errors = [line for line in err.splitlines() if "error" in line]
    assert process.returncode == 2, err
    assert len(errors) == 1 and errors[0] == err.splitlines()[-1], err
    assert re.search(pattern, errors[0]), err
    assert "Traceback" not in err and not out
    assert not family.alive() and not run_dirs(tmp_path)


@pytest.mark.parametrize(("damage", "pattern"), BAD_MODELS, ids=lambda value: getattr(value, "__name__", ""))
def test_bad_model(damage: Callable[[Path], None], pattern: str, family: Family, tmp_path: Path) -> None:
    """One line that names the file, field or tensor; exit code 2; nothing left, though the worker found it out in its
    own process. A copy of a model that works is damaged in one place, so nothing else can be the reason."""
    model = tmp_path / "model"
    shutil.copytree(OURO, model)
    model.chmod(0o755)
    damage(model)
    check_refused(family.start("generate", str(model), "-p", "5 17", *SMALL), pattern, family, tmp_path)


@pytest.mark.parametrize(
    ("words", "pattern"), BAD_OPTIONS, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_bad_option(words: tuple[str, ...], pattern: str, family: Family, tmp_path: Path) -> None:
    """The same for everything on the command line."""
    (tmp_path / "BAD.toml").write_text("polcy = 'cb'\n")
    words = tuple({"MODEL": str(OURO), "BAD.toml": str(tmp_path / "BAD.toml")}.get(word, word) for word in words)
    given = [word.partition("=")[0] for word in words]
    words += () if {"-p", "-f"} & set(given) else ("-p", "5 17")
    words += tuple(word for pair in zip(SMALL[::2], SMALL[1::2], strict=True) if pair[0] not in given for word in pair)
    check_refused(family.start("generate", *words), pattern, family, tmp_path)


# --- output


def test_generate(family: Family, tmp_path: Path) -> None:
    """JSON lines with a depth a token, and the streamed form of the same; the start says what fits."""
    words = ("generate", "demo", "-p", "12+30=", "-p", "say hi=", "--max-tokens", "6", "--ignore-eos", *SMALL)
    out, err = family.start(*words, "--json").communicate(timeout=180)
    first, second = map(json.loads, out.splitlines())
    assert (first["prompt"], second["prompt"]) == ("12+30=", "say hi=")
    assert len(first["token_ids"]) == len(first["exit_depths"]) == 6 and first["finish_reason"] == "length"
    assert re.search(r"KiB of KV per token \(\w+\), 1024 tokens fit", err)
    out, _ = family.start(*words).communicate(timeout=180)
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["12+30=", "say"]
    for line, expected in zip(lines, (first, second), strict=True):
        assert len(re.findall("[¹²³⁴]", line)) == 6
        assert f"[6 tokens, mean depth {expected['mean_exit_depth']:.2f} of 4, length]" in line
    assert not family.alive() and not run_dirs(tmp_path)


def test_one_token_has_no_mean_depth(family: Family) -> None:
    """Bug: an output of the prefill token alone showed "mean depth 0.00"; it has no decode token to speak of."""
    words = ("generate", "demo", "-p", "12+30=", "--max-tokens", "1", *SMALL)
    out, _ = family.start(*words).communicate(timeout=180)
    assert "[1 tokens, length]" in out and "mean depth" not in out
    out, _ = family.start(*words, "--json").communicate(timeout=180)
    assert json.loads(out)["mean_exit_depth"] is None


@pytest.mark.parametrize(
    "words", [("demo", "-p", "12+30=", *SMALL), ("demo", "--print-config")], ids=["text", "config"]
)
def test_full_disk_is_one_line(words: tuple[str, ...], family: Family) -> None:
    """Bug: ``>/dev/full`` gave a traceback, or exit code 120 where the text was only written at the end."""
    process = family.start("generate", *words, stdout="/dev/full")
    _, err = process.communicate(timeout=180)
    assert process.returncode == 1 and "Traceback" not in err
    assert err.splitlines()[-1] == "depthbatch: error: cannot write to standard output: No space left on device"
    assert not family.alive()


def test_closed_standard_streams_are_replaced() -> None:
    """Bug: tracebacks after ``<&-`` and ``>&-``, and a server without any of the three did not start: its sockets got
    their numbers."""
    words = (sys.executable, "-m", "depthbatch", "generate", "--print-config")
    shell = ("sh", "-c", 'exec "$@" <&- >&-', "sh")
    process = subprocess.run([*shell, *words], stderr=subprocess.PIPE, text=True, timeout=60)
    error = "depthbatch: error: cannot write to standard output: Bad file descriptor\n"
    assert (process.returncode, process.stderr) == (1, error)
    code = """if True:
        import os, sys
        from depthbatch.deploy.cli import main
        main._open_missing_streams()
        numbers = [stream.fileno() for stream in (sys.stdin, sys.stdout)]
        print(numbers, sys.stdin.read(), all(map(os.get_inheritable, numbers)), file=sys.stderr)
    """
    process = subprocess.run([*shell, words[0], "-c", code], stderr=subprocess.PIPE, text=True, timeout=60)
    assert process.stderr == "[0, 1]  True\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("\ufeffsay a=\r\nsay b=\r\n", ["say a=", "say b="]),
        ("one\u2028still\x0bone\x85\ntwo", ["one\u2028still\x0bone\x85", "two"]),
    ],
)
def test_lines_of_a_prompt_file(content: str, expected: list[str], tmp_path: Path) -> None:
    """Bug: a prompt was cut at U+2028 and the like, and a byte order mark became part of the first one."""
    path = tmp_path / "prompts"
    path.write_bytes(content.encode())
    assert _prompts(argparse.Namespace(prompt=None, file=str(path), model="demo")) == expected


def test_blank_prompts_are_refused_before_the_model_loads(family: Family, tmp_path: Path) -> None:
    """Bug: "prompt is empty", after the model had loaded, and of which line nobody knew."""
    path = tmp_path / "prompts"
    path.write_text("5 17\n\n5 3\n")
    for words, place in ((("-f", str(path)), f"{path}, line 2"), (("-p", "5", "-p", ""), "-p")):
        process = family.start("generate", str(OURO), *words)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (2, f"depthbatch: error: {place}: the prompt is blank\n")


def test_info(family: Family) -> None:
    out, _ = family.start("info", str(OURO), "--kv-blocks", "10").communicate(timeout=180)
    assert re.search(r"last_exited \* +6\.0 +160\n", out)
    assert re.search(r"single +1\.5 +160\n", out)
    assert "0-3-0" in out and "1 to 4 loops" in out
    said = (
        "every token runs all 4 loops (gate delayed at threshold 1); --exit-threshold below 1 lets tokens leave earlier"
    )
    assert f"exits            {said}\n" in out


def test_info_tells_padding_from_tokens(family: Family) -> None:
    """A vocabulary of 264 beside a tokenizer of 262 looked like a mistake."""
    out, _ = family.start("info", "demo").communicate(timeout=180)
    assert "vocabulary       264 (262 in the tokenizer; the rest pads the matrix)\n" in out
    assert "exits            gate lookahead at threshold 0.95: tokens may leave from loop 2\n" in out


@pytest.mark.parametrize("options", [("--device", "cuda:9"), ("--max-model-len", "99999")])
def test_info_prints_an_error_alone(family: Family, options: tuple[str, ...]) -> None:
    """Bug: half of the table, then the error."""
    process = family.start("info", str(OURO), *options)
    out, err = process.communicate(timeout=180)
    assert (process.returncode, out, len(err.splitlines())) == (2, "", 1)


# --- signals


def wait_for_line(process: "subprocess.Popen[str]", pattern: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if re.search(pattern, line):
            return line
    raise AssertionError(f"{pattern!r} never came")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_generate(number: signal.Signals, code: int, family: Family, tmp_path: Path) -> None:
    """In mid-stream: all three processes gone with the grammar host of the worker, the run directory too."""
    process = family.start("generate", "demo", "-p", "a", "--max-tokens", "1000", "--ignore-eos", *SMALL)
    wait_for_line(process, "tokens fit")
    assert len(family.alive()) == 4
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert not family.alive() and not run_dirs(tmp_path)


def test_progress_and_ctrl_c_in_thousands_of_prompts(family: Family, tmp_path: Path) -> None:
    """The bar is on the terminal, the outputs are in the file as they finish, in order and whole; Ctrl-C ends it with its
    own exit code, no traceback and nothing left."""
    prompts = [f"{i % 90 + 1}+{i % 7}=" for i in range(3000)]
    (tmp_path / "prompts").write_text("\n".join(prompts))
    master, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    words = ("generate", "demo", "--json", "-f", str(tmp_path / "prompts"), "--max-tokens", "8", *SMALL)
    process = family.start(*words, stdout=str(tmp_path / "out"), stderr=terminal)
    os.close(terminal)
    shown = b""
    while not re.search(rb" [1-9]\d*/3000 ", shown):  # the bar of at least one finished prompt
        shown += os.read(master, 4096)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    with contextlib.suppress(OSError):  # the terminal's end
        while piece := os.read(master, 4096):
            shown += piece
    os.close(master)
    assert b"Traceback" not in shown
    answers = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert 0 < len(answers) < 3000 and [answer["prompt"] for answer in answers] == prompts[: len(answers)]
    assert not family.alive() and not run_dirs(tmp_path)


def test_signal_while_loading(family: Family, tmp_path: Path) -> None:
    process = family.start("generate", "demo", "-p", "a", *SMALL)
    deadline = time.monotonic() + 20
    while len(family.alive()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert not family.alive() and not run_dirs(tmp_path)


def test_children_die_with_a_killed_parent(family: Family) -> None:
    """SIGKILL gives the parent no chance to clean up: the parent-death signal and the death pipe do."""
    process = family.start("generate", "demo", "-p", "a", "--max-tokens", "1000", "--ignore-eos", *SMALL)
    wait_for_line(process, "tokens fit")
    process.kill()
    process.communicate()
    assert family.gone_within(5)
