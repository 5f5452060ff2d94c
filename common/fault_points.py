"""Named places where a test may make a process fail. In production ``hook`` is None, and nothing happens at any of them.

A test starts a process through a program of its own (tests/fakes/faults.py), which sets ``hook`` and then runs the real
one. No option, message or environment variable reaches the hook.
"""

from collections.abc import Callable

POINTS = {
    "worker.load": "before the device is built",
    "worker.kv_memory": "before the KV memory is taken; about: the plan",
    "worker.stage": "before a stage is launched; about: its header and frame",
    "worker.result": "before a result is sent; about: the result",
    "scheduler.dispatch": "before a stage is sent to the worker; about: the stage",
    "scheduler.publish": "before tokens go to their frontends; about: the events",
}

hook: Callable[[str, object], None] | None = None  # (point, what it is about)


def reach(point: str, about: object = None) -> None:
    """Called at each point, every time."""
    if hook is not None:
        hook(point, about)
