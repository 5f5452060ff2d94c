"""Which tokens a constrained slot may get next: a matcher a slot, by llguidance, on the host.

The matcher lives here because stages run here in order: the mask of a row follows from the token before, which the
scheduler may not have seen yet when it sends the row's next coda. It needs the vocabulary's bytes and nothing else of
the tokenizer. Grammars have been checked at the edge; what goes wrong later (a limit of the matcher) ends the output.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from depthbatch.common import grammar_limits
from depthbatch.common.frames import Int32Array, split_prefill_frame
from depthbatch.common.logging import get_logger
from depthbatch.common.messages import GrammarStart, StageBatch
from depthbatch.worker.runner.checks import StageError

log = get_logger("worker")


def load_grammars(model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> "Grammars | None":
    """None where output cannot be constrained: without tokenizer.json, without an end of sequence, or with a
    tokenizer that llguidance cannot read (which is logged)."""
    path = model_dir / "tokenizer.json"
    if not path.is_file() or not eos_token_ids:
        return None
    try:
        tokenizer = LLTokenizer(path.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except Exception as error:  # whatever the library makes of a tokenizer that it does not know
        log.warning("output cannot be constrained by grammars: %s", str(error).splitlines()[0])
        return None
    return Grammars(tokenizer, vocab_size, eos_token_ids)


class Grammars:
    """Matchers by slot. A slot without one is free."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._words = -(-vocab_size // 32)
        self._starts: dict[int, GrammarStart] = {}
        self._matchers: dict[int, LLMatcher] = {}
        end = np.zeros(self._words * 32, np.uint8)
        end[list(eos_token_ids)] = 1
        self._end = np.packbits(end, bitorder="little").view(np.int32)  # allows the end of sequence alone

    def admit(self, slots: Iterable[int], starts: Iterable[GrammarStart]) -> None:
        """Slots get new requests; ``starts`` are those of the constrained ones."""
        for slot in slots:
            self._matchers.pop(slot, None)
        for start in starts:
            self._starts[start.slot] = start
            self._matchers[start.slot] = LLMatcher(
                self._tokenizer, start.grammar, log_level=0, limits=grammar_limits.LIMITS
            )

    def note_prefill(self, header: StageBatch, frame: Int32Array) -> None:
        """Takes the tokens that resumed requests have generated: those behind their prompts."""
        parts = split_prefill_frame(frame, header.rows, header.n_tokens, header.n_updates)
        offset = 0
        for slot, start, length in zip(*(part.tolist() for part in parts[:3]), strict=True):
            if slot in self._matchers:
                own = max(0, self._starts[slot].prompt_tokens - start)
                for token in parts.token_ids[offset + own : offset + length].tolist():
                    self._consume(slot, token)
            offset += length

    def note(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Takes the tokens that rows were given."""
        for slot, token in zip(slots, tokens, strict=True):
            if slot in self._matchers:
                self._consume(slot, token)

    def constrained(self, slots: Sequence[int]) -> list[int]:
        """Those of ``slots`` that have a grammar."""
        return [slot for slot in slots if slot in self._matchers]

    def masks(self, slots: Sequence[int]) -> Int32Array:
        """What constrained slots may get next: int32 [n, ceil(V / 32)], a bit a token."""
        masks = np.zeros((len(slots), self._words), np.int32)
        for slot, mask in zip(slots, masks, strict=True):
            matcher = self._matchers[slot]
            if not matcher.is_stopped() and not matcher.is_error():
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if matcher.is_error():
                log.warning("a grammar gave up: %s", matcher.get_error().splitlines()[0])
            if matcher.is_stopped() or matcher.is_error() or not mask.any():
                mask[:] = self._end
        return masks

    def _consume(self, slot: int, token: int) -> None:
        """What comes after the end, dispatched before the end was known, is dropped by the scheduler: ignored here."""
        matcher = self._matchers[slot]
        if not matcher.is_stopped() and not matcher.is_error():
            matcher.consume_token(token)


def require_grammars(grammars: Grammars | None, header: StageBatch) -> Grammars:
    """StageError when a stage needs matchers that this worker does not have."""
    if grammars is None:
        raise StageError(f"stage {header.step_id}: this worker has no grammars")
    return grammars
