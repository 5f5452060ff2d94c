"""Which tokens a constrained slot may get next: a matcher a slot, in a process of its own beside the worker.

The worker asks because stages run here in order: the mask of a row follows from the token before, which the scheduler
may not have seen yet when it sends the row's next coda. Matchers get a token as soon as it is known and make the next
mask while the model loops. What is wrong with a grammar, or with its process, fails its request and no other.
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from depthbatch.common.frames import Int32Array, Stage
from depthbatch.common.grammar_host import GrammarError, GrammarHost, Matcher
from depthbatch.common.grammar_limits import ANSWER_WALL_S
from depthbatch.common.logging import get_logger
from depthbatch.common.messages import GrammarStart, RowFailure, Variant
from depthbatch.worker.runner.stage_input import StageError, StageInput

log = get_logger("worker")


def load_grammars(model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> "Grammars | None":
    """None where output cannot be constrained: without tokenizer.json or without an end of sequence. Starts a program;
    ``ready`` says whether it can read the tokenizer."""
    path = model_dir / "tokenizer.json"
    if not path.is_file() or not eos_token_ids:
        return None
    host = GrammarHost(path, vocab_size, eos_token_ids)
    host.start()
    return Grammars(host, vocab_size, eos_token_ids)


class Masks(NamedTuple):
    """What constrained slots may get next."""

    slots: Int32Array  # [n]
    allowed: Int32Array  # [n, ceil(V / 32)], a bit a token


class Grammars:
    """Matchers by slot. A slot without one is free."""

    def __init__(self, host: GrammarHost, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._host = host
        self._words = -(-vocab_size // 32)
        self._starts: dict[int, GrammarStart] = {}
        self._matchers: dict[int, Matcher | None] = {}  # None: failed, and what it gets no longer matters
        self._failures: dict[int, str] = {}
        end = np.zeros(self._words * 32, np.uint8)
        end[list(eos_token_ids)] = 1
        self._end = np.packbits(end, bitorder="little").view(np.int32)  # allows the end of sequence alone

    def ready(self) -> bool:
        """Waits for the program; False, which is logged, when it cannot read the tokenizer."""
        try:
            self._host.wait_ready()
        except GrammarError as error:
            log.warning("output cannot be constrained by grammars: %s", error)
            return False
        return True

    def close(self) -> None:
        """Ends the program and all matchers."""
        self._forget(list(self._matchers))
        self._host.close()

    def admit(self, slots: Iterable[int], starts: Iterable[GrammarStart]) -> None:
        """Slots get new requests; ``starts`` are those of the constrained ones."""
        self._forget(slots)
        for start in starts:
            self._starts[start.slot] = start
            try:
                self._matchers[start.slot] = self._host.matcher(start.grammar)
            except GrammarError as error:
                self._fail(start.slot, error)

    def begin(self, stage: StageInput) -> list[int]:
        """Takes what a stage brings (new requests, tokens of resumed ones); the slots whose grammar must allow the token
        that they get."""
        if stage.slot_params.size:
            self.admit(stage.slot_params["slot"].tolist(), stage.grammars)
        if Variant.CONSTRAIN not in stage.variant:
            return []
        if stage.stage is Stage.PREFILL:
            self._note_prefill(stage)
            if stage.forced.size:
                self.note(*stage.forced.T.tolist())
        return [slot for slot in stage.given.tolist() if slot in self._matchers]

    def _note_prefill(self, stage: StageInput) -> None:
        """Takes the tokens that resumed requests have generated: those behind their prompts."""
        chunks, offset = stage.chunks, 0
        assert chunks is not None
        for slot, start, length in zip(*(part.tolist() for part in chunks[:3]), strict=True):
            if slot in self._matchers:
                own = max(0, self._starts[slot].prompt_tokens - start)
                self._tell(slot, chunks.token_ids[offset + own : offset + length].tolist())
            offset += length

    def note(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Takes the tokens that rows were given."""
        for slot, token in zip(slots, tokens, strict=True):
            self._tell(slot, [token])

    def masks(self, slots: Sequence[int]) -> Int32Array:
        """What constrained slots may get next: int32 [n, ceil(V / 32)], a bit a token. All of them together are waited
        for no longer than ANSWER_WALL_S; a slot whose grammar has failed may only end (``take_failures``)."""
        deadline_s = time.monotonic() + ANSWER_WALL_S
        masks = np.empty((len(slots), self._words), np.int32)
        for slot, row in zip(slots, masks, strict=True):
            row[:] = self._mask(slot, deadline_s)
        return masks

    def take_failures(self, stage: StageInput) -> tuple[RowFailure, ...]:
        """What has gone wrong for the slots that get a token, each failure once."""
        if not self._failures:
            return ()
        given = enumerate(stage.given.tolist())
        return tuple([RowFailure(row, self._failures.pop(slot)) for row, slot in given if slot in self._failures])

    def _mask(self, slot: int, deadline_s: float) -> Int32Array:
        matcher = self._matchers[slot]
        if matcher is None:
            return self._end
        try:
            answer = matcher.mask(deadline_s)
        except GrammarError as error:
            self._fail(slot, error)
            return self._end
        return self._end if answer is None else np.frombuffer(answer, np.int32)

    def _tell(self, slot: int, tokens: Sequence[int]) -> None:
        matcher = self._matchers.get(slot)
        if matcher is None or not tokens:
            return
        try:
            matcher.tell(tokens)
        except GrammarError as error:
            self._fail(slot, error)

    def _fail(self, slot: int, error: GrammarError) -> None:
        log.warning("a grammar has failed: %s", error)
        self._forget([slot])
        self._matchers[slot] = None
        self._failures[slot] = str(error)

    def _forget(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._failures.pop(slot, None)
            matcher = self._matchers.pop(slot, None)
            if matcher is not None:
                matcher.close()


def begin_stage(grammars: Grammars | None, stage: StageInput) -> Masks | None:
    """Tells the matchers what a stage brings; what its constrained slots may get, None without any.

    StageError when a stage needs matchers that this worker does not have.
    """
    if grammars is None:
        if Variant.CONSTRAIN in stage.variant:
            raise StageError(f"stage {stage.step_id}: this worker has no grammars")
        return None
    slots = grammars.begin(stage)
    return Masks(np.array(slots, np.int32), grammars.masks(slots)) if slots else None
