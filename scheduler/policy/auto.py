"""The policy ``auto``: coda now or after another core step, prefill now or later, by measured cost (scheduling.md).

What it maximises (``--objective``):

* ``throughput``: tokens per second in steady state, and while no request waits for a slot the p99 of normalized latency.
* ``latency``: keeps the ITL target between any two tokens and has as low a TTFT as that allows; where TTFT passes its own
  target, both give way in the same proportion.
* ``goodput``: tokens per second of the requests that keep both targets (TTFT, and the mean of their ITL). Requests that
  can no longer keep theirs are served when nothing else waits.

Throughput splits into two decisions that share one cost model, fitted online:

* coda + prelude: the optimal stopping rule of ``coda_timing``, whose one number theta is chosen by a tournament that is
  played in the background on the depths seen lately. Until that has a result, theta follows from the economic order
  quantity; until costs are known, theta is 0 (coda at once, K = 1). Where no request waits for a slot the tail of normalized
  latency takes the place of throughput: there rows count by how late their requests are, and a tournament of its own, of as many
  rows as run, finds theta (``coda_timing``).
* prefill: it has a fixed cost, delta_prefill, to be shared by the f free slots it fills; an empty slot wastes
  kappa = (delta_core + codas a step * boundary_delta) / W a core step. With phi slots falling free a core step the
  economic order quantity is the S of the least

      delta_prefill ceil(S L / M) / S + kappa S / (2 phi)

  a prompt, with prompts of L tokens in batches of M, the last one cut where a batch is full: sqrt(2 delta_prefill phi /
  kappa) as long as they fit into one batch. Until known: the configured S. S may be W, with which one long answer keeps
  every prompt out: then phi falls with each core step, and S with it, so that they wait for about eight prefills at most.
* prefill while slots are free and no coda is about to run (arrivals below saturation): it takes a prelude of its own,
  delta_prelude + gamma for all, where the one after the next coda would take gamma more, and its rows run out of step
  from then on. Waiting costs each of them the core steps until that coda. That is the bargain of a row that waits for
  coda, so a prompt that could be prefilled counts as one in the stopping rule, at the same price theta: both wait, or
  coda (if rows wait for it), prefill and one prelude run. Where boundary stages are cheap theta is 0 and nothing waits.
  No row enters Q_R meanwhile, as that takes a prelude, so Q_R is empty within r_max core steps; beside an empty Q_R
  nothing waits. Under targets prompts do not wait for this, as it would be at the cost of TTFT.

The other objectives take these decisions too, but ``prefill_pacing`` says whether and how much prefill may run.
Coda is timed alike under all three: with a given number of rows mean ITL = rows / tokens per second.

Prefill is tried between coda and prelude, so that new rows and returning rows share one prelude.

With drafts (``--speculation``) codas are due when these ask for one, and take all rows that wait along (drafts.py); theta
decides while learned drafts are off.

No constant here belongs to a model or device. Approximation: see ``coda_timing``; the steps that fill slots and those
that empty queues at the end of a workload are treated like steady state. Decisions use lookahead only: recorded depths
beyond the next core step are not looked at, although a replayed request would give them away.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from depthbatch.common.frames import Stage
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.policy.coda_timing import LARGEST_GAME, FloatArray, Tournament, defer, first_guess, lateness
from depthbatch.scheduler.policy.cost_model import DecodeCosts
from depthbatch.scheduler.policy.drafts import Drafts, FixedDrafts, LearnedDrafts
from depthbatch.scheduler.policy.exit_forecast import ExitForecast
from depthbatch.scheduler.policy.fixed import CODA, CORE, PREFILL, PRELUDE
from depthbatch.scheduler.policy.observed import Observed
from depthbatch.scheduler.policy.prefill_pacing import DecodeForecast, LatencyTargets, Pacing, PrefillCost
from depthbatch.scheduler.policy.view import Decision, QueueView, RetiredStage
from depthbatch.scheduler.rows import SlotArray

_REFRESH_STEPS = 32  # core steps between refits; in the beginning also after 8 and 16
_ROUND_S = 60e-6  # about what a round of the tournament takes the scheduler,
_CALM_ROUND_S = 120e-6  # and where rows count by how late they are
_LEARNING_SHARE = 0.1  # of the device's time that rounds may take until there is a verdict,
_STEADY_SHARE = 0.005  # and after that
_MOST_ROUNDS = 4  # beside one core step
_FORGET = 0.5  # of the flow counts, whenever they cover _FLOW_WIDTHS widths of finished requests
_FLOW_WIDTHS = 4


class AutoPolicy:
    """Learns from retired stages and decides from queue sizes, known exits and hazards."""

    full_depth = False
    learns = True

    def __init__(self, config: SchedulerConfig) -> None:
        width = config.max_num_seqs
        self._observed = observed = Observed(config)
        self.learned_drafts = LearnedDrafts(config, observed) if config.learned_drafts else None
        self._drafts: Drafts | None = self.learned_drafts
        if config.drafts is not None:
            self._drafts = FixedDrafts(config.drafts, config.min_coda_batch)
        self._max_batched_tokens = config.max_num_batched_tokens
        self.costs, self.forecast = observed.costs, observed.forecast
        self._games = _Games(width, self.forecast, observed.bucket_of)
        self._progress = _Progress(width)
        self._crowded = False  # requests wait for a slot, or did when the latest ones came
        self._backlog = False  # some have waited for a slot since the queue was empty
        self._flow = _Flow(width)
        self.theta = 0.0  # row-places, the price of serving one token
        self.min_free_slots = config.min_free_slots  # S in force
        self._core_steps = 0
        self._credit_s = 0.0  # time that rounds of the tournament may take
        self._pacing: Pacing | None = None  # of prefill, under targets
        if config.objective != "throughput":
            targets = LatencyTargets(config.ttft_target_s, config.itl_target_s)
            self._pacing = Pacing(config.objective, targets, width, config.max_num_batched_tokens)
        self._decode = DecodeForecast(self.forecast.remaining(), 0.0)

    def choose(self, view: QueueView, now: float) -> Decision | None:
        """The next decision; None when nothing can run."""
        decision = self._decide(view, now)
        if self.learned_drafts is not None and decision is not None:
            self.learned_drafts.note(decision, view)
        return decision

    def _decide(self, view: QueueView, now: float) -> Decision | None:
        prefill = self._prefill(view, now)
        if prefill is not None and prefill.stage is None:
            return prefill
        self._watch_queue(view, prefill is not None)
        if view.q_d:
            return prefill or PRELUDE
        may_wait = prefill is not None and self._pacing is None
        waiting = view.q_c + (max(1, min(view.q_p, view.free_slots)) if may_wait else 0)
        if self._drafts is not None:
            if (coda := self._drafts.coda(view)) is not None:
                return coda if may_wait else prefill or coda
            if self._drafts.on:
                waiting, may_wait = 0, False
        if waiting and not (view.q_r and self._defers(view, waiting, now)):
            return CODA if view.q_c else prefill
        if prefill is not None and not may_wait:
            return prefill
        if not view.q_r:
            return None
        self._core_steps += 1
        self._think(view)
        return CORE

    def _watch_queue(self, view: QueueView, may_prefill: bool) -> None:
        """Once requests wait for a slot, throughput counts until one comes that does not: what is left of a backlog is served
        as it was."""
        waiting = view.q_p
        if waiting and (waiting > view.free_slots or not may_prefill):
            self._backlog = self._crowded = True
        elif not waiting:
            self._backlog = False
        elif not self._backlog:
            self._crowded = False

    def observe(self, retired: RetiredStage) -> None:
        """A stage has retired."""
        cost_s = self._observed.add(retired)
        self._flow.add(retired)
        self._progress.add(retired)
        if self._pacing is not None:
            self._pacing.observe(retired, cost_s)

    def _defers(self, view: QueueView, waiting: int, now: float) -> bool:
        if self.theta <= 0.0:
            return False
        ready, running = view.ready_rows(), None
        held = float(waiting)
        if not self._crowded:
            counts = self._lateness(view, waiting - view.q_c, now)
            running, held = counts[: view.q_r], float(counts[view.q_r :].sum())
        if view.informed:
            stays = ~ready.leaving
            inside = None if running is None else running[stays]
            exits = np.bincount(ready.loops[stays], inside, self.forecast.r_max + 1) @ self.forecast.stay
            exits[0] += np.count_nonzero(ready.leaving) if running is None else running[ready.leaving].sum()
        else:
            exits = np.bincount(ready.loops, running, self.forecast.r_max + 1) @ self.forecast.blind
        return defer(self.theta, held, exits)

    def _lateness(self, view: QueueView, prompts: int, now: float) -> FloatArray:
        """[q_r + q_c + prompts]: what rows and prompts that wait count. A prompt is neither late nor early: slot 0 has no tokens."""
        of_none = np.zeros(prompts, np.intp)
        ready, exited = view.ready_owners(), view.exited_owners()
        slots = np.concatenate([ready.slots, exited.slots, of_none])
        order = np.concatenate([ready.order, exited.order, of_none])
        return lateness(*self._progress.of(slots, order, now))

    def _prefill(self, view: QueueView, now: float) -> Decision | None:
        """The prefill that may run now, or a lost prompt to be set back before that can be said; None for neither."""
        pacing = self._pacing
        if pacing is None:
            return PREFILL if view.can_prefill(self.min_free_slots) else None
        known = self.costs.prefill_delta
        cost = None if known is None else PrefillCost(known, self.costs.prefill_gamma)
        lost = pacing.lost_prompt(view, now, cost)
        if lost is not None:
            return Decision(None, set_back=lost)
        limit = pacing.limit(view, now, self.min_free_slots, cost, self._decode)
        return None if limit is None else Decision(Stage.PREFILL, limit)

    def _think(self, view: QueueView) -> None:
        """What is done beside a core step: a round of the tournament, and now and then a refit."""
        game = self._games.present
        share = _STEADY_SHARE if game.settled else _LEARNING_SHARE
        round_s = _ROUND_S if self._crowded else _CALM_ROUND_S
        self._credit_s = min(self._credit_s + share * self._observed.core_s, _MOST_ROUNDS * round_s)
        while self._credit_s >= round_s:
            self._credit_s -= round_s
            game.play(view.informed)
        if self._core_steps % _REFRESH_STEPS == 0 or self._core_steps in (8, 16):
            self._refresh(view)

    def _refresh(self, view: QueueView) -> None:
        self._observed.refit()
        length, variance = self._progress.length, self._progress.variance
        self._games.choose(None if self._crowded else view.active, self.costs.decode, length)
        if self._pacing is not None:
            row_s = self.costs.row_seconds(self._observed.context, self.forecast.mean_depth)
            self._decode = DecodeForecast(self.forecast.remaining(), row_s)
        costs = self.costs.decode
        if costs is None:
            return
        core, boundary = costs.core_delta, costs.boundary_delta
        best = self._games.best(costs, length, variance, self.theta)
        self.theta = first_guess(core, boundary, self.forecast.mean_depth) if best is None else best
        if self.costs.prefill_delta is not None:
            batch = self._flow.prefill_batch(core, boundary, self.costs.prefill_delta, self._max_batched_tokens)
            self.min_free_slots = self.min_free_slots if batch is None else batch


class _Games:
    """Tournaments by load: of W rows where requests wait for a slot, else of as many as run, down to a power of two, where rows
    count by how late they are."""

    def __init__(self, width: int, forecast: ExitForecast, bucket_of: Sequence[int]) -> None:
        self._width, self._forecast, self._bucket_of = width, forecast, bucket_of
        self._crowded = self.present = Tournament(width, forecast, bucket_of)
        self._by_rows: dict[int, Tournament] = {}

    def choose(self, active: int | None, costs: DecodeCosts | None, length: float) -> None:
        """The game of so many sequences, None = requests wait; it takes the latest depths, costs and tokens of a request."""
        self.present = self._crowded if active is None else self._calm(active)
        self.present.refresh(costs, length)

    def _calm(self, active: int) -> Tournament:
        rows = self._width if active >= min(self._width, LARGEST_GAME) else 1 << max(active, 1).bit_length() - 1
        if rows not in self._by_rows:
            self._by_rows[rows] = Tournament(rows, self._forecast, self._bucket_of, by_lateness=True)
        return self._by_rows[rows]

    def best(self, costs: DecodeCosts, length: float, variance: float, theta: float) -> float | None:
        """The verdict of the present game, or of the crowded one where that has none."""
        best = None
        if self.present is not self._crowded:
            best = self.present.best_tail(costs, length, variance, theta)
        return self._crowded.best(costs) if best is None else best


class _Progress:
    """How far requests are, by slot, and what has become of those whose slot another one has taken since: how many tokens they
    came to, and how far their seconds per token were apart."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._order = np.full(width + 1, -1, np.int64)  # whose figures these are
        self._first_s = np.zeros(width + 1)  # when its first token came
        self._last_s = np.zeros(width + 1)  # and its latest one
        self._tokens = np.zeros(width + 1, np.int64)  # since the first
        self._ended = np.zeros(4)  # how many, and their sums of 1 / n, of seconds a token L and of L^2, with forgetting

    def add(self, retired: RetiredStage) -> None:
        """Counts a retired stage."""
        if retired.stage is Stage.CODA:
            np.add.at(self._tokens, retired.slots, 1)
            self._last_s[retired.slots] = retired.end_s
        elif retired.stage is Stage.PREFILL:
            for slot, order in retired.first_tokens:
                if tokens := int(self._tokens[slot]):
                    per_token = float(self._last_s[slot] - self._first_s[slot]) / tokens
                    self._ended += (1.0, 1.0 / tokens, per_token, per_token * per_token)
                self._order[slot], self._tokens[slot], self._first_s[slot] = order, 0, retired.end_s
            if self._ended[0] > _FLOW_WIDTHS * self._width:
                self._ended *= _FORGET

    def of(
        self, slots: SlotArray, order: npt.NDArray[np.int64], now: float
    ) -> tuple[FloatArray, npt.NDArray[np.int64]]:
        """Seconds since the first token, and tokens given since, of the requests that have these slots; 0 tokens where they are
        not known."""
        known = self._order.take(slots) == order
        return now - self._first_s.take(slots), self._tokens.take(slots) * known

    @property
    def length(self) -> float:
        """1 / E[1 / n], of requests of n tokens; inf before one has ended."""
        return float(self._ended[0] / self._ended[1]) if self._ended[0] else np.inf

    @property
    def variance(self) -> float:
        """Of seconds a token, over requests."""
        requests, _, sum_s, squares = self._ended / max(float(self._ended[0]), 1.0)
        return max(0.0, float(squares - sum_s * sum_s)) if requests else 0.0


class _Flow:
    """How many stages, tokens and requests pass, with forgetting."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._cores = self._codas = self._admitted = self._prompt_tokens = 0.0

    def add(self, retired: RetiredStage) -> None:
        """Counts a retired stage. Prefills before the first coda fill an empty engine and are not counted."""
        if retired.stage is Stage.CORE:
            self._cores += 1
        elif retired.stage is Stage.CODA:
            self._codas += 1
        elif retired.stage is Stage.PREFILL and self._codas:
            self._admitted += len(retired.depths)
            self._prompt_tokens += retired.tokens
            if self._admitted > _FLOW_WIDTHS * self._width:
                for name in ("_cores", "_codas", "_admitted", "_prompt_tokens"):
                    setattr(self, name, _FORGET * getattr(self, name))

    def prefill_batch(self, core: float, boundary: float, prefill: float, max_tokens: int) -> int | None:
        """S by the economic order quantity (deltas in seconds); None before requests enough have passed."""
        if self._admitted < self._width or not self._cores:
            return None
        per_step = self._admitted / self._cores
        wasted = (core + boundary * self._codas / self._cores) / self._width
        sizes = np.arange(1.0, self._width + 1.0)
        batches = np.ceil(sizes * self._prompt_tokens / (self._admitted * max_tokens))
        return 1 + int(np.argmin(prefill * batches / sizes + wasted * sizes / (2.0 * per_step)))
