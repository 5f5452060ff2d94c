"""Healing of converted models: the forward is the engine's, nothing is changed by what is added, and training lowers the loss."""

import argparse
import json
import random
from pathlib import Path

import pytest
import torch

from depthbatch.common.errors import ConfigError, ModelError
from depthbatch.common.kv_layout import KVLayout
from depthbatch.deploy.cli.train_loops import add_train_loops_arguments, run_train_loops
from depthbatch.training.checkpoints import load_retrofitted
from depthbatch.training.corpus import read_rows
from depthbatch.training.train_loops import Healing, heal, losses, measure, split_rows
from depthbatch.worker.models.convert import convert
from depthbatch.worker.models.loader import load_model, read_spec
from fakes.checkpoints import FIDELITY
from fakes.llama import write_llama
from fakes.model_batch import Batch, packed_rows


@pytest.fixture(scope="module")
def looped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama, converted: 1-2-1."""
    path = tmp_path_factory.mktemp("loops")
    write_llama(path / "llama", num_hidden_layers=4)
    convert(path / "llama", path / "looped", 1, 1)
    return path / "looped"


def rows(count: int = 24, length: int = 17) -> list[list[int]]:
    """Text with something to learn: every row counts on from where it starts."""
    rng = random.Random(0)
    return [[(start + i) % 40 for i in range(length)] for start in (rng.randrange(40) for _ in range(count))]


def engine_logits(model: Path, ids: list[int], loops: int) -> torch.Tensor:
    """Of every position after so many loops, by the engine's model."""
    batch = Batch(load_model(str(model), dtype="float32", r_max=loops), KVLayout.DEPTH_INDEXED, 1)
    item = batch.prelude(ids, packed_rows([ids], 1))
    for loop in range(1, loops + 1):
        item = batch.core(item, packed_rows([ids], loop))
    return batch.logits(item, packed_rows([ids], loops))


@pytest.mark.parametrize("name", ["retro-llama-tiny", "retro-tinyllama-tiny"])
def test_the_forward_is_the_engines(name: str) -> None:
    """Grouped heads, RoPE scaling, a head of its own: logits after three loops."""
    model, _ = load_retrofitted(FIDELITY / name)
    ids = list(range(3, 20))
    wanted = engine_logits(FIDELITY / name, ids, 3)
    with torch.no_grad():
        got = model.logits(model(torch.tensor([ids]), 3)[-1])[0]
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_what_is_added_changes_nothing(looped: Path) -> None:
    """Before the first step every loop count is the base model, with and without low-rank changes, merged or not."""
    model, _ = load_retrofitted(looped)
    ids = torch.tensor(rows(2))
    with torch.no_grad():
        plain = losses(model, ids, 3)
        model.train_core(rank=4, seed=0)
        with_ranks = losses(model, ids, 3)
        model.merge()
        merged = losses(model, ids, 3)
    assert plain.unique().numel() == 1
    assert plain.equal(with_ranks) and plain.equal(merged)


@pytest.mark.parametrize("rank", [4, 0])
def test_the_loss_falls_and_the_rest_stays(looped: Path, rank: int) -> None:
    model, _ = load_retrofitted(looped)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train, heldout = split_rows(rows(), 16)
    first = measure(model, heldout, 3)
    told = list(heal(model, train, Healing(3, 25, 4, 1e-2, rank, 0)))
    after = measure(model, heldout, 3)
    assert told[-1] < 0.8 * told[0]
    assert max(after.perplexity) < 0.8 * min(first.perplexity)
    assert set(model.state_dict()) == set(before)
    changed = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    assert "transformer.adapter.weight" in changed
    assert all(".core_block." in name or "adapter" in name for name in changed)
    assert ("transformer.core_block.0.norm_1.weight" in changed) == (rank == 0)


def test_exits_are_told_where_states_come_to_rest(looped: Path) -> None:
    """Of a converted model, whose loops are all the same, every token rests at loop 2; of one whose state counts, not."""
    model, _ = load_retrofitted(looped)
    depths = measure(model, rows(2), 4)
    assert all(set(of_tokens) == {2} for of_tokens in depths.exits.values())
    with torch.no_grad():
        width = model.plan.hidden
        model.transformer.adapter.weight[:, :width] = torch.eye(width)
    grows = measure(model, rows(2), 4)
    assert max(grows.exits[0.03]) == 4


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    add_train_loops_arguments(parser)
    return run_train_loops(parser.parse_args(arguments))


def test_the_command_writes_a_model_that_the_engine_runs(
    looped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trained weights in the type they had, perplexities in loops.json, a picture; logits are the trainer's."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"token_ids": row}) + "\n" for row in rows()))
    target = tmp_path / "healed"
    options = ["--text", str(text), "--loops", "3", "--steps", "5", "--length", "16", "--rank", "4", "--figure"]
    assert run([str(looped), str(target), *options]) == 0
    report = json.loads((target / "loops.json").read_text())
    assert len(report["loss"]) == 5 and [row["loops"] for row in report["after"]["perplexity"]] == [1, 2, 3]
    assert (target / "loops.png").stat().st_size > 1000
    assert "perplexity after" in capsys.readouterr().err
    assert read_spec(str(target)).r_max == 3
    trained, _ = load_retrofitted(target)
    assert not trained.transformer.adapter.weight.equal(load_retrofitted(looped)[0].transformer.adapter.weight)
    ids = rows(1)[0]
    wanted = engine_logits(target, ids, 2)
    with torch.no_grad():
        torch.testing.assert_close(trained.logits(trained(torch.tensor([ids]), 2)[-1])[0], wanted, atol=1e-4, rtol=1e-4)


def test_what_cannot_be_trained_is_named(looped: Path, tmp_path: Path, ouro_directory: Path) -> None:
    """Bugs: an output that could not be made was found out after the training, which was lost; text whose tokens the model does
    not have was an IndexError."""
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"token_ids": list(range(30))}) + "\n")
    out = str(tmp_path / "out")
    with pytest.raises(ModelError, match="is no retrofitted model"):
        run([str(ouro_directory), out, "--text", str(text)])
    with pytest.raises(ModelError, match="only Llama blocks"):
        run([str(FIDELITY / "retro-olmo-tiny"), out, "--text", str(text)])
    with pytest.raises(ConfigError, match="1 rows of 17 tokens; at least 2"):
        run([str(looped), out, "--text", str(text), "--length", "16"])
    with pytest.raises(ConfigError, match="is not empty"):
        run([str(looped), str(tmp_path), "--text", str(text)])
    with pytest.raises(ConfigError, match="--rank"):
        run([str(looped), out, "--text", str(text), "--rank", "-1"])
    for taken in ("/proc/out", str(text)):
        with pytest.raises(ConfigError, match=f"cannot write {taken}"):
            run([str(looped), taken, "--text", _rows_of(tmp_path), "--length", "16"])


def test_tokens_that_the_model_does_not_have(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc")
    with pytest.raises(ConfigError, match="has token 99, the model only 96"):
        read_rows(text, lambda words: [ord(letter) for letter in words], 96, 16, 100)


def _rows_of(directory: Path) -> str:
    (path := directory / "rows.jsonl").write_text(f"{json.dumps({'token_ids': list(range(30))})}\n" * 4)
    return str(path)
