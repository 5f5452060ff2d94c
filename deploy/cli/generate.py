"""``depthbatch generate``: prompts in, text out, the depth of every token shown. One engine, all prompts together."""

import argparse
import dataclasses
import json
import os
import select
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from tqdm import tqdm

from depthbatch.common.config import FIELDS, add_config_arguments, config_from_sources
from depthbatch.common.errors import RequestError
from depthbatch.common.options import to_toml
from depthbatch.common.text_files import decode_text
from depthbatch.deploy.cli.request_options import DEMOS
from depthbatch.frontend.llm import LLM
from depthbatch.frontend.output import OutputDelta, RequestOutput
from depthbatch.frontend.params import SamplingParams, add_number_argument
from depthbatch.frontend.prompts import Prompt, encode_prompt
from depthbatch.frontend.tokenizer import Tokenizer

DEMO_PROMPTS = (  # one of each kind that the demo model knows, none of them seen in training
    "46+5=",
    "say cuk6en=",
    "516,517,",
    "72+23=",
    "kx qz xt ha zf t7 aj j6 f2 ?az=",
)
STDIN_WAIT_S = 0.5
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
CONTROLS = {ord("\r"): "", **{code: "\ufffd" for code in (*range(0x20), 0x7F) if chr(code) not in "\n\t\r"}}


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Prompts, per-request parameters and every engine option."""
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help="directory, repo id or 'demo'")
    parser.add_argument("-p", "--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    parser.add_argument(
        "-f",
        "--file",
        metavar="FILE",
        help="one prompt a line; - is standard input, which is read without -p and -f, too, where it is a pipe",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt")
    parser.add_argument("--no-depths", action="store_true", help="text alone")
    parser.add_argument("--print-config", action="store_true", help="print the engine's options and stop")
    group = parser.add_argument_group("request")
    for name, default, text in (
        ("max_tokens", 32, "longest output (default 32)"),
        ("min_tokens", 0, "shortest output (default 0)"),
        ("temperature", 0.0, "0 = greedy (default)"),
        ("top_p", 1.0, "nucleus (default 1, off)"),
        ("top_k", 0, "most likely tokens (default 0, off)"),
        ("min_p", 0.0, "share of the likeliest (default 0, off)"),
        ("num_loops", None, "every token at this depth"),
    ):
        add_number_argument(group, name, default, text)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the output; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after an end of sequence")
    add_config_arguments(parser)


def run_generate(args: argparse.Namespace) -> int:
    """Raises DepthbatchError on anything the user can put right."""
    config = config_from_sources(args, model=args.model)
    if args.print_config:
        print(to_toml(config))
        return 0
    texts = _prompts(args)
    params = _sampling_params(args)
    with LLM.from_config(config) as llm:
        prompts = [_prompt(text, llm.tokenizer) for text in texts]
        views: list[View]
        if args.json:
            views = [JsonView(prompt, encode_prompt(prompt, params, llm.tokenizer)) for prompt in prompts]
        else:
            has_text, styled = llm.tokenizer is not None, sys.stdout.isatty()
            views = [PromptView(text, not args.no_depths, llm.info.r_max, styled, has_text) for text in texts]
        _stream(llm, prompts, params, views)
    return 0


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    names = [name for name in SamplingParams.__struct_fields__ if name not in FIELDS]
    return SamplingParams(**{name: getattr(args, name) for name in names if name in args})


def _prompts(args: argparse.Namespace) -> list[str]:
    """The prompts as given. Raises RequestError, naming the place, for a blank one: no model has to load for that."""
    texts = list(args.prompt or ())
    places = ["-p"] * len(texts)
    name = args.file
    if name is None and args.prompt is None and _is_piped(sys.stdin, patient=args.model not in DEMOS):
        name = "-"
    if name is not None:
        try:
            data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
            lines = decode_text(data).removesuffix("\n").split("\n") if data or args.file else []
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"cannot read {name}: {error}") from None
        name = "stdin" if name == "-" else name
        places += [f"{name}, line {number}" for number in range(1, len(lines) + 1)]
        texts += [line.removesuffix("\r") for line in lines]
    if not texts and args.prompt is None and args.file is None and args.model in DEMOS:
        texts = list(DEMO_PROMPTS)
    if not texts:
        raise RequestError("no prompt: give -p TEXT, -f FILE, or one prompt a line on standard input")
    for place, text in zip(places, texts, strict=False):  # the demo's own prompts have no place
        if not text.strip():
            raise RequestError(f"{place}: the prompt is blank", "prompt")
    return texts


def _is_piped(stdin: TextIO, patient: bool) -> bool:
    """Whether prompts come on standard input: it is a file, or a pipe. Not ``patient``: only a pipe that has something
    within a moment, since whoever starts a program may leave it an open one."""
    try:
        kind = os.fstat(stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed, or no file at all
        return False
    if stat.S_ISREG(kind):
        return True
    return stat.S_ISFIFO(kind) and (patient or bool(select.select([stdin], [], [], STDIN_WAIT_S)[0]))


def _prompt(text: str, tokenizer: Tokenizer | None) -> Prompt:
    """The text, or for a model without a tokenizer the token ids in it."""
    if tokenizer is not None:
        return text
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise RequestError(f"prompt {text!r}: this model has no tokenizer; give token ids, '5 17 3'") from None


def _as_json(output: RequestOutput) -> dict[str, Any]:
    mean = output.mean_exit_depth
    return {**dataclasses.asdict(output), "mean_exit_depth": None if mean is None else round(mean, 4)}


# --- streaming to a terminal


class View(Protocol):
    """One prompt's output as it is shown."""

    shown: str  # what is to stand there so far
    finished: bool

    def add(self, delta: OutputDelta) -> str:
        """The characters that a delta adds to ``shown``."""
        ...


class JsonView:
    """The whole output as one JSON line, once it is finished."""

    def __init__(self, prompt: Prompt, prompt_ids: list[int]) -> None:
        self._output = RequestOutput(prompt if isinstance(prompt, str) else None, prompt_ids)
        self.finished = False
        self.shown = ""

    def add(self, delta: OutputDelta) -> str:
        self._output.append(delta)
        if delta.finish_reason is not None:
            self.finished = True
            self.shown = json.dumps(_as_json(self._output), ensure_ascii=False) + "\n"
        return self.shown


class PromptView:
    """One prompt's output as it is shown: the text, the depth of its tokens in superscript behind it."""

    def __init__(self, text: str, show_depths: bool, r_max: int, styled: bool, has_text: bool) -> None:
        self._has_text = has_text
        self._show_depths = show_depths
        self._r_max = r_max
        self._dim, self._plain = ("\x1b[36m", "\x1b[0m") if styled else ("", "")
        self._waiting: list[int] = []  # depths of tokens whose text has not come out yet
        self._output = RequestOutput(text, [])
        self.finished = False
        bold = "\x1b[1m" if styled else ""
        self.shown = f"{bold}{text.translate(CONTROLS)}{self._plain} "  # what the terminal holds or will hold

    def add(self, delta: OutputDelta) -> str:
        self._output.append(delta)
        self._waiting += delta.exit_depths
        text = delta.text.translate(CONTROLS) if self._has_text else "".join(f" {token}" for token in delta.token_ids)
        added = text
        self.finished = delta.finish_reason is not None
        if text or self.finished:
            added += self._depths()
        if self.finished:
            added += self._summary() + "\n"
        self.shown += added
        return added

    def _depths(self) -> str:
        """Depths of the tokens behind the text that has just come out; those of tokens without text come with it."""
        depths, self._waiting = self._waiting, []
        if not depths or not self._show_depths:
            return ""
        return f"{self._dim}{','.join(map(str, depths)).translate(SUPERSCRIPTS)}{self._plain}"

    def _summary(self) -> str:
        output = self._output
        if not self._show_depths:
            return ""
        mean = output.mean_exit_depth
        depth = "" if mean is None else f"mean depth {mean:.2f} of {self._r_max}, "
        return f"   {self._dim}[{len(output.token_ids)} tokens, {depth}{output.finish_reason}]{self._plain}"


def _stream(llm: LLM, prompts: list[Prompt], params: SamplingParams, views: Sequence[View]) -> None:
    """Prints prompt after prompt; all decode together, the first unfinished one is on the screen as it grows. A bar says
    how many are finished where the outputs themselves go elsewhere."""
    deltas = llm.stream(prompts, params)  # refuses bad requests before anything is printed
    current = 0
    print(views[0].shown, end="", flush=True)
    without_bar = sys.stdout.isatty() or not sys.stderr.isatty()
    with tqdm(total=len(views), unit="req", file=sys.stderr, disable=without_bar) as bar:
        for index, delta in deltas:
            added = views[index].add(delta)
            bar.update(views[index].finished)
            if index == current:
                print(added, end="", flush=True)
            while current < len(views) and views[current].finished:
                current += 1
                if current < len(views):
                    print(views[current].shown, end="", flush=True)
