"""How much prefill may run now, under targets for TTFT and ITL: the objectives ``latency`` and ``goodput`` of ``auto``.

Prefill and decode take turns on one device: a batch of n prompt tokens holds every decoding row for delta + gamma n
seconds (fitted), and decode holds every prompt. So how much prefill may run next is the one decision by which one kind of
waiting is exchanged for the other; when coda runs is left to the throughput rule, since with a given number of rows mean
ITL = rows / tokens per second. Notation: d = expected depth, s = seconds of decode a core step (core, and its share of
coda and prelude), rem = expected core steps until a row's next token, L = the mean ITL to be expected.

``latency``: ITL keeps its target between any two tokens, TTFT is as low as that allows; once the oldest prompt is past its
own target both give way in the same proportion x = max(1, TTFT so far / target) (largest weighted delay first). No row's
gap may pass x times the target:

    delta + gamma n  <=  x ITL_target - max over rows (time since the last token + rem s).

``goodput``: tokens of requests that keep both targets, TTFT and mean ITL. A mean is made up for later, a first token is not:
prompts that can still be in time go first, and a row may be behind its schedule (first token + ITL_target a token) by what
it makes up on the half of its m tokens (mean output) that a row met at random still has before it:

    delta + gamma n  <=  m / 2 (ITL_target - L) - max over rows (how far it is behind).

Rows beyond that, and rows whose first token was late, are lost and do not count. Nor is a row taken in that would lift the
expected ITL of all above the target, L = d s + (rows p) / m with p seconds of prefill a prompt, as long as one row alone
would keep it.

Under both, prompts wait for S free slots, as they do for throughput, unless the first one's TTFT is at stake. A piece of
a prompt is cut no shorter than delta / gamma tokens (half of its time is work), nor are prompts overtaken.

Approximations: rows are alike in depth and length; arrivals are not foreseen; while a first token is in flight its row
counts as just served.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from depthbatch.common.frames import Stage
from depthbatch.scheduler.policy.view import QueueView, RetiredStage
from depthbatch.scheduler.requests import HeadPrompt, PrefillLimit
from depthbatch.scheduler.rows import DecodingRows

FloatArray = npt.NDArray[np.float64]
_FORGET = 0.998  # of the sums, a stage


class LatencyTargets(NamedTuple):
    """Seconds."""

    ttft_s: float
    itl_s: float


class PrefillCost(NamedTuple):
    """t = delta + gamma tokens, seconds."""

    delta: float
    gamma: float


class DecodeForecast(NamedTuple):
    """What pacing must know of decode."""

    remaining: FloatArray  # [r_max + 1]: expected core steps of a row by the loops behind it; 0 at r_max
    row_s: float  # what one more row adds to a core step with the context it brings, and to its boundary stages a step


class Pacing:
    """Times of rows and flow of tokens, and the limit that follows from them."""

    def __init__(self, objective: str, targets: LatencyTargets, width: int, max_tokens: int) -> None:
        self._goodput = objective == "goodput"
        self._targets = targets
        self._width, self._max_tokens = width, max_tokens
        self._everything = PrefillLimit(max_tokens, width)
        self._order = np.full(width + 1, -1, np.int64)  # whose times these are, by slot
        self._first_s = np.zeros(width + 1)  # of the first token
        self._last_s = np.zeros(width + 1)  # of the latest one
        self._tokens = np.zeros(width + 1, np.int64)
        self._decode_s = self._cores = 0.0  # sums with forgetting
        self._prefill_s = self._prompts = self._outputs = self._ended = 0.0

    def observe(self, retired: RetiredStage, seconds: float) -> None:
        """A stage has retired; ``seconds`` are what it took of the device's time."""
        if retired.stage is Stage.PREFILL:
            self._prefill_s += seconds
            self._first_tokens(retired)
            return
        self._decode_s = _FORGET * self._decode_s + seconds
        self._cores *= _FORGET
        if retired.stage is Stage.CORE:
            self._cores += 1.0
        elif retired.stage is Stage.CODA:
            self._last_s[retired.slots] = retired.end_s
            self._tokens[retired.slots] += 1

    def lost_prompt(self, view: QueueView, now: float, prefill: PrefillCost | None) -> int | None:
        """Under goodput: the request at the head of the queue that cannot be in time any more and stands before others
        yet; it is to be set behind those that can, and the next head looked at."""
        if not self._goodput or prefill is None or not self._cores:
            return None
        head = view.head_prompt(now)
        if head is None or not head.untouched or head.overdue:
            return None
        return head.request_id if self._alone_s(head, prefill) > self._targets.ttft_s else None

    def limit(
        self, view: QueueView, now: float, min_free_slots: int, prefill: PrefillCost | None, decode: DecodeForecast
    ) -> PrefillLimit | None:
        """What a prefill may hold now, None when there must be none. ``prefill`` None: its cost is not known yet. Lost
        prompts have been set back before."""
        if prefill is None or not self._cores:
            return self._everything if view.can_prefill(min_free_slots) else None
        head = view.head_prompt(now)
        if head is None or not view.can_prefill(1):
            return None
        urgent = not head.overdue and self._alone_s(head, prefill) + self._core_s > self._targets.ttft_s
        if not urgent and not view.can_prefill(min_free_slots):
            return None
        rows = view.decoding_rows()
        if not rows.slots.size:
            return self._everything
        if self._goodput:
            return self._for_goodput(now, head, rows, prefill, decode)
        return self._for_latency(now, head, rows, prefill, decode)

    def _alone_s(self, head: HeadPrompt, prefill: PrefillCost) -> float:
        """TTFT of a prompt if nothing but it were prefilled from now on."""
        pieces = -(-head.tokens // self._max_tokens)
        return head.waited_s + pieces * prefill.delta + prefill.gamma * head.tokens

    def _for_latency(
        self, now: float, head: HeadPrompt, rows: DecodingRows, prefill: PrefillCost, decode: DecodeForecast
    ) -> PrefillLimit | None:
        known = self._order[rows.slots] == rows.order
        since_s = np.where(known, now - self._last_s[rows.slots], 0.0)
        gap_s = float((since_s + decode.remaining[rows.loops] * self._core_s).max())
        level = max(1.0, head.waited_s / self._targets.ttft_s)
        return self._within(level * self._targets.itl_s - gap_s, prefill, head.tokens, self._width)

    def _for_goodput(
        self, now: float, head: HeadPrompt, rows: DecodingRows, prefill: PrefillCost, decode: DecodeForecast
    ) -> PrefillLimit | None:
        fit, itl_s = self._rows_that_fit(rows.slots.size, decode)
        if fit < 1 and head.untouched:
            return None
        in_time = self._order[rows.slots] == rows.order
        in_time &= ~(self._first_s[rows.slots] - rows.arrived_s > self._targets.ttft_s)
        due_s = self._first_s[rows.slots] + self._tokens[rows.slots] * self._targets.itl_s
        behind_s = (now + decode.remaining[rows.loops] * self._core_s - due_s)[in_time]
        slack_s = 0.5 * self._mean_output * max(0.0, self._targets.itl_s - itl_s)
        behind_s = behind_s[behind_s <= slack_s]
        room_s = slack_s - float(behind_s.max()) if behind_s.size else np.inf
        if head.untouched and not head.overdue:
            room_s = min(room_s, self._targets.ttft_s - head.waited_s)
        return self._within(room_s, prefill, head.tokens, max(fit, 1))

    @property
    def _core_s(self) -> float:
        """Seconds of decode a core step, coda and prelude included."""
        return self._decode_s / max(self._cores, 1e-9)

    @property
    def _mean_output(self) -> float:
        """m: tokens of a request; of those that run while none has ended."""
        if self._ended:
            return self._outputs / self._ended
        return float(self._tokens.max(initial=1))

    def _within(self, room_s: float, cost: PrefillCost, head_tokens: int, prompts: int) -> PrefillLimit | None:
        """The most tokens that fit into a time; None when they are too few."""
        gamma = max(cost.gamma, 1e-12)
        most = min((room_s - cost.delta) / gamma, self._max_tokens)
        least = min(cost.delta / gamma, head_tokens, self._max_tokens)
        if most < max(least, 1.0):
            return None
        return PrefillLimit(int(most), prompts)

    def _rows_that_fit(self, rows: int, decode: DecodeForecast) -> tuple[int, float]:
        """How many more rows keep the expected ITL within the target, and that ITL with the present ones. All that there
        are when even one row alone would not keep it."""
        depth = float(decode.remaining[0])
        prompt_s = self._prefill_s / self._prompts / self._mean_output if self._prompts else 0.0
        itl_s = depth * self._core_s + rows * prompt_s
        a_row_s = depth * decode.row_s + prompt_s
        room_s = self._targets.itl_s - itl_s
        if room_s + (rows - 1) * a_row_s < 0.0:
            return self._width, itl_s
        return int(np.clip(room_s / max(a_row_s, 1e-12), -self._width, self._width)), itl_s

    def _first_tokens(self, retired: RetiredStage) -> None:
        for slot, order in retired.first_tokens:
            if self._tokens[slot]:
                self._ended = _FORGET * self._ended + 1.0
                self._outputs = _FORGET * self._outputs + float(self._tokens[slot])
            self._order[slot], self._tokens[slot] = order, 1
            self._first_s[slot] = self._last_s[slot] = retired.end_s
        self._prompts += len(retired.depths)
        if self._prompts > 4 * self._width:
            self._prompts, self._prefill_s = 0.5 * self._prompts, 0.5 * self._prefill_s
