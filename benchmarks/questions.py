"""Questions with known answers, for ``bench accuracy``: the demo task's, or a user's own from a file."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthbatch.common.errors import ConfigError, RequestError
from depthbatch.common.text_files import read_text
from depthbatch.training.data import heldout

if TYPE_CHECKING:
    from depthbatch.frontend.llm import LLM
    from depthbatch.frontend.output import RequestOutput

MATCHES = ("exact", "last-number")
KEYS = ("prompt", "answer", "class")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and how its answer is judged.

    ``exact``: the text is the answer, but for spaces around both, and the model ended it by itself. ``last-number``: the
    last number of the text is the last number of the answer, as GSM8K is scored ("... so 1,200 dollars." is "#### 1200").
    """

    prompt: str
    answer: str
    kind: str = ""  # a class of questions, reported apart
    match: str = "exact"
    max_tokens: int = 0  # of the output; 0 = room for the answer, its end marker, and one token more to be wrong by

    @property
    def output_tokens(self) -> int:
        """max_tokens of the request. A token has at least one byte."""
        return self.max_tokens or len(self.answer.encode()) + 2

    def is_right(self, output: "RequestOutput") -> bool:
        """Whether the output answers it."""
        if self.match == "last-number":
            said, wanted = last_number(output.text), last_number(self.answer)
            return said is not None and said == wanted
        return output.text.strip() == self.answer.strip() and output.finish_reason == "stop"


def last_number(text: str) -> float | None:
    """The last number in a text, commas between digits apart; None where there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def heldout_questions(seed: int, count: int) -> list[Question]:
    """The demo task's, which no training run has seen."""
    return [Question(each.prompt, each.answer, each.difficulty) for each in heldout(seed, count)]


def read_questions(path: Path, match: str, max_tokens: int) -> list[Question]:
    """One question a line, as JSON: ``prompt``, ``answer`` and, if wanted, ``class``. Raises ConfigError that names the
    line."""
    try:
        lines = read_text(path).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--questions {path}: {error}") from error
    questions = [_question(f"--questions {path}, line {n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise ConfigError(f"--questions {path} has no questions")
    if match == "last-number":
        for each in questions:
            if last_number(each.answer) is None:
                raise ConfigError(
                    f"--questions {path}: --match last-number, but the answer {each.answer!r} has no number"
                )
    return [Question(each.prompt, each.answer, each.kind, match, max_tokens) for each in questions]


def _question(where: str, line: str) -> Question:
    try:
        data: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} is no object with 'prompt' and 'answer'")
    for key in data:
        if key not in KEYS:
            raise ConfigError(f"{where}: unknown key {key!r}")
    values = [data.get(key, "" if key == "class" else None) for key in KEYS]
    for key, value in zip(KEYS, values, strict=True):
        if not isinstance(value, str) or (key != "class" and not value):
            kind = "a text" if key == "class" else "a text that is not empty"
            raise ConfigError(f"{where}: {key!r} must be {kind}, not {value!r}")
    return Question(*values)


def prompts_of(llm: "LLM", questions: Sequence[Question], chat: bool) -> list[str] | list[list[int]]:
    """What the engine is asked: the prompts as they are, or each as a user's message in the model's chat template.
    Raises ConfigError where the model has none."""
    if not chat:
        return [question.prompt for question in questions]
    if llm.tokenizer is None:
        raise ConfigError("--chat: this model has no tokenizer")
    try:
        return [llm.tokenizer.encode_chat([{"role": "user", "content": each.prompt}]) for each in questions]
    except RequestError as error:
        raise ConfigError(f"--chat: {error}") from error
