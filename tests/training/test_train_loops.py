"""Healing of converted models: the forward is the engine's, nothing is changed by what is added, and training lowers the loss."""

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from depthbatch.benchmarks.sources import Pair
from depthbatch.common.errors import ConfigError, ModelError
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.deploy.cli.train_loops import add_train_loops_arguments, conversation_rows, run_train_loops
from depthbatch.frontend.tokenizer import load_tokenizer
from depthbatch.training.checkpoints import load_retrofitted
from depthbatch.training.corpus import read_rows
from depthbatch.training.retrofitted import RetrofittedTrainer, Trained
from depthbatch.training.train_gate import TokenRow
from depthbatch.training.train_loops import Healing, HealingRun, divergence, exit_depths, measure, pad, split_rows
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


def rows(count: int = 24, length: int = 17) -> list[TokenRow]:
    """Text with something to learn: every row counts on from where it starts."""
    rng = random.Random(0)
    starts = [rng.randrange(40) for _ in range(count)]
    return [TokenRow([(start + i) % 40 for i in range(length)], list(range(length))) for start in starts]


def losses(model: RetrofittedTrainer, ids: torch.Tensor, loops: int) -> torch.Tensor:
    """Cross-entropy of the next token after each of loops 1..R on whole rows: [R]."""
    states, targets = model(model.injection(ids[:, :-1]), loops), ids[:, 1:].flatten()
    return torch.stack([F.cross_entropy(model.logits(state).flatten(0, 1), targets) for state in states])


def healing(steps: int, trained: Trained, loops: int = 3, distill: float = 0.0) -> Healing:
    return Healing(loops, steps, 4, 1e-2, trained, distill, 0)


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
        got = model.logits(model(model.injection(torch.tensor([ids])), 3)[-1])[0]
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("trained", [Trained(4, False), Trained(0, False), Trained(16, True)])
def test_what_is_added_changes_nothing(looped: Path, trained: Trained) -> None:
    """Before the first step every loop count is the base model, whatever is to be trained, merged or not."""
    model, _ = load_retrofitted(looped)
    ids = torch.tensor([row.ids for row in rows(2)])
    with torch.no_grad():
        plain = losses(model, ids, 3)
        model.train_loop(trained, 0, ids)
        with_changes = losses(model, ids, 3)
        model.merge()
        merged = losses(model, ids, 3)
    assert plain.unique().numel() == 1
    assert plain.equal(with_changes) and plain.equal(merged)


@pytest.mark.parametrize("rank", [4, 0])
def test_the_loss_falls_and_the_rest_stays(looped: Path, tmp_path: Path, rank: int) -> None:
    model, _ = load_retrofitted(looped)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train, heldout = split_rows(rows())
    first = measure(model, heldout, 3)
    told = HealingRun(model, train, healing(40, Trained(rank, False)), tmp_path / "training.pt").train()
    after = measure(model, heldout, 3)
    assert len(told) == 40
    assert max(after.perplexity) < 0.8 * min(first.perplexity)
    assert set(model.state_dict()) == set(before)
    changed = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    assert "transformer.adapter.weight" in changed and len(changed) > 1
    assert all(".core_block." in name or "adapter" in name for name in changed)
    assert ("transformer.core_block.0.norm_1.weight" in changed) == (rank == 0)


def test_one_loop_stays_and_more_become_better(looped: Path, tmp_path: Path) -> None:
    """After one loop the logits are the same bits, for only what the adapter makes of the state is trained; after two and
    three the text is foreseen better."""
    model, _ = load_retrofitted(looped)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train, heldout = split_rows(rows())
    first = measure(model, heldout, 3)
    HealingRun(model, train, healing(40, Trained(0, True)), tmp_path / "training.pt").train()
    after, width = measure(model, heldout, 3), model.plan.hidden
    assert after.perplexity[0] == first.perplexity[0]
    assert max(after.perplexity[1:]) < 0.9 * after.perplexity[0]
    changed = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    assert changed == {"transformer.adapter.weight"}
    half = slice(width, None)
    assert model.transformer.adapter.weight[:, half].equal(before["transformer.adapter.weight"][:, half])


def test_the_gradient_is_that_of_the_whole_graph(looped: Path) -> None:
    """Where one loop stays it is left out of the backward pass, which must not change what the change's gradient is."""
    batch, gradients = pad(split_rows(rows())[0][:3]), []
    for whole in (False, True):
        model, _ = load_retrofitted(looped)
        (change,) = model.train_loop(Trained(0, True), 0, batch.ids)
        with torch.no_grad():
            change.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
        model.one_loop_stays = not whole
        state = model(model.injection(batch.ids), 3)[-1]
        F.cross_entropy(model.logits(state, batch.chosen), batch.targets).backward()
        gradients.append(change.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_distillation_keeps_answers_near_the_model_before(looped: Path, tmp_path: Path) -> None:
    """With a heavy weight two loops say what one said before training, without any something else."""
    train, heldout = split_rows(rows())
    batch, away = pad(heldout), []
    for weight in (0.0, 100.0):
        model, _ = load_retrofitted(looped)
        said = model.logits(model(model.injection(batch.ids), 1)[-1], batch.chosen).detach()
        path = tmp_path / f"{weight}.pt"
        HealingRun(model, train, healing(40, Trained(4, False), distill=weight), path).train()
        with torch.no_grad():
            now = model.logits(model(model.injection(batch.ids), 2)[-1], batch.chosen)
        away.append(divergence(said, now).item())
    assert away[1] < 0.5 * away[0]


def test_divergence_is_the_textbooks() -> None:
    """sum p log(p / q) at a temperature of 2, times 4."""
    teacher, student = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).unbind()
    p, q = (teacher / 2).softmax(-1), (student / 2).softmax(-1)
    torch.testing.assert_close(divergence(teacher, student), 4 * (p * (p / q).log()).sum(-1).mean())


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(looped: Path, tmp_path: Path) -> None:
    """From its checkpoint: the same losses and weights; another run's checkpoint is refused."""
    train, _ = split_rows(rows())
    run, path = healing(30, Trained(4, False)), tmp_path / "training.pt"
    whole, _ = load_retrofitted(looped)
    wanted = HealingRun(whole, train, run, tmp_path / "other.pt").train()
    model, _ = load_retrofitted(looped)
    broken = HealingRun(model, train, run, path)
    broken._step = _stops_at(broken, 25)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    model, _ = load_retrofitted(looped)
    again = HealingRun(model, train, run, path)
    assert len(again.losses) == 20  # what was saved
    assert again.train() == wanted
    assert all(value.equal(whole.state_dict()[name]) for name, value in model.state_dict().items())
    with pytest.raises(ConfigError, match="other options; --restart"):
        HealingRun(load_retrofitted(looped)[0], train, run._replace(rate=1e-3), path)


def _stops_at(run: HealingRun, last: int) -> Callable[[int], float]:
    step = run._step

    def stops(number: int) -> float:
        if number == last:
            raise KeyboardInterrupt
        return step(number)

    return stops


def test_only_counted_positions_are_learned_and_measured(looped: Path) -> None:
    """Bug: train-loops read the data of train-gate, but trained on questions, too, and threw away short rows."""
    model, _ = load_retrofitted(looped)
    row, short = rows(1)[0], TokenRow([1, 2, 3], [2])  # has no next token
    some = TokenRow(row.ids, row.positions[8:])
    train, heldout = split_rows([some, short, TokenRow(row.ids[:5], [1, 2])])
    assert [len(one.ids) for one in (*train, *heldout)] == [17, 5]
    batch = pad([*train, *heldout])
    assert batch.targets.tolist() == [*row.ids[9:], *row.ids[2:4]]
    with torch.no_grad():
        logits = model.logits(model(model.injection(batch.ids), 1)[-1])
        alone = model.logits(model(model.injection(torch.tensor([row.ids[:5]])), 1)[-1])
    torch.testing.assert_close(logits[1, 1:3], alone[0, 1:3])  # padding is not seen
    wanted = F.cross_entropy(logits[0, 8:16], torch.tensor(row.ids[9:])).exp().item()
    assert measure(model, train, 1).perplexity[0] == pytest.approx(wanted, rel=1e-4)


def test_exits_are_told_where_states_come_to_rest(looped: Path) -> None:
    """Of a converted model, whose loops are all the same, every token rests at loop 2; of one whose state counts, not."""
    model, _ = load_retrofitted(looped)
    depths = measure(model, split_rows(rows(2))[0], 4)
    assert all(set(of_tokens) == {2} for of_tokens in depths.exits.values())
    with torch.no_grad():
        width = model.plan.hidden
        model.transformer.adapter.weight[:, :width] = torch.eye(width)
    grows = measure(model, split_rows(rows(2))[0], 4)
    assert max(grows.exits[0.03]) == 4


def test_exit_depths_are_those_of_the_engines_gate() -> None:
    """Three tokens: at rest at once, at loop 3, never."""
    states = torch.tensor([[1.0, 1.0, 1.0], [1.0, 2.0, 2.0], [1.0, 2.0, 4.0], [3.0, 9.0, 8.0]]).unsqueeze(-1)
    assert exit_depths(states, 0.3).tolist() == [2, 3, 4]


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    add_train_loops_arguments(parser)
    return run_train_loops(parser.parse_args(arguments))


def test_the_command_writes_a_model_that_the_engine_runs(
    looped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trained weights in the type they had, perplexities in loops.json, a picture; logits are the trainer's."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"token_ids": row.ids}) + "\n" for row in rows()))
    target = tmp_path / "healed"
    options = ["--text", str(text), "--loops", "3", "--steps", "5", "--length", "16", "--rank", "4", "--figure"]
    assert run([str(looped), str(target), *options]) == 0
    report = json.loads((target / "loops.json").read_text())
    assert len(report["loss"]) == 5 and [row["loops"] for row in report["after"]["perplexity"]] == [1, 2, 3, 4, 5, 6]
    assert (target / "loops.png").stat().st_size > 1000
    assert "perplexity after" in capsys.readouterr().err
    assert read_spec(str(target)).r_max == 3
    trained, _ = load_retrofitted(target)
    assert not trained.transformer.adapter.weight.equal(load_retrofitted(looped)[0].transformer.adapter.weight)
    assert not (target / "training.pt").exists()
    ids = rows(1)[0].ids
    wanted = engine_logits(target, ids, 2)
    with torch.no_grad():
        got = trained.logits(trained(trained.injection(torch.tensor([ids])), 2)[-1])[0]
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_an_adapter_alone_is_a_file_of_its_own(looped: Path, tmp_path: Path) -> None:
    """What --one-loop-stays trained, put in when the base model is converted again, gives the same weights."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"token_ids": row.ids}) + "\n" for row in rows()))
    options = ["--text", str(text), "--loops", "2", "--steps", "3", "--length", "16", "--one-loop-stays"]
    assert run([str(looped), str(tmp_path / "healed"), *options]) == 0
    convert(looped.parent / "llama", tmp_path / "again", 1, 1, tmp_path / "healed" / "adapter.safetensors")
    again, healed = (load_retrofitted(tmp_path / name)[0].state_dict() for name in ("again", "healed"))
    assert all(value.equal(healed[name]) for name, value in again.items())
    assert not again["transformer.adapter.weight"].equal(load_retrofitted(looped)[0].transformer.adapter.weight)
    report = json.loads((tmp_path / "healed" / "loops.json").read_text())
    assert report["before"]["perplexity"][0] == report["after"]["perplexity"][0]
    assert len(report["example"]) == 32 and {token["before"] for token in report["example"]} == {2}


def test_conversations_are_rows_whose_answers_count() -> None:
    """In the model's chat template; long questions and what is no English are left out, answers are cut."""
    tokenizer = load_tokenizer(resolve_model_dir("demo"))
    assert tokenizer is not None
    pairs = [Pair("Hi", "Hello there"), Pair("x" * 60, "long"), Pair("Hé", "Ho"), Pair("Hi", "a" * 99)]
    made = conversation_rows(pairs, tokenizer, 80, 10_000, 0)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert sorted(len(row.ids) for row in made) == sorted([len(prompt) + len(tokenizer.encode_bare("Hello there")), 80])
    for row in made:
        assert row.ids[: len(prompt)] == prompt
        assert row.positions == list(range(len(prompt) - 1, len(row.ids) - 1))
    assert len(conversation_rows(pairs, tokenizer, 80, 1, 0)) == 1


def test_a_figure_without_matplotlib_is_refused_before_training(
    looped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the missing package was found out when the training was done."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    target = tmp_path / "out"
    with pytest.raises(ConfigError, match="figures need matplotlib"):
        run([str(looped), str(target), "--text", _rows_of(tmp_path), "--length", "16", "--figure"])
    assert not target.exists()


def test_what_cannot_be_trained_is_named(looped: Path, tmp_path: Path, ouro_directory: Path) -> None:
    """Bugs: an output that could not be made was found out after the training, which was lost; text whose tokens the model does
    not have was an IndexError."""
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"token_ids": list(range(16))}) + "\n")
    out = str(tmp_path / "out")
    with pytest.raises(ModelError, match="is of the family ouro; loops are trained of what depthbatch convert writes"):
        run([str(ouro_directory), out, "--text", str(text)])
    with pytest.raises(ModelError, match="only Llama blocks"):
        run([str(FIDELITY / "retro-olmo-tiny"), out, "--text", str(text)])
    with pytest.raises(ConfigError, match="makes 1 rows"):
        run([str(looped), out, "--text", str(text), "--length", "16"])
    with pytest.raises(ConfigError, match="is not empty"):
        run([str(looped), str(tmp_path), "--text", str(text)])
    with pytest.raises(ConfigError, match="--distill"):
        run([str(looped), out, "--text", str(text), "--distill", "-1"])
    with pytest.raises(ConfigError, match="--loops must be 2 or more"):
        run([str(looped), out, "--text", str(text), "--one-loop-stays", "--loops", "1"])
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
