"""How long a program that dies again and again waits before it starts: more than a few restarts a minute do not help."""

import time
from pathlib import Path

import msgspec

from depthbatch.deploy.supervise.run_files import write_file
from depthbatch.frontend.restarts import MAX_RESTARTS, RESTART_WINDOW_S

FIRST_WAIT_S = 1.0
MOST_WAIT_S = 60.0


class Faults(msgspec.Struct, forbid_unknown_fields=True):
    """The last faults of one program, each followed by a start. Monotonic seconds, which all processes share."""

    times_s: list[float] = []  # ascending; of the start, which is the fault and the wait after it
    wait_s: float = 0.0  # after the last one

    def with_one(self, now_s: float) -> "Faults":
        """With a fault that has just come. The start waits from the sixth within a minute on; as long as no run survives
        for a minute, each time twice as long as the time before, up to MOST_WAIT_S."""
        recent = [each for each in self.times_s if now_s - each < RESTART_WINDOW_S]
        wait_s = 0.0
        if recent and self.wait_s:
            wait_s = min(MOST_WAIT_S, 2 * self.wait_s)
        elif len(recent) >= MAX_RESTARTS:
            wait_s = FIRST_WAIT_S
        return Faults([*recent, now_s + wait_s], wait_s)


def book_fault(run_dir: Path, name: str) -> float:
    """Notes that a program starts after a fault; returns the seconds that it has to wait before."""
    path = run_dir / f"{name}.recent"
    try:
        faults = msgspec.json.decode(path.read_bytes(), type=Faults)
    except (OSError, msgspec.MsgspecError):
        faults = Faults()
    faults = faults.with_one(time.monotonic())
    write_file(path, msgspec.json.encode(faults).decode())
    return faults.wait_s
