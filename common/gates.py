"""Exit gates: who decides how deep a token goes, and how late the decision takes effect (architecture, section 6)."""

from collections.abc import Collection
from enum import IntEnum

HEAD_THRESHOLD = 0.999
"""Exit threshold of trained heads in a model whose own exits are decided by distances."""


class Gate(IntEnum):
    """Exit policies. The integer is what crosses process boundaries and lies in the per-slot device tensor."""

    NONE = 0  # full depth
    FIXED = 1  # num_loops of the request
    REPLAY = 2  # recorded depth per decode token
    OWN = 3  # the model's own gate at r, the pipeline waits
    DELAYED = 4  # the model's own gate at r, exits after r + 1
    LOOKAHEAD = 5  # trained head at r predicts the exit at r + 1
    PRELOOP = 6  # depth predicted before the loop
    CONVERGENCE = 7  # distance of consecutive states at r, exits after r + 1

    @property
    def label(self) -> str:
        """The name users write."""
        return self.name.lower()

    @property
    def decides_on_device(self) -> bool:
        """True when each core step returns a decision for its rows."""
        return self in (Gate.OWN, Gate.DELAYED, Gate.LOOKAHEAD, Gate.CONVERGENCE)

    @property
    def takes_threshold(self) -> bool:
        """True when exit_threshold and min_loops of a request have a say."""
        return self.decides_on_device or self is Gate.PRELOOP

    @property
    def delay(self) -> int:
        """Loops between the step that decides and the exit: a flag at loop r means exit after loop r + delay."""
        return 0 if self is Gate.OWN else 1

    @property
    def may_exit_early(self) -> bool:
        """True when depths differ between the tokens of one request."""
        return self not in (Gate.NONE, Gate.FIXED)

    def compares_distances(self, gates: "Collection[Gate]") -> bool:
        """True when an exit threshold is a distance of states, below which a token leaves, and not a probability that is
        reached: in a model with a convergence test, of all but trained heads."""
        return Gate.CONVERGENCE in gates and self not in (Gate.LOOKAHEAD, Gate.PRELOOP)


GATE_BY_LABEL = {gate.label: gate for gate in Gate}
