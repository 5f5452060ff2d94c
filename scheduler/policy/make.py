"""Which policy object a configuration asks for."""

from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.policy.auto import AutoPolicy
from depthbatch.scheduler.policy.drafts import FixedDrafts, LearnedDrafts
from depthbatch.scheduler.policy.fixed import ContinuousBatching, LearnedDraftsRefill, NoRefill, Refill
from depthbatch.scheduler.policy.observed import Observed
from depthbatch.scheduler.policy.view import Policy


def make_policy(config: SchedulerConfig) -> Policy:
    """The policy of that name (common.config.POLICIES)."""
    match config.policy:
        case "cb":
            return ContinuousBatching()
        case "no-refill":
            return NoRefill()
        case "refill":
            if config.learned_drafts:
                observed = Observed(config)
                return LearnedDraftsRefill(config.min_coda_batch, LearnedDrafts(config, observed), observed)
            batch, limit = config.min_coda_batch, config.drafts
            return Refill(batch, None if limit is None else FixedDrafts(limit, batch))
        case "auto":
            return AutoPolicy(config)
    raise ValueError(f"unknown policy {config.policy}")
