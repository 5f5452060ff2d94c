"""Background work that must not fail in silence: whatever ends it unexpectedly is told to one handler, by name.

A task that nobody awaits swallows its exception, and a callback's exception is only logged; the engine would then
hang with requests in it. Knows neither what the work is nor what the handler does.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from depthbatch.common.errors import EngineDeadError
from depthbatch.common.logging import get_logger

OnFailure = Callable[[str, BaseException], None]

log = get_logger("frontend")

# A broken connection, or an answer's generator that fails while it is closed, is the trouble of one client.
_OF_ONE_CLIENT = ("protocol", "transport", "asyncgen")


class PanicError(RuntimeError):
    """In place of a panic. One request's trouble; the log has the details."""


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turns a panic, a BaseException that is neither an Exception nor one of Python's own (native libraries raise them),
    into PanicError: handlers of Exception would let it through, and whoever waits would wait for ever."""
    try:
        yield
    except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as panic:
        log.critical("%s: %s", type(panic).__name__, " ".join(str(panic).split())[:1000], exc_info=panic)
        raise PanicError(f"{type(panic).__name__}: the log of the frontend has the details") from panic


class TaskFailedError(EngineDeadError):
    """A bug: background work of this process has failed. The process ends with a status that asks for a restart."""


def failure_of(name: str, error: BaseException) -> TaskFailedError:
    """The error that every open request gets; the log gets the name of what failed and why, in one line, and the
    traceback."""
    log.critical("%s failed: %s: %s", name, type(error).__name__, " ".join(str(error).split()), exc_info=error)
    failure = TaskFailedError(f"frontend: {name} failed; its log has the details")
    failure.__cause__ = error
    return failure


def background(work: Coroutine[Any, Any, None], name: str, on_failure: OnFailure) -> asyncio.Task[None]:
    """A task whose exception goes to ``on_failure``; being cancelled is no failure."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(lambda task: check(task, on_failure))
    return task


def check(task: asyncio.Task[None], on_failure: OnFailure) -> None:
    """Tells ``on_failure`` when a finished task has failed."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        on_failure(task.get_name(), error)


def catch_the_rest(loop: asyncio.AbstractEventLoop, on_failure: OnFailure) -> None:
    """The net below the others: exceptions of callbacks, and of tasks and futures that nobody asked."""

    def handler(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None or any(key in context for key in _OF_ONE_CLIENT):
            loop.default_exception_handler(context)
            return
        task = context.get("task") or context.get("future")
        name = task.get_name() if isinstance(task, asyncio.Task) else str(context.get("message", "a callback"))
        on_failure(name, error)

    loop.set_exception_handler(handler)
