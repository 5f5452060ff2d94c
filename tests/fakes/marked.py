"""Runs commands whose whole family of processes can be found afterwards: an environment variable marks them all."""

import os
import subprocess
import sys
import time
import uuid
from contextlib import nullcontext
from pathlib import Path

VARIABLE = "TESTS_OF_DEPTHBATCH_FAMILY"


class Family:
    """The processes that one test has started, children and grandchildren included."""

    def __init__(self, tmp_path: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.environment = {
            **os.environ,
            VARIABLE: self.mark,
            "XDG_RUNTIME_DIR": "",
            "TMPDIR": str(tmp_path),  # run directories go here
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *words: str, stdout: str | None = None, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
        """``depthbatch WORDS`` with pipes, or its output to the file ``stdout``, its errors to the descriptor."""
        with open(stdout, "w") if stdout else nullcontext(subprocess.PIPE) as out:
            return subprocess.Popen(
                [sys.executable, "-m", "depthbatch", *words],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=stderr,
                text=True,
            )

    def alive(self) -> list[int]:
        """Process ids of the family that are running (zombies are not), by a scan of /proc."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if f"{VARIABLE}={self.mark}".encode() in environment and state != "Z":
                found.append(int(entry.name))
        return found

    def gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True
