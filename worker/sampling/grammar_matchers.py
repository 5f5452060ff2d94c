"""Which tokens a constrained slot may get next: a matcher a slot, in a process of its own beside the worker.

The worker asks because stages run here in order: the mask of a row follows from the token before, which the scheduler
may not have seen yet when it sends the row's next coda. Matchers get a token as soon as it is known and make the next
mask while the model loops. What is wrong with a grammar, or with its process, fails its request and no other.
"""

import contextlib
import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from depthbatch.common.frames import Int32Array, Stage
from depthbatch.common.grammar_host import GrammarError, GrammarHost, Matcher
from depthbatch.common.grammar_limits import ANSWER_WALL_S
from depthbatch.common.logging import get_logger
from depthbatch.common.messages import GrammarPrepared, GrammarStart, RowFailure, Variant
from depthbatch.worker.runner.stage_input import StageError, StageInput

KEPT = 128  # compiled grammars
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
        self._kept: OrderedDict[str, Matcher] = OrderedDict()  # compiled, by grammar, used last at the end
        self._asked: dict[int, str] = {}  # request -> the grammar that it waits for
        self._asked_until_s: dict[str, float] = {}
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
        for kept in self._kept.values():
            kept.close()
        self._kept.clear()
        self._host.close()

    def prepare(self, request_id: int, grammar: str) -> None:
        """Starts compiling, for a request that will be admitted when ``take_prepared`` names it."""
        self._asked[request_id] = grammar
        if grammar in self._kept:
            self._kept.move_to_end(grammar)
            return
        with contextlib.suppress(GrammarError):  # take_prepared says so
            self._kept[grammar] = self._host.matcher(grammar, b"k")
        self._asked_until_s[grammar] = time.monotonic() + ANSWER_WALL_S
        while len(self._kept) > KEPT and (oldest := next(iter(self._kept))) not in self._asked.values():
            self._kept.pop(oldest).close()

    def take_prepared(self) -> list[GrammarPrepared]:
        """Requests whose grammar has its first mask, or has failed; never waits."""
        told = []
        for request_id, grammar in list(self._asked.items()):
            kept = self._kept.get(grammar)
            try:
                if kept is None:
                    raise GrammarError("the grammar host did not start")
                late = time.monotonic() >= self._asked_until_s.get(grammar, math.inf)
                if not kept.answered and not late:
                    continue
                kept.mask(0.0)
                told.append(GrammarPrepared(request_id))
            except GrammarError as error:
                told.append(GrammarPrepared(request_id, str(error)))
                if kept is not None:
                    kept.close()
                    del self._kept[grammar]
            del self._asked[request_id]
        return told

    def descriptors(self) -> list[int]:
        """One that gets readable when take_prepared has news."""
        return [self._kept[grammar].descriptor for grammar in set(self._asked.values()) if grammar in self._kept]

    def _matcher(self, grammar: str) -> Matcher:
        """Of what has been prepared, without waiting; compiled again where that has gone, as after a restart. Raises
        GrammarError."""
        kept = self._kept.get(grammar)
        if kept is not None and kept.answered:
            self._kept.move_to_end(grammar)
            with contextlib.suppress(GrammarError):
                return kept.fork()
        return self._host.matcher(grammar)

    def admit(self, slots: Iterable[int], starts: Iterable[GrammarStart]) -> None:
        """Slots get new requests; ``starts`` are those of the constrained ones."""
        self._forget(slots)
        for start in starts:
            self._starts[start.slot] = start
            try:
                self._matchers[start.slot] = self._matcher(start.grammar)
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
