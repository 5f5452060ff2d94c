"""``depthbatch bench accuracy``: share of right answers, to the demo task's held-out questions or to a user's own, through
the real engine.

Greedy decoding. Gate, threshold and fixed depth are per request, so one engine serves all of them at once; KV layouts and
truncated loops get an engine each.

Depths are those of decode tokens: a fixed depth or a gate has no say over the prompt and the first output token, which
prefill computes at full depth. ``by_layout`` truncates the loops of everything, prefill included (paper, Table 5).
``by_draft_depth`` says how often a readout after few loops is the token that the exit gives (docs/speculation.md).
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from tqdm import tqdm

from depthbatch.benchmarks.figures import draw_accuracy, import_pyplot
from depthbatch.benchmarks.questions import MATCHES, Question, heldout_questions, prompts_of, read_questions
from depthbatch.benchmarks.record import add_output_argument, write_json
from depthbatch.common.arguments import natural, output_directory, positive, seed
from depthbatch.common.config import (
    FIELD_NAMES,
    MAX_DRAFT_LANES,
    EngineConfig,
    add_config_arguments,
    config_from_sources,
)
from depthbatch.common.errors import ConfigError
from depthbatch.common.gates import GATE_BY_LABEL, Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import EngineInfo

if TYPE_CHECKING:
    from depthbatch.frontend.llm import LLM
    from depthbatch.frontend.output import RequestOutput
    from depthbatch.frontend.params import SamplingParams

HAZARD_THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99, 0.995, 0.999, 0.9995)
CONVERGENCE_THRESHOLDS = (0.7, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03)
QUICK_THRESHOLDS = {False: (0.5, 0.9, 0.97), True: (0.5, 0.2, 0.07)}  # by whether the gate is a convergence test
EXAMPLES, QUICK_EXAMPLES = 600, 90
CLASS_SLACK = 0.01  # by_class shows the shallowest setting that loses at most this much accuracy
Report = dict[str, Any]


def add_accuracy_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, size of the run, where results go, and the engine's options."""
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help="directory, repo id or 'demo'")
    parser.add_argument(
        "--questions",
        metavar="FILE.jsonl",
        type=Path,
        help='a line each: {"prompt": .., "answer": ..} (default: the demo task)',
    )
    parser.add_argument("--match", choices=MATCHES, default="exact", help="how answers to --questions are judged")
    parser.add_argument(
        "--answer-tokens", type=natural, default=0, help="most of an answer to --questions (default: its length)"
    )
    parser.add_argument(
        "--chat", action="store_true", help="each prompt is a user's message in the model's chat template"
    )
    parser.add_argument(
        "--examples", type=positive, default=None, help=f"how many questions (default {EXAMPLES}, or all of a file)"
    )
    parser.add_argument("--task-seed", type=seed, default=0, help="which held-out questions are drawn")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_EXAMPLES} questions and fewer settings")
    add_output_argument(parser)
    parser.add_argument(
        "--figures", metavar="DIR", type=output_directory, help="draw accuracy against depth into this directory"
    )
    add_config_arguments(parser, [n for n in FIELD_NAMES if n not in ("model", "gate", "exit_threshold")])


def run_accuracy(args: argparse.Namespace) -> int:
    """Runs every setting, prints tables, writes the JSON and, if asked, the figures.

    Raises ConfigError, ModelError, RequestError, EngineDeadError.
    """
    questions = _questions(args)
    config = config_from_sources(args, model=args.model)
    if config.policy == "cb":
        raise ConfigError("policy cb runs every token at full depth: there is no depth to measure accuracy against")
    if args.figures is not None:
        import_pyplot()
    report = measure(config, questions, args.quick, args.chat)
    drawn = {"task_seed": args.task_seed} if args.questions is None else {"questions": args.questions.name}
    report = {"model": Path(config.model).name, "examples": len(questions)} | drawn | report
    print(tables(report), file=sys.stderr)
    write_json(report, args.output)
    if args.figures is not None:
        args.figures.mkdir(parents=True, exist_ok=True)
        draw_accuracy(report, args.figures)
    return 0


def _questions(args: argparse.Namespace) -> list[Question]:
    if args.questions is None:
        if args.match != "exact" or args.answer_tokens:
            raise ConfigError("--match and --answer-tokens need --questions: the demo task has short, exact answers")
        return heldout_questions(args.task_seed, args.examples or (QUICK_EXAMPLES if args.quick else EXAMPLES))
    if args.task_seed:
        raise ConfigError("--task-seed is of the demo task, not of --questions")
    if args.match != "exact" and not args.answer_tokens:
        raise ConfigError(f"--answer-tokens must say how long an answer may be, not {args.answer_tokens}")
    return read_questions(args.questions, args.match, args.answer_tokens)[: args.examples]


# --- what is asked


class Setting(NamedTuple):
    """How the decode tokens of a request leave the loop: full depth, one fixed depth, or a gate at a threshold."""

    gate: Gate
    threshold: float | None = None
    depth: int | None = None

    def params(self, question: Question) -> "SamplingParams":
        """Greedy, and as long as an answer may be."""
        from depthbatch.frontend.params import SamplingParams

        return SamplingParams(
            max_tokens=question.output_tokens,
            temperature=0.0,
            gate=self.gate.label,
            exit_threshold=self.threshold,
            num_loops=self.depth,
        )


FULL_DEPTH = Setting(Gate.NONE)


def fixed_depths(r_max: int, quick: bool) -> list[int]:
    """Depths below r_max that are tried: all of a shallow model's; of a deep one the first and every second, or fourth."""
    if r_max <= 8:
        return list(range(1, r_max))
    return [1, 2, *range(4, r_max, 4)] if quick else [1, 2, 3, *range(4, r_max, 2)]


def gate_settings(info: EngineInfo, quick: bool) -> list[Setting]:
    """Every threshold of every gate the engine has; where DELAYED is the convergence test it is tried once."""
    gates = [gate for gate in info.gates if gate.takes_threshold]
    if Gate.CONVERGENCE in gates:
        gates.remove(Gate.DELAYED)
    return [Setting(gate, threshold) for gate in gates for threshold in _thresholds(info, gate, quick)]


def _thresholds(info: EngineInfo, gate: Gate, quick: bool) -> tuple[float, ...]:
    distances = gate.compares_distances(info.gates)
    if quick:
        return QUICK_THRESHOLDS[distances]
    return CONVERGENCE_THRESHOLDS if distances else HAZARD_THRESHOLDS


def layout_runs(base: EngineInfo, layouts: Sequence[KVLayout], quick: bool) -> list[tuple[KVLayout, int]]:
    """(layout, loops) of every engine but the base: all layouts at full depth, and at three and two quarters of it; in
    a quick run only the base layout is truncated, to half."""
    quarters = (4, 2) if quick else (4, 3, 2)
    runs = [(layout, max(1, base.r_max * q // 4)) for layout in layouts for q in quarters]
    kept = (run for run in runs if not quick or run[1] == base.r_max or run[0] == base.kv_layout)
    return [run for run in dict.fromkeys(kept) if run != (base.kv_layout, base.r_max)]


# --- what came back


class Score(NamedTuple):
    """Accuracy 0..1; mean depth in loops and histogram {depth: tokens}, both of decode tokens."""

    accuracy: float
    mean_depth: float
    histogram: dict[int, int]

    def as_json(self) -> Report:
        return self._asdict()


def score(questions: Sequence[Question], outputs: Sequence["RequestOutput"]) -> Score:
    """The score of one setting's outputs, in the order of the questions (at least one)."""
    depths = Counter(depth for output in outputs for depth in output.exit_depths[1:])
    right = sum(each.is_right(output) for each, output in zip(questions, outputs, strict=True))
    mean = sum(depth * n for depth, n in depths.items()) / max(1, depths.total())
    return Score(right / len(questions), mean, dict(sorted(depths.items())))


def score_classes(questions: Sequence[Question], outputs: Sequence["RequestOutput"]) -> list[Report]:
    """One row a difficulty class, in the order of their first question."""
    rows = []
    for name in dict.fromkeys(each.kind for each in questions):
        chosen = [i for i, each in enumerate(questions) if each.kind == name]
        part = score([questions[i] for i in chosen], [outputs[i] for i in chosen])
        rows.append({"class": name, **part.as_json()})
    return rows


# --- engines


class Answers(NamedTuple):
    """One setting's outputs, in the order of the questions."""

    setting: Setting
    outputs: list["RequestOutput"]


def ask(
    llm: "LLM",
    questions: Sequence[Question],
    settings: Sequence[Setting],
    advance: Callable[[int], object],
    chat: bool = False,
) -> list[Answers]:
    """Every question under every setting, all in one batch; ``advance`` is told of requests that finished."""
    prompts: list[Any] = list(prompts_of(llm, questions, chat)) * len(settings)
    params = [setting.params(question) for setting in settings for question in questions]

    def note(finished: int, total: int) -> None:
        advance(1)

    outputs = llm.generate(prompts, params, note)
    n = len(questions)
    return [Answers(setting, outputs[i * n : (i + 1) * n]) for i, setting in enumerate(settings)]


def measure(config: EngineConfig, questions: Sequence[Question], quick: bool, chat: bool = False) -> Report:
    """The report under the keys of names.md. One engine for gates and fixed depths, one for every other
    (layout, loops). Raises ConfigError, ModelError, RequestError, EngineDeadError."""
    from depthbatch.worker.models.loader import read_spec

    layouts = read_spec(config.model, config.dtype, config.load_format, config.max_loops).layouts
    with tqdm(unit="req", file=sys.stderr, mininterval=1.0, desc="answers") as bar:
        with _engine(config) as llm:
            info = llm.info
            fixed = [Setting(Gate.FIXED, depth=depth) for depth in fixed_depths(info.r_max, quick)]
            gated = gate_settings(info, quick)
            runs = layout_runs(info, layouts, quick)
            draft_depths = [depth for depth in fixed_depths(info.r_max, quick) if may_read_drafts(info, depth)]
            bar.reset(total=len(questions) * (1 + len(fixed) + len(gated) + len(runs) + 2 * len(draft_depths)))
            full, *others = ask(llm, questions, [FULL_DEPTH, *fixed, *gated], bar.update, chat)
        fixed_answers = [*others[: len(fixed)], full._replace(setting=Setting(Gate.FIXED, depth=info.r_max))]
        report = depth_report(questions, full, fixed_answers, others[len(fixed) :])
        report["by_layout"] = [_layout_row(info, report["full_depth_accuracy"])]
        for layout, loops in runs:
            with _engine(msgspec.structs.replace(config, kv_layout=layout, max_loops=loops)) as llm:
                (answers,) = ask(llm, questions, [FULL_DEPTH], bar.update, chat)
                report["by_layout"].append(_layout_row(llm.info, score(questions, answers.outputs).accuracy))
        shown = Setting(GATE_BY_LABEL[report["by_class_setting"]["gate"]], report["by_class_setting"]["threshold"])
        asked = list(dict.fromkeys((FULL_DEPTH, shown)))
        report["by_draft_depth"] = []
        for depth in draft_depths:
            drafts = {"policy": "refill", "speculation": MAX_DRAFT_LANES, "draft_depth": depth}
            with _engine(msgspec.structs.replace(config, **drafts)) as llm:
                report["by_draft_depth"] += [draft_row(depth, a) for a in ask(llm, questions, asked, bar.update, chat)]
    return {"r_max": info.r_max, "kv_layout": str(info.kv_layout), "dtype": info.dtype} | report


def _engine(config: EngineConfig) -> "LLM":
    from depthbatch.frontend.llm import LLM

    return LLM.from_config(config, quiet=True)


def _layout_row(info: EngineInfo, accuracy: float) -> Report:
    kib = info.kv_bytes_per_token / 1024
    return {"layout": str(info.kv_layout), "max_loops": info.r_max, "accuracy": accuracy, "kib_per_token": kib}


def may_read_drafts(info: EngineInfo, depth: int) -> bool:
    """Whether every token can be read for a draft after so many loops, and none has to wait: a chain is at most
    r_max / depth long, and an engine's has an end. KV layouts without a plane a loop have no drafts."""
    return KVLayout(info.kv_layout).keeps_every_loop(info.r_max) and depth * MAX_DRAFT_LANES >= info.r_max


def draft_row(depth: int, answers: Answers) -> Report:
    """How often drafts read after ``depth`` loops were the token they stood for; null without any. Where coda has layers,
    some are of tokens that have exited earlier and wait for those ahead."""
    right = sum(output.accepted_drafts for output in answers.outputs)
    drafts = right + sum(output.rejected_drafts for output in answers.outputs)
    setting = {"gate": answers.setting.gate.label, "threshold": answers.setting.threshold}
    return {"depth": depth, **setting, "drafts": drafts, "acceptance": right / drafts if drafts else None}


def depth_report(
    questions: Sequence[Question], full: Answers, fixed: Sequence[Answers], gated: Sequence[Answers]
) -> Report:
    """What one engine's answers say. ``by_class`` is of the setting that ``by_class_setting`` names: the shallowest
    within CLASS_SLACK of full depth, of the model's own gate where one is, else full depth."""
    accuracy = score(questions, full.outputs).accuracy
    own = [answers for answers in gated if answers.setting.gate is Gate.OWN]
    shown = min(
        (a for a in own if score(questions, a.outputs).accuracy >= accuracy - CLASS_SLACK),
        key=lambda answers: score(questions, answers.outputs).mean_depth,
        default=full,
    )
    return {
        "full_depth_accuracy": accuracy,
        "by_fixed_depth": [
            {
                "depth": answers.setting.depth,
                "accuracy": score(questions, answers.outputs).accuracy,
                "accuracy_by_class": {r["class"]: r["accuracy"] for r in score_classes(questions, answers.outputs)},
            }
            for answers in fixed
        ],
        "by_threshold": [
            {
                "gate": answers.setting.gate.label,
                "threshold": answers.setting.threshold,
                **score(questions, answers.outputs).as_json(),
            }
            for answers in gated
        ],
        "by_class_setting": {"gate": shown.setting.gate.label, "threshold": shown.setting.threshold},
        "by_class": score_classes(questions, shown.outputs),
    }


# --- tables for people


def tables(report: Report) -> str:
    """All of a report as text; accuracy in percent, depth in loops."""
    shown = report["by_class_setting"]
    at = shown["gate"] if shown["threshold"] is None else f"{shown['gate']} at {shown['threshold']:g}"
    lines = [
        f"{report['model']}: {report['examples']} questions, {100 * report['full_depth_accuracy']:.2f} % at full depth",
        *_columns(("fixed depth", "exact %"), ((r["depth"], r["accuracy"]) for r in report["by_fixed_depth"])),
        *_columns(
            ("gate", "threshold", "exact %", "depth", "tokens at depth"),
            (
                (r["gate"], f"{r['threshold']:g}", r["accuracy"], f"{r['mean_depth']:.2f}", _histogram(r["histogram"]))
                for r in report["by_threshold"]
            ),
        ),
        *_columns(
            ("layout", "loops", "exact %", "KiB/token"),
            ((r["layout"], r["max_loops"], r["accuracy"], f"{r['kib_per_token']:g}") for r in report["by_layout"]),
        ),
        *_columns(
            ("draft depth", "gate", "drafts", "right %"),
            (
                (r["depth"], f"{r['gate']} {r['threshold'] or ''}", r["drafts"], r["acceptance"])
                for r in report["by_draft_depth"]
            ),
        ),
        *_columns(
            (f"class ({at})", "exact %", "depth", "tokens at depth"),
            (
                (r["class"], r["accuracy"], f"{r['mean_depth']:.2f}", _histogram(r["histogram"]))
                for r in report["by_class"]
            ),
        ),
    ]
    return "\n".join(lines)


def _histogram(counts: dict[int, int]) -> str:
    return " ".join(f"{depth}:{n}" for depth, n in counts.items())


def _columns(head: tuple[str, ...], rows: Iterator[tuple[Any, ...]]) -> list[str]:
    """A blank line and a table, left-aligned; floats are shares, shown in percent, None is what nothing was seen of."""
    texts = (
        tuple(f"{100 * c:.2f}" if isinstance(c, float) else str("-" if c is None else c) for c in row) for row in rows
    )
    cells = [head, *texts]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    return ["", *("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)]
