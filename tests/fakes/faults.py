"""The real scheduler and worker as child processes in which faults strike at named points (common/fault_points.py).

In a test, ``install(monkeypatch, folder, Fault(...), ...)`` before the engine is started. As a program (``faults.py PLAN
NAME ...``) it sets the hook, then becomes ``depthbatch.NAME``.
"""

import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from depthbatch.common import fault_points
from depthbatch.common.frames import Stage
from depthbatch.frontend.processes import Launcher

if TYPE_CHECKING:
    import pytest  # not in the children


class Fault(msgspec.Struct, frozen=True):
    """What happens at a point. It strikes ``times`` times at most, in all lives of the process together.

    ``do``: kill, exit, stop (SIGSTOP), deadlock, MemoryError or the name of a torch error. ``after``: how often each
    process passes the point before. ``token`` and ``position``: only at a stage with that token in its prefill, or with
    a row at that position.
    """

    point: str
    do: str
    after: int = 0
    times: int = 1
    token: int | None = None
    position: int | None = None

    def concerns(self, about: Any) -> bool:
        if self.token is None and self.position is None:
            return True
        header, frame = about[:2]  # of a stage, before its parameters
        if header.stage == Stage.PREFILL:
            tokens = frame[4 * header.rows :][: header.n_tokens]
            return self.token is not None and self.token in tokens
        positions = frame.reshape(-1, header.bucket)[1, : header.rows]
        return self.position is not None and self.position in positions


class _Plan(msgspec.Struct):
    folder: str  # where strikes are noted, by files
    faults: list[Fault]
    armed: str = ""  # nothing strikes, or counts, before this file exists


class Faults:
    """The faults of one engine, seen by its test."""

    def __init__(self, folder: Path, faults: tuple[Fault, ...], armed: Path | None = None) -> None:
        assert all(fault.point in fault_points.POINTS for fault in faults)
        self.folder = folder
        self.plan = _Plan(str(folder), list(faults), str(armed or ""))

    @property
    def struck(self) -> int:
        return len(list(self.folder.glob("struck-*")))


def install(patch: "pytest.MonkeyPatch", folder: Path, *faults: Fault, armed: Path | None = None) -> Faults:
    """Launchers of this test start processes in which these faults strike, once the file ``armed`` is there, if one is
    named. ``folder``: an empty one."""
    installed = Faults(folder, faults, armed)
    plan = msgspec.json.encode(installed.plan).decode()
    patch.setattr(Launcher, "program", staticmethod(lambda name: [sys.executable, "-P", __file__, plan, name]))
    return installed


def _strike(do: str) -> None:
    match do:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(7)
        case "deadlock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "MemoryError":
            raise MemoryError
        case _:
            import torch

            raise getattr(torch, do)("out of memory: a test asks for it")


def main() -> None:
    plan = msgspec.json.decode(sys.argv[1], type=_Plan)
    passed = [0] * len(plan.faults)

    def hook(point: str, about: object) -> None:
        if plan.armed and not os.path.exists(plan.armed):
            return
        for index, fault in enumerate(plan.faults):
            if fault.point != point or not fault.concerns(about):
                continue
            passed[index] += 1
            if passed[index] <= fault.after:
                continue
            for strike in range(fault.times):
                try:
                    (Path(plan.folder) / f"struck-{index}-{strike}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                _strike(fault.do)
                break

    fault_points.hook = hook
    name = sys.argv[2]
    del sys.argv[1:3]
    runpy.run_module(f"depthbatch.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
