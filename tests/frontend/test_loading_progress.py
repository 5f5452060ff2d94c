"""Loading says how far it is: on a terminal as a bar that goes away, elsewhere as a line now and then."""

import io
from pathlib import Path

import pytest
from safetensors import safe_open

from depthbatch.frontend import loading_progress
from depthbatch.frontend.loading_progress import LoadingProgress
from depthbatch.worker.models.loader import load_model
from reference.oracle import OURO

GIB = 1 << 30


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal() -> None:
    """Bug: 18 s of silence while 1.4 B parameters were read."""
    terminal = Terminal()
    progress = LoadingProgress("m", terminal)
    for quarter in range(1, 5):
        progress(quarter * GIB, 4 * GIB)
    shown = terminal.getvalue()
    assert "loading m" in shown and "4.29G" in shown and "\n" not in shown
    progress.close()
    progress.close()
    assert terminal.getvalue().endswith("\r")  # the line is free again


@pytest.mark.parametrize(("quarter", "size"), [(GIB, "4.0 GiB"), (GIB // 2048, "2.0 MiB")])
def test_lines_elsewhere(quarter: int, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One each two seconds, none for what is loaded sooner, however long the processes take to start (bug: a line for a
    demo of 1 MB). Bug: a small model that loads slowly was "40% of 0.0 GiB"."""
    now = [90.0]
    monkeypatch.setattr(loading_progress.time, "monotonic", lambda: now[0])
    log = io.StringIO()
    progress = LoadingProgress("m", log)
    for second in range(6):
        now[0] = 100.0 + second
        progress(second * quarter // 2, 4 * quarter)
    progress.close()
    assert log.getvalue().splitlines() == [
        f"depthbatch: loading m: 25% of {size}",
        f"depthbatch: loading m: 50% of {size}",
    ]


def test_what_is_told_are_the_bytes_of_the_checkpoint() -> None:
    """From the first tensor to the last, whatever their types."""
    told: list[tuple[int, int]] = []
    load_model(str(OURO), progress=lambda done, total: told.append((done, total)))
    total = 0
    for file in Path(OURO).glob("model*.safetensors"):
        with safe_open(file, "pt") as tensors:
            total += sum(tensors.get_tensor(name).nbytes for name in tensors.keys())  # noqa: SIM118
    assert told == sorted(told) and {of for _, of in told} == {total} and told[-1] == (total, total)
