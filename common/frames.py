"""Byte layout of the int32 frames that go from scheduler to worker (architecture, section 3).

A decode stage's frame is exactly the static input buffer of that (stage, bucket): the worker copies it once and
replays. Padding rows are all zero: slot 0 and block 0 are dummies. ::

    prelude, core, coda:   int32 [4, bucket]
        row 0   slot           the sequence: parameters, block table
        row 1   position       of the token this row carries (0-based); its K/V goes there, context = position + 1
        row 2   prelude: logical block to put into block_table[slot, position // block_size], 0 = none
                core:    loop this step runs (1-based)
                coda:    exit loop of the token (1-based); -l: a draft is read after l loops, no plane is filled
        row 3   lane           where the row's own state lies: lane_of(slot, position)

    prefill:   int32 [4 * n_seqs + n_tokens + 3 * n_updates]
        slot [n_seqs] | start [n_seqs] | length [n_seqs] | sample [n_seqs] | token ids [n_tokens] | updates [n_updates, 3]
        start:   position of the chunk's first token          sample: 1 if the chunk ends its prompt (logits wanted)
        updates: (slot, block_table index, logical block)

    slot parameters (optional second frame, applied before the stage):  n rows of SLOT_PARAMS

Rarer inputs and outputs travel as bytes inside the messages (StageExtra, StageResult)::

    adjustments   int32 [n, 4]   slot | index within the slot's table | token | float32 bits added to its logit; an
                                 addition of -inf holds until position MIN_UNTIL of the slot only
    bad sequences int32 [n, 2 + BAD_SEQUENCE_TOKENS]   slot | index within the slot's table | tokens, right-aligned behind
                                 -1: the last one may not follow the others in the slot's output
    allow lists   int32 [n, 1 + mask_words(V)]   slot | a bit a token: only these may be in the slot's output
    targets       int32 [n, 2]   index among the packed prompt tokens | token whose logprob is wanted there
    depths        uint8 [n_tokens]   loops that each token of a prefill runs, 0 = its K/V are there; none at all = r_max
                                     everywhere
    forced_tokens int32 [n, 2]   slot | known token that the slot goes on with, in place of one sampled
    offloads      int32 [n, 2]   KV block | block of host memory that gets a copy of it, in order, before anything else
    restores      int32 [n, 2]   block of host memory | KV block that gets it back, in order, before the stage runs
    logprobs      int32 [n, 1 + 2 k]   float32 bits of a token's logprob | k likeliest tokens | bits of their logprobs
"""

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

MAX_STAGES_IN_FLIGHT = 8  # stages sent and not answered; a worker's ring of input buffers is deeper than this

ROW_FIELDS = 4
ROW_SLOT, ROW_POSITION, ROW_AUX, ROW_LANE = range(ROW_FIELDS)


def lane_of(slots: Any, positions: Any, width: int, lanes: int) -> Any:
    """Lanes of the tokens at ``positions`` of ``slots`` (1..width), elementwise: ints, numpy or torch arrays.

    A sequence's tokens take its ``lanes`` lanes in turn, so that any ``lanes`` successive ones have different lanes.
    """
    return slots + positions % lanes * width


def lanes_of_a_slot(draft_lanes: int) -> int:
    """With drafts one for the head, one for each draft lane, and one for a row whose final readout is on its way: it runs no
    more, and the next draft does not wait until it is known."""
    return draft_lanes + 2 if draft_lanes else 1


class Stage(IntEnum):
    """What the worker can run."""

    PREFILL = 0
    PRELUDE = 1
    CORE = 2
    CODA = 3

    @property
    def label(self) -> str:
        return self.name.lower()


SLOT_PARAMS = np.dtype(
    [
        ("slot", "<i4"),
        ("gate", "<i4"),  # the gate in force
        ("exit_threshold", "<f4"),
        ("temperature", "<f4"),  # 0 = greedy
        ("top_k", "<i4"),  # 0 = off
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("seed_low", "<i4"),
        ("seed_high", "<i4"),
        ("first_output", "<i4"),  # position of the request's first output token (= prompt length)
        ("state_seed", "<i4"),  # seed of the initial recurrent state (Huginn, state_init = seeded)
        ("presence_penalty", "<f4"),
        ("frequency_penalty", "<f4"),
        ("repetition_penalty", "<f4"),  # 0 = 1 = off
        ("min_until", "<i4"),  # position of the first output token that may be a stop token (prompt + min_tokens)
        ("adjustments", "<i4"),  # entries of the slot's adjustment table
        ("num_bad_sequences", "<i4"),  # entries of the slot's table of bad sequences
        ("allow_listed", "<i4"),  # 1 = only tokens of the slot's allow list
        ("constrained", "<i4"),  # 1 = a grammar says which tokens are allowed
    ]
)
"""One row of the slot parameter frame. Every field is 4 bytes, so that a row is int32 words to who only moves it. A
field that has a RequestParams field's name carries its value."""
SLOT_PARAM_WORDS = SLOT_PARAMS.itemsize // 4
SlotParamRows = npt.NDArray[np.void]  # of SLOT_PARAMS


def slot_param_rows(words: Int32Array) -> SlotParamRows:
    """The rows [n] of a slot parameter frame of n * SLOT_PARAM_WORDS int32, as a view."""
    return words.reshape(-1).view(SLOT_PARAMS)


def slot_param_words(rows: SlotParamRows) -> Int32Array:
    """The inverse: rows [n] as int32 [n, SLOT_PARAM_WORDS], as a view."""
    return rows.view(np.int32).reshape(-1, SLOT_PARAM_WORDS)


MAX_ADJUSTMENTS = 1024  # entries of a slot's adjustment table: logit_bias, and stop tokens while min_tokens holds
MAX_BAD_SEQUENCES = 128  # entries of a slot's table of bad sequences
BAD_SEQUENCE_TOKENS = 16  # tokens of one
MASK_BITS = 32  # tokens of a word of an allow list or of a grammar's mask
MAX_LOGPROBS = 20  # likeliest tokens a logprob comes with
ADJUSTMENT_FIELDS, TARGET_FIELDS, FORCED_TOKEN_FIELDS, MOVE_FIELDS = 4, 2, 2, 2
UPDATE_FIELDS = 3
MAX_DEPTH = 255  # depths travel as uint8


def logprob_fields(max_logprobs: int) -> int:
    """Columns of a row of logprobs with ``max_logprobs`` likeliest tokens."""
    return 1 + 2 * max_logprobs


class PrefillSlices(NamedTuple):
    """Where the parts of a prefill frame lie. Arrays and tensors are cut alike; updates are flat."""

    slots: slice
    starts: slice
    lengths: slice
    sample: slice
    token_ids: slice
    updates: slice


def prefill_words(n_seqs: int, n_tokens: int, n_updates: int) -> int:
    """int32 of a prefill frame."""
    return 4 * n_seqs + n_tokens + UPDATE_FIELDS * n_updates


def prefill_slices(n_seqs: int, n_tokens: int, n_updates: int) -> PrefillSlices:
    """The parts of a frame with these counts."""
    slots, starts, lengths, sample = (slice(n_seqs * part, n_seqs * (part + 1)) for part in range(4))
    tokens_end = 4 * n_seqs + n_tokens
    updates = slice(tokens_end, prefill_words(n_seqs, n_tokens, n_updates))
    return PrefillSlices(slots, starts, lengths, sample, slice(4 * n_seqs, tokens_end), updates)


def mask_words(vocab_size: int) -> int:
    """int32 words of a mask that has a bit a token."""
    return -(-vocab_size // MASK_BITS)


class PrefillFrame(NamedTuple):
    """The parts of a prefill frame, as views."""

    slots: Int32Array  # [n_seqs]
    starts: Int32Array  # [n_seqs]
    lengths: Int32Array  # [n_seqs]
    sample: Int32Array  # [n_seqs]
    token_ids: Int32Array  # [n_tokens]
    updates: Int32Array  # [n_updates, 3]

    @property
    def sampled(self) -> Int32Array:
        """[n] indices of the sequences with sample = 1."""
        return np.flatnonzero(self.sample).astype(np.int32)


def split_prefill_frame(frame: Int32Array, n_seqs: int, n_tokens: int, n_updates: int) -> PrefillFrame:
    """Cuts a flat prefill frame into its parts without copying.

    Raises ValueError when the frame's size is not that of the counts.
    """
    if frame.size != prefill_words(n_seqs, n_tokens, n_updates):
        raise ValueError(f"prefill frame has {frame.size} int32, not 4*{n_seqs} + {n_tokens} + 3*{n_updates}")
    at = prefill_slices(n_seqs, n_tokens, n_updates)
    return PrefillFrame(
        frame[at.slots],
        frame[at.starts],
        frame[at.lengths],
        frame[at.sample],
        frame[at.token_ids],
        frame[at.updates].reshape(n_updates, UPDATE_FIELDS),
    )
