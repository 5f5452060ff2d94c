"""What is learned of drafts: acceptance by draft depth."""

import numpy as np

from depthbatch.scheduler.policy.acceptance import Acceptance


def outcomes(*by_depth: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(right, wrong) by draft depth from 1, as counted from the start; r_max is one more."""
    right, wrong = np.array([(0, 0), *by_depth, (0, 0)]).T
    return right, wrong


def test_shares_are_learned_by_depth() -> None:
    acceptance = Acceptance(4)
    acceptance.refresh(*outcomes((700, 300), (800, 200), (900, 100)))
    np.testing.assert_allclose(acceptance.by_depth, [0.0, 0.7, 0.8, 0.9, 1.0], atol=0.005)


def test_only_what_is_new_counts() -> None:
    """Counts from the start, taken in twice, would weigh old outcomes twice; 200 right ones would be lost beside them."""
    acceptance = Acceptance(2)
    acceptance.refresh(*outcomes((0, 200)))
    acceptance.refresh(*outcomes((200, 200)))
    acceptance.refresh(*outcomes((200, 200)))
    assert 0.5 < acceptance.by_depth[1] < 0.6


def test_old_outcomes_are_forgotten() -> None:
    """Traffic whose drafts have become wrong: after 3,000 of these the 3,000 right ones before weigh 5 %."""
    acceptance = Acceptance(2)
    for right, wrong in ((3_000, 0), (3_000, 3_000)):
        acceptance.refresh(*outcomes((right, wrong)))
    assert acceptance.by_depth[1] < 0.06


def test_acceptance_never_falls_with_depth() -> None:
    """Few outcomes say otherwise by chance: they are pooled by weight."""
    acceptance = Acceptance(4)
    acceptance.refresh(*outcomes((900, 100), (3, 3), (950, 50)))
    by_depth = acceptance.by_depth
    assert (np.diff(by_depth) >= 0).all()
    assert abs(by_depth[1] - 0.9) < 0.01 and abs(by_depth[2] - 0.9) < 0.02 and abs(by_depth[3] - 0.95) < 0.01


def test_an_untried_depth_lies_between_its_neighbours() -> None:
    """Depth 2 was never read: without a prior it would be 0 or unknown, and never tried. Depth 1 is bad for sure, so depth 2
    stays attractive until it is tried; a good depth 1 lifts it."""
    bad, good = Acceptance(8), Acceptance(8)
    none = [(0, 0)] * 5
    bad.refresh(*outcomes((300, 700), (0, 0), *none))
    good.refresh(*outcomes((960, 40), (0, 0), *none))
    assert bad.by_depth[1] < 0.35 and bad.by_depth[2] > 0.8
    assert good.by_depth[2] >= good.by_depth[1] > 0.94


def test_doubt_makes_room_for_new_outcomes() -> None:
    """What was switched off as wrong a thousand times is believed after a few right outcomes, and few outcomes are kept."""
    acceptance = Acceptance(2)
    acceptance.refresh(*outcomes((0, 1_000)))
    acceptance.doubt(1, 16)
    acceptance.refresh(*outcomes((16, 1_000)))
    assert 0.45 < acceptance.by_depth[1] < 0.6
    fresh = Acceptance(2)
    fresh.refresh(*outcomes((4, 0)))
    fresh.doubt(1, 16)
    fresh.refresh(*outcomes((4, 4)))
    assert 0.66 < fresh.by_depth[1] < 0.7  # 4 right, 4 wrong, and the prior
