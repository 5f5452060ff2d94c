"""What changes logits before a token is chosen: additions, penalties, bad words, allow lists, a grammar's mask; and the
counts and recent tokens they need.

Order and arithmetic are vLLM's: logit_bias and the stop tokens that min_tokens holds off, then the repetition penalty
(prompt and output), then frequency and presence penalties (output). A row that asks for nothing keeps its logits bit
for bit, so it may share a batch with rows that do. Device code: fixed shapes, no host synchronisation.

Memory: 5 bytes a slot and vocabulary entry, and V / 4 + 16 KiB a slot (64 slots of a vocabulary of 49,152: 18 MB); on
the CPU, pages that nothing has touched are not there. Knows nothing of requests.
"""

import torch
from torch import Tensor

from depthbatch.common.frames import BAD_SEQUENCE_TOKENS, MASK_BITS, MAX_ADJUSTMENTS, MAX_BAD_SEQUENCES, mask_words
from depthbatch.worker.sampling.slot_params import SlotParams

RECENT_TOKENS = 16  # places of a slot's ring of tokens; more than a bad sequence has before its last one


class Shaping:
    """Static tensors of ``rows`` slots, the dummy included.

    ::

        counts     int32 [rows, V]                how often a token is in the slot's output
        in_prompt  bool  [rows, V]                whether it is in the slot's prompt
        tokens     int32 [rows, MAX_ADJUSTMENTS]  tokens whose logits are added to, and
        additions  fp32  [rows, MAX_ADJUSTMENTS]  what; only the first ``params.adjustments`` entries count
        allowed    int32 [rows, ceil(V / 32)]     a bit a token, of constrained slots
        listed     int32 [rows, ceil(V / 32)]     a bit a token, of slots with an allow list
        bad        int32 [rows, MAX_BAD_SEQUENCES, BAD_SEQUENCE_TOKENS]   right-aligned behind -1; only the first
                                                  ``params.num_bad_sequences`` entries count
        recent     int32 [rows, RECENT_TOKENS]    the token of position p is at p % RECENT_TOKENS
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.counts = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)
        self.tokens = torch.zeros(rows, MAX_ADJUSTMENTS, dtype=torch.int32, device=device)
        self.additions = torch.zeros(rows, MAX_ADJUSTMENTS, dtype=torch.float32, device=device)
        self.allowed = torch.full((rows, mask_words(vocab_size)), -1, dtype=torch.int32, device=device)
        self.listed = torch.full_like(self.allowed, -1)
        self.bad = torch.zeros(rows, MAX_BAD_SEQUENCES, BAD_SEQUENCE_TOKENS, dtype=torch.int32, device=device)
        self.recent = torch.zeros(rows, RECENT_TOKENS, dtype=torch.int32, device=device)

    @staticmethod
    def bytes_a_row(vocab_size: int) -> int:
        """Of ``tensors``."""
        tables = 2 * MAX_ADJUSTMENTS + 2 * mask_words(vocab_size) + MAX_BAD_SEQUENCES * BAD_SEQUENCE_TOKENS
        return 5 * vocab_size + 4 * (tables + RECENT_TOKENS)

    def tensors(self) -> tuple[Tensor, ...]:
        tables = (self.tokens, self.additions, self.allowed, self.listed, self.bad, self.recent)
        return (self.counts, self.in_prompt, *tables)

    def set_adjustments(self, entries: Tensor) -> None:
        """Takes adjustment rows of ``common.frames``: int32 [n, 4], on the device."""
        index = entries[:, 0].long() * MAX_ADJUSTMENTS + entries[:, 1].long()
        self.tokens.view(-1).index_copy_(0, index, entries[:, 2])
        self.additions.view(torch.int32).view(-1).index_copy_(0, index, entries[:, 3])

    def set_allowed(self, slots: Tensor, masks: Tensor) -> None:
        """Masks int32 [n, ceil(V / 32)] of slots int32 [n]."""
        self.allowed.index_copy_(0, slots.long(), masks)

    def set_bad_sequences(self, entries: Tensor) -> None:
        """Takes rows of bad sequences of ``common.frames``: int32 [n, 2 + BAD_SEQUENCE_TOKENS], on the device."""
        index = entries[:, 0].long() * MAX_BAD_SEQUENCES + entries[:, 1].long()
        self.bad.view(-1, BAD_SEQUENCE_TOKENS).index_copy_(0, index, entries[:, 2:])

    def set_allow_lists(self, lists: Tensor) -> None:
        """Takes allow lists of ``common.frames``: int32 [n, 1 + ceil(V / 32)], on the device."""
        self.listed.index_copy_(0, lists[:, 0].long(), lists[:, 1:])

    def note_recent(self, slots: Tensor, positions: Tensor, tokens: Tensor, ends: Tensor) -> None:
        """Remembers which token is at which position: slots int64, the others int32 [N]. ``ends``: the position after the
        last one of the slot's that is noted here; what the ring has no room for goes into the dummy slot's."""
        kept = torch.where(positions >= ends - RECENT_TOKENS, slots, 0)
        self.recent.view(-1).index_copy_(0, kept * RECENT_TOKENS + positions % RECENT_TOKENS, tokens)

    def note_prompt(
        self, slots: Tensor, starts: Tensor, token_slots: Tensor, token_ids: Tensor, is_output: Tensor
    ) -> None:
        """Counts the tokens of packed prompt chunks; a chunk from position 0 forgets what its slot held before.

        slots int64, starts int32 [n_seqs]; token_slots int64, token_ids int32 and is_output bool [n_tokens], the last
        one for tokens that a resumed request has generated itself.
        """
        goes_on = (starts > 0).unsqueeze(1)
        self.counts.index_copy_(0, slots, self.counts.index_select(0, slots) * goes_on)
        self.in_prompt.index_copy_(0, slots, self.in_prompt.index_select(0, slots) & goes_on)
        index = token_slots * self.vocab_size + token_ids
        self.counts.view(-1).scatter_add_(0, index, is_output.to(torch.int32))
        self.in_prompt.view(-1).index_fill_(0, torch.where(is_output, 0, index), True)  # output: into the dummy slot

    def note_output(self, slots: Tensor, tokens: Tensor, times: int = 1) -> None:
        """Counts the tokens that rows were just given (``times`` -1: were not given); slots int64 [N], tokens int32 [N]."""
        index = slots * self.vocab_size + tokens
        self.counts.view(-1).scatter_add_(0, index, torch.full_like(tokens, times))

    def apply(self, logits: Tensor, slots: Tensor, params: SlotParams, positions: Tensor) -> Tensor:
        """Shaped logits of the tokens that go to ``positions`` int32 [N]; logits fp32 [N, V] are left as they are."""
        shaped = logits.scatter_add(1, self.tokens.index_select(0, slots).long(), self._sums(slots, params, positions))
        counts = self.counts.index_select(0, slots)
        present = counts > 0
        seen = self.in_prompt.index_select(0, slots).logical_or_(present)
        repetition = torch.where(params.repetition_penalty > 0, params.repetition_penalty, 1.0).unsqueeze(1)
        scratch = torch.where(shaped > 0, repetition.reciprocal(), repetition)
        shaped.mul_(scratch.masked_fill_(seen.logical_not_(), 1.0))
        shaped.sub_(scratch.copy_(counts).mul_(params.frequency_penalty.unsqueeze(1)))
        return shaped.sub_(scratch.copy_(present).mul_(params.presence_penalty.unsqueeze(1)))

    def forbid(self, logits: Tensor, slots: Tensor, params: SlotParams, positions: Tensor) -> Tensor:
        """-inf for tokens that are not on a row's allow list, and for those that would end one of its bad sequences at
        ``positions`` int32 [N]; fp32 [N, V]. Where nothing would be left the bad sequences are let through."""
        outside = self._lacks(self.listed, slots) & (params.allow_listed > 0).unsqueeze(1)
        allowed = logits.masked_fill(outside, -torch.inf)
        ends = self.bad.index_select(0, slots)[:, :, -1].long()
        before = allowed.gather(1, ends)
        barred = torch.where(self._about_to_end(slots, params, positions), -torch.inf, torch.inf)
        left = allowed.scatter_reduce(1, ends, barred, "amin")
        stuck = left.amax(1, keepdim=True) == -torch.inf
        return left.scatter_(1, ends, torch.where(stuck, before, left.gather(1, ends)))

    def constrain(self, logits: Tensor, slots: Tensor, params: SlotParams) -> Tensor:
        """-inf for what a constrained row's grammar forbids now; fp32 [N, V]."""
        forbidden = self._lacks(self.allowed, slots) & (params.constrained > 0).unsqueeze(1)
        return logits.masked_fill(forbidden, -torch.inf)

    def _lacks(self, masks: Tensor, slots: Tensor) -> Tensor:
        """Which tokens have no bit in their slot's mask: bool [N, V]."""
        bits = torch.arange(MASK_BITS, dtype=torch.int32, device=slots.device)
        has = (masks.index_select(0, slots).unsqueeze(2) >> bits) & 1
        return has.view(len(slots), -1)[:, : self.vocab_size] == 0

    def _about_to_end(self, slots: Tensor, params: SlotParams, positions: Tensor) -> Tensor:
        """Which entries of the table of bad sequences want but their last token, in the output alone: bool [N, B]."""
        table = self.bad.index_select(0, slots)[:, :, :-1]
        past = torch.arange(1 - BAD_SEQUENCE_TOKENS, 0, dtype=torch.int32, device=slots.device) + positions.unsqueeze(1)
        tokens = self.recent.index_select(0, slots).gather(1, (past % RECENT_TOKENS).long())
        same = (table == tokens.unsqueeze(1)) & (past >= params.first_output.unsqueeze(1)).unsqueeze(1)
        index = torch.arange(MAX_BAD_SEQUENCES, dtype=torch.int32, device=slots.device)
        return ((table < 0) | same).all(2) & (index < params.num_bad_sequences.unsqueeze(1))

    def _sums(self, slots: Tensor, params: SlotParams, positions: Tensor) -> Tensor:
        """What is added to the logit of each table entry now, 0 for entries that do not count: fp32 [N, A]."""
        additions = self.additions.index_select(0, slots)
        column = torch.arange(MAX_ADJUSTMENTS, dtype=torch.int32, device=slots.device)
        held_off = (positions < params.min_until).unsqueeze(1)
        counts = (column < params.adjustments.unsqueeze(1)) & (held_off | (additions > -torch.inf))
        return torch.where(counts, additions, 0.0)
