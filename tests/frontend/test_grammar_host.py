"""The process that grammars are compiled in, and those of its matchers: whatever one of them does, the owner goes on, and
nothing is left of them."""

import itertools
import os
import sys
import time
from typing import Any

import pytest

from depthbatch.common.grammar_host import GrammarError, GrammarHost
from depthbatch.common.grammar_limits import TOKENS_A_STEP
from depthbatch.common.messages import GrammarStart
from depthbatch.worker.sampling.grammar_matchers import Grammars
from fakes.grammars import allowed, failures_of, matchers_of, text_of
from fakes.serving_engine import demo_host


def demo_host_arguments() -> tuple[Any, int, tuple[int, ...]]:
    arguments = demo_host()._arguments
    return arguments[0], int(arguments[1]), tuple(map(int, arguments[2:]))


def test_nothing_is_left_of_a_host() -> None:
    """Matchers end with their owner's connection, the host with its owner: a worker that is killed leaves no processes."""
    host = GrammarHost(*demo_host_arguments())
    host.wait_ready()
    matcher = host.matcher("regex:[0-9]{3}")
    assert matcher.mask(time.monotonic() + 60) is not None
    assert host._process is not None and host._control is not None
    children = matchers_of(host)
    assert len(children) == 1
    matcher._connection.close()
    host._control.close()  # what the kernel does for a process that has been killed
    assert host._process.wait(60) == 0
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{children[0]}") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{children[0]}")


FAULTY = """
import os, signal, sys, time
from depthbatch.common import grammar_program
class Faulty(grammar_program.Matcher):
    def __init__(self, tokenizer, grammar):
        super().__init__(tokenizer, "regex:" + (grammar.split() + ["[0-9]{3}"])[2])
        self.fault = grammar
        if grammar.startswith("compile "):
            self.fail()
    def consume(self, tokens):
        super().consume(tokens)
        self.fail(max(1, len(tokens) / 64))
    def fail(self, parts=1):
        kind, kept = self.fault.split()[1], []
        if kind == "panics":
            raise BaseException("a panic")
        if kind == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        spent = time.process_time()
        while kind != "works" or time.process_time() < spent + 0.1 * parts:
            if kind == "fills":
                kept.append(bytearray(1 << 20))
grammar_program.Matcher = Faulty
grammar_program.COMPILE_CPU_S = grammar_program.STEP_CPU_S = 60.0 if {fill} else 0.2
grammar_program.main(sys.argv[1:])
"""


@pytest.mark.parametrize("when", ["compile", "step"])
@pytest.mark.parametrize("fault", ["spins", "fills", "crashes", "panics"])
def test_a_matchers_fault_is_contained(monkeypatch: pytest.MonkeyPatch, fault: str, when: str) -> None:
    """Each limit by itself, at each of the two moments when there are any: a loop without end is ended by its CPU time,
    memory by its own limit, long before the owner's deadline; a crash and a panic are noticed at once. Another matcher
    of the same host, made before, goes on."""
    code = FAULTY.replace("{fill}", str(fault == "fills"))
    monkeypatch.setattr(GrammarHost, "program", staticmethod(lambda: [sys.executable, "-c", code]))
    host = GrammarHost(*demo_host_arguments())
    host.wait_ready()
    other = host.matcher("never never")
    deadline = time.monotonic() + 50
    matcher = host.matcher(f"{when} {fault}")
    with pytest.raises(GrammarError, match="CPU time or 128 MiB, or crashed"):
        matcher.mask(deadline)
        matcher.tell([20])
        matcher.mask(deadline)
    assert other.mask(deadline) is not None
    host.close()


def test_what_a_matcher_said_last_is_told() -> None:
    """Bug: a text that its grammar does not allow was "a token took more than ... of CPU time, or crashed" to an owner that
    told more tokens before it read the answer: the matcher had said why and ended. Its words are told whichever call
    finds it gone, also behind answers that nobody has read, and where it left what it was sent last unread."""
    host = GrammarHost(*demo_host_arguments())
    host.wait_ready()
    for read_first, tokens in itertools.product((True, False), ([[5, 5]], [[5, 5], [20]], [[20], [5]], [[5]] * 40)):
        matcher, deadline = host.matcher("regex:[0-9]{3}"), time.monotonic() + 50
        assert not read_first or matcher.mask(deadline) is not None
        with pytest.raises(GrammarError, match="doesn't satisfy the grammar"):
            for each in tokens:
                matcher.tell(each)
            pids = matchers_of(host)
            while any(os.path.exists(f"/proc/{pid}") for pid in pids):
                time.sleep(0.005)
            matcher.tell([20])
            matcher.mask(deadline)
        matcher.close()
    host.close()


def test_limits_of_cpu_time_are_each_steps_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text takes more than one step's time in all: three steps of 0.1 s where a step has 0.2 s."""
    code = FAULTY.replace("{fill}", "False")
    monkeypatch.setattr(GrammarHost, "program", staticmethod(lambda: [sys.executable, "-c", code]))
    host = GrammarHost(*demo_host_arguments())
    host.wait_ready()
    matcher = host.matcher("compile works")
    deadline = time.monotonic() + 50
    for token in (20, 20, 20):
        assert matcher.mask(deadline) is not None
        matcher.tell([token])
    assert matcher.mask(deadline) is None  # three digits are all
    again = host.matcher("compile works [0-9]{200}")  # of a sequence that is resumed
    again.tell([20] * 3 * TOKENS_A_STEP)
    assert again.mask(deadline) is not None
    again.tell([20] * (200 - 3 * TOKENS_A_STEP))
    assert again.mask(deadline) is None
    host.close()


def test_the_library_gives_up_by_its_own_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a slow machine's CPU time decides what is refused: the expressions that it may construct are limited."""
    code = "import sys\nfrom depthbatch.common import grammar_program as program\n"
    code += "program.COMPILE_CPU_S = program.STEP_CPU_S = 60.0\nprogram.main(sys.argv[1:])"
    monkeypatch.setattr(GrammarHost, "program", staticmethod(lambda: [sys.executable, "-c", code]))
    host = GrammarHost(*demo_host_arguments())
    with pytest.raises(GrammarError, match="too many expressions"):
        host.ready_matcher(text_of("regex", "(a{1000}){50}x")).mask(time.monotonic() + 50)
    host.close()


@pytest.mark.parametrize("vocab_size", [264, 287, 288, 289, 320])
def test_masks_have_a_bit_a_token(vocab_size: int) -> None:
    """Bug: the library's mask is a word longer where a vocabulary is a multiple of 32, as most are; the worker died of it."""
    grammars = Grammars(GrammarHost(demo_host_arguments()[0], vocab_size, (2,)), vocab_size, [2])
    assert grammars.ready()
    grammars.admit([1], [GrammarStart(1, 1, text_of("regex", "[0-9]{3}"))])
    assert len(allowed(grammars, 1)) == 10 and failures_of(grammars, [1]) == {}
    grammars.close()
