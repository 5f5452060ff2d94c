"""The auto policy with drafts, inside the real scheduler core in virtual time."""

import numpy as np
import pytest

from depthbatch.worker.simulated import find_profile
from fakes.simulated_drafts import decode

OURO = find_profile("h100-ouro-1.4b")
OURO_EXITS = {2: 0.45, 3: 0.40, 4: 0.15}


@pytest.mark.parametrize(("sequences", "gain"), [(1, 2.0), (8, 1.8)])
def test_auto_runs_a_fixed_number_of_drafts(sequences: int, gain: float) -> None:
    """Nine drafts in ten are right. A policy that does not ask for drafts runs at 1.0, one that lets exited rows wait for
    others before it reads drafts below the gain."""
    accept = np.full(5, 0.9)
    plain = decode(OURO, sequences, OURO_EXITS, accept)
    drafts = decode(OURO, sequences, OURO_EXITS, accept, draft_lanes=4)
    assert drafts.tokens_per_s > gain * plain.tokens_per_s
    assert drafts.right > 5 * drafts.wrong > 0


def test_a_stage_of_more_rows_than_slots_is_observed() -> None:
    """Lanes of a chain are rows of one stage: a table of buckets that ends at W raises on the first of them."""
    assert decode(OURO, 1, {4: 1.0}, np.ones(5), draft_lanes=3).wrong == 0
