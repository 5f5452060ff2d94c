"""What a learning policy makes of stages that have retired: costs, and when rows exit."""

from collections.abc import Sequence

from depthbatch.common.frames import Stage
from depthbatch.scheduler.config import SchedulerConfig, bucket_table
from depthbatch.scheduler.policy.cost_model import StageCosts
from depthbatch.scheduler.policy.draft_tournament import DraftCosts
from depthbatch.scheduler.policy.exit_forecast import ExitForecast
from depthbatch.scheduler.policy.view import RetiredStage

_FORGET_WAIT = 0.95  # of the mean, a coda


class Observed:
    """Costs and forecast, from stages in order."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.bucket_of: Sequence[int] = bucket_table(config.buckets, config.buckets[-1])
        self.costs = StageCosts()
        self.forecast = ExitForecast(config.max_num_seqs, config.r_max)
        self.core_s = 0.0  # of the latest core step
        self.context = 0.0  # tokens a row, in the latest core step
        self.wait_s = 0.0  # mean loss with a coda that says which guesses are right
        self._runs_ahead = config.max_stages_in_flight > 1
        self._last_end_s: float | None = None  # of the latest stage, on the worker's clock
        self._awaited = False  # was the latest stage
        self._added = False

    def add(self, retired: RetiredStage) -> float:
        """A stage has retired; returns its cost in seconds. A stage costs what the worker waited for it, too, while there
        was work: that is how the price of a message per stage gets into the decision where stages are not queued ahead.
        Where they are, what is lost with a coda's result is a cost of drafts, and no stage's. Nor are copies of preempted K/V: the
        next prefill may have none."""
        start_s, end_s = retired.start_s, retired.end_s
        waited_since_s = start_s
        if not retired.after_no_work and self._last_end_s is not None:
            waited_since_s = self._last_end_s + retired.moved_s
        if self._awaited and self._runs_ahead:
            waited_since_s = start_s
        if retired.verdict_s is not None and self._runs_ahead:
            self.wait_s += (1.0 - _FORGET_WAIT) * (retired.verdict_s - self.wait_s)
        self._last_end_s = end_s
        self._added = True
        self._awaited = retired.awaited
        rows = retired.rows
        self.costs.add(retired.stage, rows, self.bucket_of[rows], retired.tokens, end_s - waited_since_s)
        if retired.stage is Stage.CORE:
            self.core_s = end_s - start_s
            self.context = retired.tokens / max(rows, 1)
        elif retired.stage is Stage.CODA:
            self.forecast.add(retired.slots, retired.depths)
        return end_s - waited_since_s

    def refit(self) -> None:
        """Takes in what was added since."""
        if self._added:
            self._added = False
            self.costs.refit()
            self.forecast.refresh()

    def draft_costs(self) -> DraftCosts | None:
        """At the present context; None before costs are known."""
        rows = self.costs.row_costs(self.context)
        core, coda, prelude = (self.costs.delta(stage) for stage in (Stage.CORE, Stage.CODA, Stage.PRELUDE))
        if rows is None or core is None or coda is None or prelude is None:
            return None
        return DraftCosts(core, rows.core, coda, prelude, rows.coda, rows.prelude, self.wait_s)
