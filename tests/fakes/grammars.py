"""What tests ask of grammars: their text, masks, failures and processes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from depthbatch.common.grammar_host import GrammarHost
from depthbatch.frontend.grammar import canonical_constraint, grammar_text
from depthbatch.worker.sampling.grammar_matchers import Grammars


def text_of(field: str, value: Any) -> str:
    """The grammar of one field, as a request would give it."""
    return grammar_text(*canonical_constraint(**{"json_schema": None, "regex": None, "choice": None, field: value}))


def allowed(grammars: Grammars, slot: int) -> list[int]:
    """Tokens of the slot's mask."""
    return np.flatnonzero(np.unpackbits(grammars.masks([slot]).view(np.uint8)[0], bitorder="little")).tolist()


def failures_of(grammars: Grammars, slots: list[int]) -> dict[int, str]:
    """What a stage that gives these slots a token tells, by slot."""
    stage: Any = SimpleNamespace(given=np.array(slots, np.int32))
    return {slots[failure.row]: failure.reason for failure in grammars.take_failures(stage)}


def matchers_of(host: GrammarHost) -> list[int]:
    """Process ids, in the order of their start."""
    assert host._process is not None
    pid = host._process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
