"""Which drafts run, as a policy asks before every stage: none, a fixed number, or what ``draft_tournament`` finds best.

Learned drafts (``--speculation auto``) take fitted costs, depths seen lately, acceptance learned by draft depth and the number
of active sequences, and ask every few core steps for the best of all settings. While they are off, codas are the policy's own.

What is not in use is tried now and then, because acceptance may change with the traffic: a probe of some core steps, at another
draft depth each time, with one draft lane while drafts are off. Nothing pauses then: under a setting that pauses between codas
drafts are read deeper than it says, and what a shallow read is worth is not seen. Probes take 1 of 256 core steps.
"""

from typing import Protocol

import numpy as np

from depthbatch.common.frames import Stage
from depthbatch.scheduler.config import DraftLimit, SchedulerConfig
from depthbatch.scheduler.policy.acceptance import Acceptance
from depthbatch.scheduler.policy.draft_tournament import (
    SEQUENCES,
    DraftSetting,
    DraftTournament,
    candidates,
)
from depthbatch.scheduler.policy.observed import Observed
from depthbatch.scheduler.policy.view import Decision, QueueView

_ROUND_S = 250e-6  # about what a round of the tournament takes the scheduler,
_SETTING_S = 2e-6  # and each of its settings
_LEARNING_SHARE = 0.2  # of the device's time that rounds may take until there is a verdict,
_IMPROVING_SHARE = 0.05  # until it hardly changes any more,
_STEADY_SHARE = 0.005  # and after that
_MOST_ROUNDS = 2  # beside one core step
_REFRESH_STEPS = 32  # core steps between verdicts,
_FIRST_REFRESH_STEPS = 8  # and before the first one
_BETTER = 0.995  # of the time per token in force: a new setting must be below it
_PROBE_OUTCOMES = 16  # a probe is to bring about so many, and what was known before it counts for no more,
_PROBE_STEPS = 4  # in at least so many core steps,
_PROBE_EVERY = 256  # one of which in so many is a probe's


class Drafts(Protocol):
    """Asked by a policy whose turn it is to decide between a coda and a core step."""

    @property
    def on(self) -> bool:
        """Drafts run: codas go by ``coda`` alone."""
        ...

    @property
    def limit(self) -> DraftLimit | None:
        """What a coda may read; None while drafts are off."""
        ...

    def coda(self, view: QueueView) -> Decision | None:
        """The coda that drafts, or rows that wait for one because of drafts, make due now."""
        ...


class FixedDrafts:
    """The same limit always: a coda as soon as a draft can be read, or K rows have exited."""

    on = True

    def __init__(self, limit: DraftLimit, min_coda_batch: int = 1) -> None:
        self.limit = limit
        self._min_coda_batch = min_coda_batch
        self._coda = Decision(Stage.CODA, drafts=limit)

    def coda(self, view: QueueView) -> Decision | None:
        enough = self._min_coda_batch if view.q_r else 1
        return self._coda if view.q_c >= enough or view.asks_for_coda(self.limit) else None


class LearnedDrafts:
    """The best setting for the present load, costs and acceptance."""

    def __init__(self, config: SchedulerConfig, observed: Observed) -> None:
        self._observed = observed
        self._spare_rows = config.buckets[-1] - config.max_num_seqs
        settings = candidates(config.draft_lanes, config.r_max, config.draft_depth)
        rows_for = self._spare_rows // config.max_num_seqs
        self.tournament = DraftTournament(settings, config.coda_layers > 0, rows_for)
        self.acceptance = Acceptance(config.r_max)
        depth = next(setting.depth for setting in settings if setting.lanes)
        self._depths = sorted({setting.depth for setting in settings if setting.lanes})
        self.setting = DraftSetting(1, depth, 1, 1)  # in force; this one until there is a verdict
        self._probe: DraftSetting | None = None
        self._probes = 0
        self._next_probe = 0  # core step at which a probe begins, or ends
        self._steps = 0
        self._since_coda = 0  # core steps
        self._credit_s = 0.0

    @property
    def on(self) -> bool:
        return self._in_force.lanes > 0

    @property
    def limit(self) -> DraftLimit | None:
        lanes, depth, _, _ = self._in_force
        return DraftLimit(lanes, depth) if lanes else None

    def coda(self, view: QueueView) -> Decision | None:
        limit = self.limit
        if limit is None:  # of the last drafts some may still be on their way
            return Decision(Stage.CODA) if view.stalled else None
        if self._since_coda < self._in_force.pause and view.q_r:
            return None
        if view.q_r:
            asks = self._in_force.asks
            due = view.urgent_exits(asks) or view.drafts(limit._replace(lanes=asks))
        else:
            due = view.q_c or view.asks_for_coda(limit)
        return Decision(Stage.CODA, drafts=limit) if due else None

    def note(self, decision: Decision, view: QueueView) -> None:
        """What the policy has decided; beside a core step there is time to think."""
        if decision.stage is Stage.CODA:
            self._since_coda = 0
        elif decision.stage is Stage.CORE:
            self._since_coda += 1
            self._steps += 1
            self._think()
            if self._steps % (_REFRESH_STEPS if self.tournament.settled else _FIRST_REFRESH_STEPS) == 0:
                self._refresh(view)
            if self._steps >= self._next_probe:
                self._begin_or_end_probe(view)

    @property
    def _in_force(self) -> DraftSetting:
        return self._probe or self.setting

    def _think(self) -> None:
        share = _STEADY_SHARE if self.tournament.sure else _IMPROVING_SHARE
        if not self.tournament.settled:
            share = _LEARNING_SHARE
        round_s = _ROUND_S + _SETTING_S * len(self.tournament.settings)
        self._credit_s = min(self._credit_s + share * self._observed.core_s, _MOST_ROUNDS * round_s)
        while self._credit_s >= round_s:
            self._credit_s -= round_s
            self.tournament.play()

    def _refresh(self, view: QueueView) -> None:
        observed, active = self._observed, view.active
        self.acceptance.refresh(*view.draft_outcomes())
        observed.refit()
        depths = observed.forecast.sequences(SEQUENCES)
        self.tournament.refresh(depths, self.acceptance.by_depth, active)
        costs = observed.draft_costs()
        if costs is None or not active or not self.tournament.settled:
            return
        seconds = self.tournament.seconds_per_token(costs, active, self._spare_rows)
        best, settings = int(np.argmin(seconds)), self.tournament.settings
        if seconds[best] < _BETTER * seconds[settings.index(self.setting)]:
            self.setting = settings[best]

    def _begin_or_end_probe(self, view: QueueView) -> None:
        steps, setting = self._probe_steps(view), self.setting
        in_use = max(self._depths, key=self.acceptance.known) if setting.lanes else None
        others = [depth for depth in self._depths if depth != in_use]
        if self._probe is not None or not others or not self.tournament.settled:
            self._probe = None
            self._next_probe = self._steps + _PROBE_EVERY * steps
            return
        depth = others[self._probes % len(others)]
        self.acceptance.doubt(depth, _PROBE_OUTCOMES)
        self._probe = DraftSetting(max(setting.lanes, 1), depth, max(setting.asks, 1), 1)
        self._probes += 1
        self._next_probe = self._steps + steps

    def _probe_steps(self, view: QueueView) -> int:
        depth = max(1.0, self._observed.forecast.mean_depth)
        return max(_PROBE_STEPS, round(_PROBE_OUTCOMES * depth / max(view.active, 1)))
