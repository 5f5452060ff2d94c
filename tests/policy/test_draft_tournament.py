"""The tournament of drafts counts what an exact model says, and its best setting is close to the exact optimum. The oracle is
value iteration over an independent model (draft_chain.py)."""

from functools import cache

import numpy as np
import pytest

from depthbatch.scheduler.policy.draft_tournament import (
    SEQUENCES,
    DraftCosts,
    DraftSetting,
    DraftTournament,
    candidates,
)
from reference.draft_chain import (
    BOUNDARY,
    DRAFT,
    EXITED,
    GO_ON,
    Chain,
    ChainModel,
    DraftInstance,
    can_run,
    may_draft,
    running,
)

SPAN = 4  # lanes of a slot with at most two draft lanes
OURO = (0.0, 0.45, 0.40, 0.15)
DEEP = (0.0, 0.0, 0.2, 0.3, 0.5)
FLAT = (0.0, 1.0, 1.0, 1.0)
# weights, acceptance by depth, core row, coda, prelude (in core steps)
INSTANCES = [
    (OURO, (0.0, 0.9, 0.95, 0.97, 1.0), 0.02, 0.06, 0.01),
    (OURO, (0.0, 0.6, 0.8, 0.9, 1.0), 0.4, 0.06, 0.01),
    (FLAT, (0.0, 0.5, 0.9, 0.95, 1.0), 0.02, 0.3, 0.3),
    (DEEP, (0.0, 0.7, 0.8, 0.85, 0.9, 1.0), 0.1, 0.7, 0.5),
    (OURO, (0.0, 0.3, 0.4, 0.5, 1.0), 0.9, 0.4, 0.1),
    (
        (0.5, 0.0, 0.0, 0.0, 0.0, 0.5),
        (0.0, 0.8, 0.85, 0.9, 0.95, 0.97, 1.0),
        0.05,
        0.1,
        0.0,
    ),  # guesses exit before heads
    (DEEP, (0.0, 0.3, 0.9, 0.9, 0.9, 1.0), 0.02, 0.2, 1.0),  # most codas start nothing
]


def setting_as_policy(inst: DraftInstance, setting: DraftSetting):  # type: ignore[no-untyped-def]
    """The rules of a setting as the oracle's decisions."""

    def decide(chain: Chain, since: int) -> int:
        capped = inst._replace(lanes=setting.lanes)
        drafts = may_draft(capped, chain) and chain[-1][0] >= setting.depth
        asks = running(chain) <= setting.asks and (drafts or chain[-1][1] == EXITED)
        if not any(can_run(chain)) or ((chain[0][1] == EXITED or asks) and since >= setting.pause):
            return DRAFT if drafts else BOUNDARY
        return GO_ON

    return decide


@cache
def played(index: int, rounds: int) -> tuple[tuple[DraftSetting, ...], tuple[float, ...]]:
    """Settings, and their seconds a token as the tournament has them for one sequence."""
    weights, accept, row, coda, prelude = INSTANCES[index]
    r_max = len(weights)
    settings = candidates(2, r_max)
    tournament = DraftTournament(settings, ordered=False)
    p = np.array(weights) / sum(weights)
    depths = np.random.default_rng(1).choice(np.arange(1, r_max + 1), (SEQUENCES, 997), p=p).astype(np.int32)
    tournament.refresh(depths, np.array(accept), 1)
    for _ in range(rounds):
        tournament.play()
    return settings, tuple(tournament.seconds_per_token(DraftCosts(1.0, row, coda, prelude, 0.0, 0.0), 1).tolist())


@cache
def exact(index: int, lanes: int = 2) -> ChainModel:
    weights, accept, row, coda, prelude = INSTANCES[index]
    return ChainModel(DraftInstance(weights, accept, lanes, SPAN, 1.0, row, coda, prelude), pauses=4)


@pytest.mark.parametrize("index", range(len(INSTANCES)))
def test_tournament_counts_what_the_exact_model_says(index: int) -> None:
    """Guards the background simulation: seconds a token of every setting with drafts within 3 % of the exact ones (most of it is chance, of the depths drawn)."""
    settings, seconds = played(index, 1_500)
    for setting, each in zip(settings, seconds, strict=True):
        model = exact(index, max(setting.lanes, 0) or 2)
        want = model.seconds_per_token(setting_as_policy(model.inst, setting))
        assert each == pytest.approx(want, rel=0.03), setting


@pytest.mark.parametrize("index", range(len(INSTANCES)))
def test_best_setting_is_close_to_the_optimum(index: int) -> None:
    """Its pick costs at most 1.4 % more than any way to decide step by step; wrong picks cost 5 to 80 % more."""
    settings, seconds = played(index, 1_500)
    pick = settings[int(np.argmin(seconds))]
    model = exact(index)
    optimum = model.seconds_per_token()
    assert exact(index).seconds_per_token(setting_as_policy(model.inst, pick)) <= 1.014 * optimum
