"""Gate distillation: the arithmetic by hand, and students that come closer to the teacher on unseen tokens."""

import argparse
import json
import math
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from depthbatch.common.errors import ConfigError, DepthbatchError, ModelError
from depthbatch.common.gates import Gate
from depthbatch.deploy.cli.train import add_train_gate_arguments, run_train_gate
from depthbatch.training.checkpoints import load_ouro
from depthbatch.training.corpus import read_rows
from depthbatch.training.huginn import HuginnOutput, HuginnSize, HuginnTrainer
from depthbatch.training.train_gate import (
    TokenRow,
    collect_features,
    fit_gate,
    huginn_features,
    lookahead_log_probabilities,
    merge_first,
    ouro_features,
    preloop_log_probabilities,
    teacher_distribution,
)
from depthbatch.worker.models.exit_heads import DepthHead, ScalarHead
from depthbatch.worker.models.loader import read_spec
from reference.teacher_forcing import hazard_exits


def random_rows(vocab_size: int, rows: int = 60, length: int = 24) -> list[TokenRow]:
    rng = random.Random(0)
    return [TokenRow([rng.randrange(vocab_size) for _ in range(length)], list(range(length))) for _ in range(rows)]


def test_lookahead_target_merges_the_first_two_hazards() -> None:
    """p at 2 is 1 - (1 - l1)(1 - l2), and the later ones are the teacher's."""
    hazards = torch.tensor([0.5, 0.2, 0.25, 0.9])
    logits = torch.log(hazards / (1 - hazards))[:, None]
    target = merge_first(teacher_distribution(logits))[:, 0]
    at_two = 1 - 0.5 * 0.8
    torch.testing.assert_close(target, torch.tensor([at_two, 0.4 * 0.25, 0.4 * 0.75]))


def test_a_head_that_states_the_hazards_has_the_teachers_distribution() -> None:
    """States that carry the right logits in feature 0 make the student equal the teacher: no shift by a loop."""
    hazards = torch.tensor([0.5, 0.2, 0.25, 0.9])
    logits = torch.log(hazards / (1 - hazards))
    ahead = torch.tensor([math.log(0.6 / 0.4), logits[2], 7.0, -3.0])
    states = torch.zeros(4, 1, 3)
    states[:, 0, 0] = ahead
    weight, bias = torch.tensor([[1.0, 0.0, 0.0]]), torch.zeros(1)
    student = lookahead_log_probabilities(states, weight, bias).exp()
    torch.testing.assert_close(student, merge_first(teacher_distribution(logits[:, None])))
    head = ScalarHead(weight, bias)  # what the engine reads the file into
    engine = torch.stack([torch.zeros(1), *(torch.sigmoid(head(state)) for state in states[:-1])])
    assert hazard_exits(engine, 0.59).tolist() == [2]
    assert hazard_exits(engine, 0.69).tolist() == [3]
    assert hazard_exits(engine, 0.71).tolist() == [4]


def test_the_engine_leaves_where_the_preloop_distribution_says() -> None:
    """The first depth at which the student's cumulated probability reaches the threshold."""
    weight, bias = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), torch.zeros(4)
    embedding = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    cumulated = preloop_log_probabilities(embedding, weight, bias).exp().cumsum(0)
    depths = set()
    for threshold in (0.2, 0.5, 0.8):
        wanted = 1 + (cumulated[:-1] < threshold).sum(0)
        assert DepthHead(weight, bias)(embedding, torch.full((7,), threshold)).tolist() == wanted.tolist()
        depths |= set(wanted.tolist())
    assert depths >= {1, 2, 3, 4}


@pytest.mark.parametrize("kind", ["lookahead", "preloop"])
def test_distillation_reduces_the_divergence_on_unseen_tokens(ouro_directory: Path, kind: str) -> None:
    """Better than the best gate that ignores its input, on tokens the fit never saw."""
    model = load_ouro(ouro_directory)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    features = collect_features(partial(ouro_features, model), random_rows(model.size.vocab_size))
    fit = fit_gate(kind, features, iterations=100)
    assert fit.kl < (0.9 if kind == "lookahead" else 0.95) * fit.constant_kl
    assert fit.weight.shape == ((1, 64) if kind == "lookahead" else (4, 64))
    assert fit.bias.shape == ((1,) if kind == "lookahead" else (4,))
    assert all(before[name].equal(value) for name, value in model.state_dict().items())


def test_batching_rows_changes_nothing(ouro_directory: Path) -> None:
    """Padding on the right must not reach a real position."""
    model = load_ouro(ouro_directory)
    rng = random.Random(1)
    rows = [TokenRow([rng.randrange(300) for _ in range(n)], [0, n - 1]) for n in (3, 5, 9, 17)]
    together = collect_features(partial(ouro_features, model), rows)
    alone = collect_features(partial(ouro_features, model), rows, batch_tokens=1)
    torch.testing.assert_close(together.states, alone.states, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together.teacher, alone.teacher, atol=1e-5, rtol=1e-5)


def test_the_teacher_of_huginn_is_the_depth_from_which_its_token_stays() -> None:
    """Not the first at which it has the last token for once: A, B, A, A settles at 3."""

    class Says(HuginnTrainer):
        def forward(self, ids: torch.Tensor, loops: int, *_: object) -> HuginnOutput:
            tokens = torch.tensor([[0, 1, 2], [1, 1, 0], [0, 1, 1], [0, 1, 2]])  # by loop and position
            states = torch.nn.functional.one_hot(tokens, 3).float()[:, None]
            return HuginnOutput(states[:loops], states[0] + 5, [])

        def logits(self, states: torch.Tensor) -> torch.Tensor:
            return states

    model = Says(HuginnSize(8, 4, 1, 8, 1, 1, 1, 8))
    features = huginn_features(model, 4, torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool))
    assert (features.teacher.argmax(0) + 1).tolist() == [3, 1, 4]
    assert features.teacher.sum(0).tolist() == [1, 1, 1]
    assert features.states.shape == (4, 3, 3) and features.start.min() == 5  # a pre-loop head reads the injection


def test_command_trains_a_gate_for_huginn(
    huginn_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both files bring their gates, which do not become the default, and a first exit; the best constant gate is beaten."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((huginn_directory / name).read_bytes())
    data = write_ids(tmp_path / "ids.jsonl")
    assert read_spec(str(tmp_path)).r_min == 2
    for kind in ("preloop", "lookahead"):
        assert run_command([str(tmp_path), "--kind", kind, "--data", str(data), "--iterations", "20"]) == 0
    said = capsys.readouterr().err
    assert "KL divergence" in said and "default gate" not in said
    spec = read_spec(str(tmp_path))
    assert spec.gates[-2:] == (Gate.LOOKAHEAD, Gate.PRELOOP)
    assert (spec.default_gate, spec.r_min) == (Gate.CONVERGENCE, 1)


def run_command(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    add_train_gate_arguments(parser)
    return run_train_gate(parser.parse_args(arguments))


def write_ids(path: Path) -> Path:
    rows = random_rows(300, rows=20)
    path.write_text("".join(json.dumps({"token_ids": row.ids}) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", ["lookahead", "preloop"])
def test_command_writes_a_named_gate(ouro_directory: Path, tmp_path: Path, kind: str) -> None:
    data, output = write_ids(tmp_path / "ids.jsonl"), tmp_path / "gate.safetensors"
    options = ["--kind", kind, "--data", str(data), "--output", str(output), "--iterations", "20"]
    assert run_command([str(ouro_directory), *options]) == 0
    with safe_open(output, "pt") as file:
        assert set(file.keys()) == {"weight", "bias"}
        assert file.metadata()["kind"] == kind
        assert all(file.get_slice(name).get_dtype() == "F32" for name in ("weight", "bias"))


def test_command_lands_beside_the_model_by_default(
    ouro_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says that the gate is the model's default from then on: requests that name none exit by it."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((ouro_directory / name).read_bytes())
    data = write_ids(tmp_path / "ids.jsonl")
    assert run_command([str(tmp_path), "--data", str(data), "--iterations", "20"]) == 0
    assert (tmp_path / "lookahead_gate.safetensors").exists()
    assert (
        capsys.readouterr().err.splitlines()[-1].startswith(f"lookahead is the default gate of {tmp_path} from now on")
    )
    assert read_spec(str(tmp_path)).default_gate is Gate.LOOKAHEAD
    elsewhere = str(tmp_path / "other.safetensors")
    assert run_command([str(tmp_path), "--data", str(data), "--iterations", "1", "--output", elsewhere]) == 0
    assert "default gate" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is not a JSON object"),
        ('{"words": 1}', "line 2 has neither"),
        ('{"token_ids": [1, "a"]}', "line 2: token_ids"),
        ('{"token_ids": [300]}', "line 2 has a token id outside"),
        ('{"text": "hello"}', "no tokenizer.json"),
    ],
)
def test_bad_data_is_named_in_one_line(ouro_directory: Path, tmp_path: Path, line: str, named: str) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text('{"token_ids": [1, 2]}\n' + line + "\n")
    with pytest.raises(DepthbatchError, match=named) as caught:
        run_command([str(ouro_directory), "--data", str(data), "--output", str(tmp_path / "g.safetensors")])
    assert "\n" not in str(caught.value)


def test_missing_things_are_named(ouro_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        run_command(["nowhere"])
    with pytest.raises(ConfigError, match=r"missing\.txt"):
        run_command([str(ouro_directory), "--data", "missing.txt", "--output", str(tmp_path / "g")])
    with pytest.raises(ConfigError, match="--data is needed"):
        run_command([str(ouro_directory), "--output", str(tmp_path / "g")])
    with pytest.raises(ConfigError, match="no/such"):
        run_command([str(ouro_directory), "--data", "x", "--output", "no/such/gate"])


def test_rows_are_cut_and_prompts_do_not_count(tmp_path: Path) -> None:
    """Positions predict the next token: the last prompt token counts, earlier ones do not, cuts keep the place."""
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "abcdef", "answer": "ghij"}) + "\n")
    rows = read_rows(data, lambda text: [ord(c) for c in text], 256, length=4, most_tokens=100)
    assert rows == [TokenRow([101, 102, 103, 104], [1, 2, 3]), TokenRow([105, 106], [0, 1])]
    text = tmp_path / "plain.txt"
    text.write_text("abcdefg")
    rows = read_rows(text, lambda text: [ord(c) for c in text], 256, length=3, most_tokens=5)
    assert [len(row.positions) for row in rows] == [3, 2]
