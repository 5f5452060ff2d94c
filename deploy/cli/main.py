"""The ``depthbatch`` command: finds the subcommand, lets its module add the arguments and runs it.

A module is imported when its command is used, so ``--help`` starts at once and never loads torch. A command whose
module is not installed does not exist. Errors are one line on stderr: exit code 2 for the user's, 1 for faults.
"""

import argparse
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple, NoReturn

from depthbatch import __version__
from depthbatch.common.errors import FAULT, USER_ERROR, DepthbatchError


class Command(NamedTuple):
    """A subcommand: ``module`` has add_NAME_arguments(parser) and run_NAME(args) -> exit code."""

    module: str
    name: str
    help: str

    @property
    def exists(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


COMMANDS = {
    "generate": Command(
        "depthbatch.deploy.cli.generate", "generate", "text in, text out, with the depth of every token"
    ),
    "info": Command("depthbatch.deploy.cli.info", "info", "what a model is, and how much of it fits"),
    "serve": Command("depthbatch.deploy.cli.serve", "serve", "run the server in the foreground"),
    "chat": Command("depthbatch.deploy.cli.terminal_chat", "chat", "interactive chat"),
    "keygen": Command("depthbatch.deploy.cli.keygen", "keygen", "keys for the native API over tcp"),
    "convert": Command("depthbatch.deploy.cli.convert", "convert", "make a looped model out of a Llama checkpoint"),
    "train-demo": Command("depthbatch.deploy.cli.train", "train_demo", "train the demo model"),
    "train-gate": Command("depthbatch.deploy.cli.train", "train_gate", "distil an exit gate"),
    "train-loops": Command("depthbatch.deploy.cli.train_loops", "train_loops", "teach a converted model to use loops"),
    "record-exits": Command(
        "depthbatch.benchmarks.record_exits", "record_exits", "write a workload's exit depths into it"
    ),
}
BENCHMARKS = {
    "trace": Command("depthbatch.benchmarks.trace", "trace", "the schedule of a workload as data"),
    "simulate": Command("depthbatch.benchmarks.simulate", "simulate", "a workload in virtual time"),
    "fleet": Command("depthbatch.benchmarks.fleet", "fleet", "many replicas behind a router, in virtual time"),
    "fleet-sweep": Command("depthbatch.benchmarks.fleet_sweep", "fleet_sweep", "the runs behind docs/scale.md"),
    "throughput": Command("depthbatch.benchmarks.throughput", "throughput", "tokens per second of the policies"),
    "latency": Command("depthbatch.benchmarks.latency", "latency", "fit a device profile"),
    "serve": Command("depthbatch.benchmarks.load", "serve", "load on a running server"),
    "service": Command("depthbatch.benchmarks.service_figures", "service_figures", "what the HTTP service costs"),
    "frontends": Command("depthbatch.benchmarks.frontends", "frontends", "tokens a second that processes pass on"),
    "soak": Command("depthbatch.benchmarks.soak", "soak", "a server at a share of its capacity for an hour"),
    "sweep": Command("depthbatch.benchmarks.sweep", "sweep", "a product of settings, with figures"),
    "paper": Command("depthbatch.benchmarks.paper_report", "paper_report", "the paper's figures against ours"),
    "cpu": Command("depthbatch.benchmarks.cpu_speed", "cpu", "the CPU device: engine, policies, kernels"),
    "kv-memory": Command("depthbatch.benchmarks.kv_memory", "kv_memory", "the prefix cache, and K/V in host memory"),
    "scheduler": Command("depthbatch.benchmarks.scheduler_cost", "scheduler_cost", "what the scheduler core costs"),
    "device-clock": Command("depthbatch.benchmarks.device_clock", "device_clock", "the simulated device's timing"),
    "eval": Command("depthbatch.benchmarks.evaluation", "eval", "public tasks at several depths, of a running server"),
    "accuracy": Command("depthbatch.benchmarks.accuracy", "accuracy", "exact match of the demo model's task"),
    "kv-residuals": Command(
        "depthbatch.benchmarks.kv_residuals",
        "kv_residuals",
        "K and V in few bits: planes by themselves or as residuals",
    ),
    "perplexity": Command("depthbatch.benchmarks.perplexity", "perplexity", "of a text, by loops and kind of weights"),
}


class OneLineParser(argparse.ArgumentParser):
    """argparse without the usage text in front of its errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    signal.signal(signal.SIGTERM, _terminate)
    _open_missing_streams()
    try:
        parser = build_parser(argv)
        arguments = parser.parse_args(argv)
        run = getattr(arguments, "run", None)
        if run is None:
            parser.error("no command; see depthbatch --help")
        from depthbatch.common.options import check_environment
        from depthbatch.frontend.http.settings import OPTION_NAMES

        check_environment(os.environ, OPTION_NAMES)
        code = int(run(arguments))
        sys.stdout.flush()  # at exit it would be too late to say why it failed
        return code
    except DepthbatchError as error:
        print(f"depthbatch: error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except MemoryError as error:
        print(f"depthbatch: error: out of memory: {error}", file=sys.stderr)
        return FAULT
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output has gone: nobody to tell
        _discard_stdout()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is not None or _can_write_stdout():
            raise
        _discard_stdout()
        print(f"depthbatch: error: cannot write to standard output: {error.strerror}", file=sys.stderr)
        return FAULT


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser, with the arguments of the command that ``argv`` names and only the names of the others."""
    parser = OneLineParser(prog="depthbatch", description=__import__("depthbatch").__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"depthbatch {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", parser_class=OneLineParser)
    words = [word for word in argv[:2] if not word.startswith("-")]
    chosen = words[0] if words else None
    for name, command in COMMANDS.items():
        if command.exists:
            _add(subparsers, name, command, name == chosen)
    bench = subparsers.add_parser("bench", help="measure", allow_abbrev=False)
    bench_parsers = bench.add_subparsers(metavar="BENCHMARK", parser_class=OneLineParser, required=True)
    for name, command in BENCHMARKS.items():
        if command.exists:
            _add(bench_parsers, name, command, words == ["bench", name])
    return parser


def _add(subparsers: "argparse._SubParsersAction[OneLineParser]", name: str, command: Command, is_chosen: bool) -> None:
    parser = subparsers.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
    if is_chosen:
        module = importlib.import_module(command.module)
        getattr(module, f"add_{command.name}_arguments")(parser)
        parser.set_defaults(run=getattr(module, f"run_{command.name}"))


def _open_missing_streams() -> None:
    """Standard streams that the starter has closed (``<&-``, ``>&-``): input is empty, output fails as a write to a
    closed file does, errors go nowhere. Without them a socket would get their descriptor, and its bytes what is logged.
    """
    for name, mode, flags in (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY)):
        if getattr(sys, name) is None:  # in this order each takes the lowest free number: its own
            descriptor = os.open(os.devnull, flags)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


def _can_write_stdout() -> bool:
    """False when standard output is what failed: it fails again, with what is still buffered or with one line end."""
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def _discard_stdout() -> None:
    """What is still buffered goes nowhere, instead of failing again when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _terminate(signum: int, frame: FrameType | None) -> None:
    """SIGTERM unwinds like an exception, so that the engine's processes are ended on the way out."""
    raise SystemExit(128 + signum)
