"""``bench accuracy``: figures of a made-up model whose accuracy follows from its construction, and one run of the
command on the shipped model, held against the training code's own evaluation."""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from depthbatch.benchmarks import accuracy
from depthbatch.benchmarks.accuracy import FULL_DEPTH, Setting, ask, depth_report, gate_settings, layout_runs, tables
from depthbatch.benchmarks.questions import Question, prompts_of, read_questions
from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import EngineInfo
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.deploy.cli.main import OneLineParser
from depthbatch.frontend.llm import Progress
from depthbatch.frontend.output import RequestOutput
from depthbatch.frontend.params import SamplingParams
from depthbatch.frontend.tokenizer import load_tokenizer
from depthbatch.training.data import heldout

NEEDS = {"easy": 1, "middle": 2, "hard": 4}  # loops after which the made-up model knows the answer
EXAMPLES = [Question(f"{name}{i}=", "7", name) for i in range(5) for name in NEEDS]


class MadeUpModel:
    """Knows an answer at its class's depth. Its gate exits at the right depth, but one loop early for hard questions
    under a threshold below 0.5. Every answer is one prefilled token (full depth) and one decoded end marker."""

    def generate(
        self, prompts: Sequence[str], params: Sequence[SamplingParams], progress: Progress
    ) -> list[RequestOutput]:
        outputs = []
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            assert own.temperature == 0.0 and own.max_tokens is not None and own.max_tokens > 2
            needed = NEEDS[prompt.rstrip("=0123456789")]
            depth = self.depth(own, needed)
            text = "7" if depth >= needed else "8"
            outputs.append(RequestOutput(prompt, [1], text, [1, 2], [4, depth], "stop"))
            progress(index + 1, len(prompts))
        return outputs

    def depth(self, own: SamplingParams, needed: int) -> int:
        if own.num_loops is not None:
            return own.num_loops
        if own.gate == "none":
            return 4
        assert own.exit_threshold is not None
        return needed - 1 if needed == 4 and own.exit_threshold < 0.5 else needed


def made_up_report() -> accuracy.Report:
    fixed = [Setting(Gate.FIXED, depth=depth) for depth in (1, 2, 3)]
    gated = [Setting(Gate.OWN, threshold) for threshold in (0.2, 0.8)]
    finished: list[int] = []
    full, *others = ask(MadeUpModel(), EXAMPLES, [FULL_DEPTH, *fixed, *gated], finished.append)  # type: ignore[arg-type]
    assert sum(finished) == len(EXAMPLES) * 6
    return depth_report(EXAMPLES, full, others[:3], others[3:])


def test_figures_follow_from_the_construction() -> None:
    """A third of the questions is right from depth 1 on, two from 2 on, all at 4. Wrong if settings or examples are
    paired with another's outputs, or if the prefilled token counts into the depths (they would all be deeper)."""
    report = made_up_report()
    assert report["full_depth_accuracy"] == 1.0
    assert [(r["depth"], r["accuracy"]) for r in report["by_fixed_depth"]] == [
        (1, pytest.approx(1 / 3)),
        (2, pytest.approx(2 / 3)),
        (3, pytest.approx(2 / 3)),
    ]
    assert report["by_fixed_depth"][1]["accuracy_by_class"] == {"easy": 1.0, "middle": 1.0, "hard": 0.0}
    early, late = report["by_threshold"]
    assert early == {
        "gate": "own",
        "threshold": 0.2,
        "accuracy": pytest.approx(2 / 3),
        "mean_depth": 2.0,
        "histogram": {1: 5, 2: 5, 3: 5},
    }
    assert (late["accuracy"], late["mean_depth"]) == (1.0, pytest.approx(7 / 3))
    assert report["by_class_setting"] == {"gate": "own", "threshold": 0.8}  # 0.2 is shallower but loses a third
    assert [(r["class"], r["accuracy"], r["mean_depth"]) for r in report["by_class"]] == [
        ("easy", 1.0, 1.0),
        ("middle", 1.0, 2.0),
        ("hard", 1.0, 4.0),
    ]


def test_an_answer_that_goes_on_is_wrong() -> None:
    """Exact match: the right text cut off by the token limit, or followed by more, does not count."""
    question = Question("12+30=", "42", "add")
    assert question.is_right(RequestOutput(None, [], "42", finish_reason="stop"))
    assert not question.is_right(RequestOutput(None, [], "42", finish_reason="length"))
    assert not question.is_right(RequestOutput(None, [], "420", finish_reason="stop"))


@pytest.mark.parametrize(
    ("text", "right"),
    [("so 1,200.", True), ("3 x 400 = 1200.0 dollars", True), ("1200 or 12", False), ("many", False), ("-1200", False)],
)
def test_the_last_number_counts_however_it_is_written(text: str, right: bool) -> None:
    """GSM8K's way: reasoning before the number, commas and decimals in it, and an answer that the length limit cut."""
    question = Question("?", "400 * 3 = 1200 #### 1200", match="last-number", max_tokens=9)
    assert question.is_right(RequestOutput(None, [], text, finish_reason="length")) is right


def write_lines(file: Path, *lines: str) -> Path:
    file.write_text("\n".join(lines), encoding="utf-8-sig")
    return file


def test_own_questions_are_read(tmp_path: Path) -> None:
    """Empty lines and a byte-order mark are no questions, and a line separator within a text ends no line."""
    file = write_lines(
        tmp_path / "q.jsonl",
        '{"prompt": "1+1=", "answer": "2", "class": "add"}',
        "",
        '{"prompt": "a\u2028b", "answer": "c"}',
    )
    first, second = read_questions(file, "exact", 0)
    assert (first.prompt, first.answer, first.kind, first.output_tokens) == ("1+1=", "2", "add", 3)
    assert (second.prompt, second.kind) == ("a\u2028b", "")
    assert [each.output_tokens for each in read_questions(file, "exact", 50)] == [50, 50]


@pytest.mark.parametrize(
    ("line", "match", "named"),
    [
        ("", "exact", "no questions"),
        ("{", "exact", "line 1 is no JSON"),
        ("[]", "exact", "line 1 is no object"),
        ('{"prompt": "a"}', "exact", "line 1: 'answer' must be a text that is not empty, not None"),
        ('{"prompt": "", "answer": "a"}', "exact", "'prompt' must be a text that is not empty, not ''"),
        ('{"prompt": "a", "answer": 3}', "exact", "'answer' must be a text that is not empty, not 3"),
        ('{"prompt": "a", "answer": "b", "class": 1}', "exact", "'class' must be a text, not 1"),
        ('{"prompt": "a", "answer": "b", "depth": 1}', "exact", "unknown key 'depth'"),
        ('{"prompt": "a", "answer": "b"}', "last-number", "'b' has no number"),
    ],
)
def test_questions_that_cannot_be_asked_are_refused(tmp_path: Path, line: str, match: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        read_questions(write_lines(tmp_path / "q.jsonl", line), match, 9)


def info(gates: tuple[Gate, ...], r_max: int, layout: KVLayout) -> EngineInfo:
    return EngineInfo("m", "a", 9, r_max, 2, Gate.OWN, gates, 1.0, layout, 16, 9, 8, 64, 0, (1,), "cpu", "float32")


def test_settings_are_those_the_engine_has() -> None:
    """A gate the engine lacks is never asked for; where DELAYED is the convergence test it is measured once."""
    ouro = gate_settings(info((Gate.NONE, Gate.FIXED, Gate.OWN, Gate.DELAYED, Gate.PRELOOP), 4, KVLayout.SINGLE), False)
    assert {s.gate for s in ouro} == {Gate.OWN, Gate.DELAYED, Gate.PRELOOP}
    huginn = gate_settings(info((Gate.NONE, Gate.OWN, Gate.DELAYED, Gate.CONVERGENCE), 16, KVLayout.SINGLE), False)
    assert {s.gate for s in huginn} == {Gate.OWN, Gate.CONVERGENCE}
    assert accuracy.fixed_depths(4, quick=False) == [1, 2, 3]
    assert max(accuracy.fixed_depths(16, quick=True)) < 16


@pytest.mark.parametrize("quick", [False, True])
def test_every_layout_runs_at_full_depth_once(quick: bool) -> None:
    """The base engine's own pair is not run again; no pair is run twice, even where quarters of r_max coincide."""
    for r_max in (1, 2, 4, 16):
        runs = layout_runs(info((), r_max, KVLayout.LAST_EXITED), list(KVLayout), quick)
        assert len(set(runs)) == len(runs) and (KVLayout.LAST_EXITED, r_max) not in runs
        assert {layout for layout, loops in runs if loops == r_max} == set(KVLayout) - {KVLayout.LAST_EXITED}


def arguments(*options: str) -> argparse.Namespace:
    parser = OneLineParser()
    accuracy.add_accuracy_arguments(parser)
    return parser.parse_args(options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--policy", "cb"], "policy cb"),
        (["--questions", "/nowhere/at/all.jsonl"], "--questions /nowhere/at/all.jsonl"),
        (["--match", "last-number"], "--match and --answer-tokens need --questions"),
        (["--questions", "q.jsonl", "--match", "last-number"], "--answer-tokens must say"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(options: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        accuracy.run_accuracy(arguments("demo", *options))


def test_a_share_of_nothing_is_a_dash() -> None:
    """Bug: where every answer left before a draft was read, the table said "None" of them."""
    assert accuracy._columns(("n", "right %"), iter([(3, 0.5), (0, None)])) == ["", "n  right %", "3  50.00", "0  -"]


def test_the_command_on_the_shipped_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At full depth the engine must score what the training code scores, teacher-forced and without a cache: greedy
    decoding is exact when every next token is right. Depth 1 must score less: had every setting run alike, it would
    not. Two engines only, to keep this short; the accuracy itself is the model's affair."""
    monkeypatch.setattr(accuracy, "layout_runs", lambda *_: [(KVLayout.SINGLE, 2)])
    output = tmp_path / "accuracy.json"
    common = ["--dtype", "float32", "--threads", "1", "--max-model-len", "128", "--kv-blocks", "600"]
    options = ["--quick", "--examples", "24", "--output", str(output), "--figures", str(tmp_path / "figures")]
    assert accuracy.run_accuracy(arguments("demo", *common, *options)) == 0
    report = json.loads(output.read_text())
    assert report["full_depth_accuracy"] == reference_accuracy(24)
    assert [row["depth"] for row in report["by_fixed_depth"]] == [1, 2, 3, 4]
    assert report["by_fixed_depth"][0]["accuracy"] < report["full_depth_accuracy"] - 0.3
    assert report["by_fixed_depth"][-1]["accuracy"] == report["full_depth_accuracy"]
    decoded = {sum(row["histogram"].values()) for row in report["by_threshold"] if row["threshold"] == 0.9}
    assert decoded and min(decoded) >= 24  # at least the end marker of every answer
    assert {row["gate"] for row in report["by_threshold"]} >= {"own", "delayed"}
    assert [(r["layout"], r["max_loops"]) for r in report["by_layout"]] == [("last_exited", 4), ("single", 2)]
    assert report["by_layout"][0]["kib_per_token"] == 4 * report["by_layout"][1]["kib_per_token"]
    assert [row["class"] for row in report["by_class"]] == ["copy", "count", "add", "hop1", "hop2", "hop3"]
    at_full_depth = [row for row in report["by_draft_depth"] if row["gate"] == "none"]
    assert [(r["depth"], r["drafts"], r["acceptance"]) for r in at_full_depth] == reference_acceptance(24)
    assert len(report["by_draft_depth"]) == 6 and at_full_depth[0]["acceptance"] < at_full_depth[-1]["acceptance"]
    assert "at full depth" in tables(report)
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        f"{kind}-demo.png" for kind in ("accuracy", "drafts", "exits")
    ]


def test_the_command_on_own_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are judged as asked, and classes are the file's."""
    for name in ("layout_runs", "fixed_depths"):
        monkeypatch.setattr(accuracy, name, lambda *_: [])
    lines = [
        f'{{"prompt": "{p}", "answer": "is {a}", "class": "{c}"}}'
        for p, a, c in (("46+5=", 51, "r"), ("72+23=", 5, "w"))
    ]
    file, output = write_lines(tmp_path / "q.jsonl", *lines), tmp_path / "out.json"
    options = ["--questions", str(file), "--match", "last-number", "--answer-tokens", "6", "--quick"]
    common = ["--dtype", "float32", "--threads", "1", "--max-model-len", "128", "--kv-blocks", "600"]
    assert accuracy.run_accuracy(arguments("demo", *common, *options, "--output", str(output))) == 0
    report = json.loads(output.read_text())
    assert (report["examples"], report["questions"], report["full_depth_accuracy"]) == (2, "q.jsonl", 0.5)
    assert [(row["class"], row["accuracy"]) for row in report["by_class"]] == [("r", 1.0), ("w", 0.0)]


def test_chat_goes_through_the_template() -> None:
    class NoTokenizer:
        tokenizer = None

    with pytest.raises(ConfigError, match="--chat: this model has no tokenizer"):
        prompts_of(NoTokenizer(), EXAMPLES, True)  # type: ignore[arg-type]

    class Demo:
        tokenizer = load_tokenizer(resolve_model_dir(EngineConfig().model))

    (ids,) = prompts_of(Demo(), EXAMPLES[:1], True)  # type: ignore[arg-type]
    assert Demo.tokenizer is not None
    assert ids == Demo.tokenizer.encode_chat([{"role": "user", "content": EXAMPLES[0].prompt}])


def reference_accuracy(count: int) -> float:
    """Full-depth exact match of the shipped model, by whole-sequence forwards."""
    from depthbatch.training.checkpoints import load_ouro
    from reference import teacher_forcing as evaluate

    trace = evaluate.trace_ouro(load_ouro(EngineConfig().model), heldout(0, count))
    return pytest.approx(evaluate.score(trace, evaluate.fixed_depth(trace, trace.right.shape[0])).accuracy)  # type: ignore[return-value]


def reference_acceptance(count: int) -> list[tuple[int, int, float]]:
    """Draft depth, drafts, and share of them that are the token at full depth, of the same forwards: of every decoded token
    but the one that says the end marker, whose successor is never asked for. All answers are right, so the wanted token is
    the one at full depth."""
    from depthbatch.training.checkpoints import load_ouro
    from reference import teacher_forcing as evaluate

    trace = evaluate.trace_ouro(load_ouro(EngineConfig().model), heldout(0, count))
    assert trace.right[-1].all()
    last = np.append(np.diff(trace.row.numpy()) != 0, True)
    right = trace.right.numpy()[:, trace.decided.numpy() & ~last]
    return [(depth, right.shape[1], pytest.approx(right[depth - 1].mean())) for depth in (1, 2, 3)]
