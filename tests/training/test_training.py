"""Training runs: the loss falls, a resumed run is the same run, the objectives are what they claim."""

import argparse
import itertools
import math
import random
import re
from pathlib import Path

import pytest
import torch

from depthbatch.benchmarks import accuracy
from depthbatch.common.errors import ConfigError
from depthbatch.deploy.cli.train import add_train_demo_arguments, run_train_demo
from depthbatch.training import recipes as demo
from depthbatch.training.batches import step_batches
from depthbatch.training.demo_tokenizer import VOCAB_SIZE, build_tokenizer
from depthbatch.training.huginn import HuginnOutput, HuginnSize, HuginnTrainer, at, initial_state
from depthbatch.training.objectives import (
    exit_log_probabilities,
    expected_loss,
    gate_loss,
    huginn_loss,
    lookup_loss,
    sample_loops,
    shared_plane_loss,
)
from depthbatch.training.ouro import OuroOutput, OuroSize, OuroTrainer
from depthbatch.training.trainer import Run, RunConfig, learning_rate_factor

SMALL_OURO = OuroSize(VOCAB_SIZE, 32, 64, 1, 1, 128, total_ut_steps=3)
SMALL_HUGINN = HuginnSize(VOCAB_SIZE, 32, 1, 64, 1, 1, 1, 128)


def ouro_run(checkpoint: Path, steps: int, seed: int = 0) -> Run:
    """A small Ouro run of stage I."""
    model = OuroTrainer(SMALL_OURO, seed)
    config = RunConfig(seed, steps, 8, checkpoint, checkpoint_every=2)
    return Run(model, lambda batch, _: expected_loss(model, batch), config)


def huginn_run(checkpoint: Path, steps: int) -> Run:
    """A small Huginn run with random loop counts."""
    model = HuginnTrainer(SMALL_HUGINN)
    config = RunConfig(0, steps, 8, checkpoint)

    def objective(batch, step):  # type: ignore[no-untyped-def]
        loops = sample_loops(random.Random(step), 3, 6)
        state = initial_state((*batch.ids.shape, 32), torch.Generator().manual_seed(step))
        return huginn_loss(model, batch, loops, state, 2)

    return Run(model, objective, config)


@pytest.mark.parametrize("make", [ouro_run, huginn_run])
def test_a_few_steps_reduce_the_loss(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    run = make(tmp_path / "run.pt", 60)
    losses = [run.train_step() for _ in range(60)]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_resume_is_bit_equal(tmp_path: Path) -> None:
    """Stop after 4 of 8 steps and go on in a new run: every weight and moment must be what 8 steps in a row give."""
    straight = ouro_run(tmp_path / "a.pt", 8)
    straight.train("straight")
    first = ouro_run(tmp_path / "b.pt", 8)
    for _ in range(4):
        first.train_step()
    first.save()
    second = ouro_run(tmp_path / "b.pt", 8, seed=0)
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.add_(1.0)
    assert second.resume() and second.step == 4
    second.train("resumed")
    for name, value in straight.model.state_dict().items():
        assert second.model.state_dict()[name].equal(value), name
    saved, resumed = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in "ab")
    for a, b in zip(saved["optimizers"], resumed["optimizers"], strict=True):
        for key, state in a["state"].items():
            for part, value in state.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(b["state"][key][part])), (key, part)


def test_resume_without_a_checkpoint_starts_afresh(tmp_path: Path) -> None:
    assert not ouro_run(tmp_path / "none.pt", 4).resume()


def test_learning_rate_warms_up_and_ends_at_zero() -> None:
    factors = [learning_rate_factor(step, 1000) for step in range(1001)]
    assert factors[0] == pytest.approx(0.01) and factors[99] == 1.0 and factors[600] == 1.0
    assert factors[1000] == 0.0 and factors[900] == pytest.approx(100 / 350)
    assert all(a >= b for a, b in itertools.pairwise(factors[99:]))


def test_exit_distribution_by_hand() -> None:
    """Hazards 1/2, 1/4 and an ignored last one: 1/2, 1/8, 3/8."""
    logits = torch.tensor([[0.0], [math.log(1 / 3)], [50.0]])
    p = exit_log_probabilities(logits).exp()[:, 0]
    torch.testing.assert_close(p, torch.tensor([1 / 2, 1 / 8, 3 / 8]))


def test_gate_loss_trains_the_gate_alone_and_towards_the_useful_loop(tmp_path: Path) -> None:
    """Give the model a head that is right only from its second loop on: the gate must learn to stay at loop 1."""
    model = OuroTrainer(SMALL_OURO, 1)
    batch = step_batches(build_tokenizer(), 0, 0, 8)[0]
    gate_loss(model, batch).backward()  # type: ignore[no-untyped-call]
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}
    run = ouro_run(tmp_path / "run.pt", 80)
    for _ in range(80):
        run.train_step()
    trained = run.model
    assert isinstance(trained, OuroTrainer)
    optimizer = torch.optim.Adam(trained.model.early_exit_gate.parameters(), lr=0.05)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = gate_loss(trained, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


def test_lookup_loss_targets_one_lookup_a_loop() -> None:
    """A head wired to the partial answer of each loop has no loss; one wired to the final answer has some."""
    model = OuroTrainer(OuroSize(VOCAB_SIZE, 32, 64, 1, 1, 128), 1)
    batch = step_batches(build_tokenizer(), 0, 0, 16)[-1]
    assert not batch.partial[0].equal(batch.partial[-1])
    wanted = batch.partial[1:]

    class Oracle(OuroTrainer):
        def forward(self, ids: torch.Tensor, loops: int | None = None) -> OuroOutput:
            states = torch.nn.functional.one_hot(wanted.clamp_min(0), VOCAB_SIZE).float()
            return OuroOutput(states[0], torch.cat((states[:1] * 0, states)), torch.zeros(4, *ids.shape))

        def logits(self, states: torch.Tensor) -> torch.Tensor:
            return 50.0 * states

    oracle = Oracle(model.size)
    assert lookup_loss(oracle, batch).item() < 1e-3
    wanted = torch.stack([batch.targets] * 3)
    assert lookup_loss(oracle, batch).item() > 1.0


def test_huginn_loss_targets_one_lookup_a_step() -> None:
    """As above; the fifth step, which has no more look-ups to make, keeps the final answer."""
    batch = step_batches(build_tokenizer(), 0, 0, 16)[-1]
    wanted = batch.partial

    class Oracle(HuginnTrainer):
        def forward(
            self, ids: torch.Tensor, loops: int, state: torch.Tensor | None = None, gradient_loops: int | None = None
        ) -> HuginnOutput:
            states = torch.nn.functional.one_hot(wanted.clamp_min(0), VOCAB_SIZE).float()
            return HuginnOutput(torch.cat((states, states[-1:]))[:loops], states[0], [])

        def logits(self, states: torch.Tensor) -> torch.Tensor:
            return 50.0 * states

        head = logits

    oracle = Oracle(SMALL_HUGINN)
    assert huginn_loss(oracle, batch, 5).item() < 1e-3
    assert huginn_loss(oracle, batch, 5, gradient_loops=2).item() < 1e-3
    wanted = torch.stack([batch.targets] * 4)
    assert huginn_loss(oracle, batch, 5).item() > 1.0
    assert huginn_loss(oracle, batch, 5, gradient_loops=2).item() < 1e-3  # steps 4 and 5 hold the final answer anyway


def test_the_loss_of_a_shared_plane_reads_what_decoding_gives() -> None:
    """Half of it is of the tokens run again behind their prompts, each at its own position; the other half is
    ``huginn_loss``, which is small here."""
    batch = step_batches(build_tokenizer(), 0, 0, 16)[-1]
    wanted = torch.nn.functional.one_hot(
        torch.cat((batch.partial, batch.partial[-1:])).clamp_min(0), VOCAB_SIZE
    ).float()
    shift = 0

    class Oracle(HuginnTrainer):
        def forward(self, ids: torch.Tensor, loops: int, *_: object) -> HuginnOutput:
            return HuginnOutput(wanted[:loops], wanted[0], [])

        def decode(self, whole: HuginnOutput, positions: torch.Tensor, loops: int, *_: object) -> torch.Tensor:
            return torch.stack([at(each, (positions - shift).clamp_min(0)) for each in wanted[:loops]])

        def logits(self, states: torch.Tensor) -> torch.Tensor:
            return 50.0 * states

        head = logits

    oracle = Oracle(SMALL_HUGINN)
    assert shared_plane_loss(oracle, batch, 5, 4).item() < 1e-3
    shift = 1
    assert shared_plane_loss(oracle, batch, 5, 4).item() > 1.0


def test_loop_counts_stay_in_range_and_near_the_mean() -> None:
    rng = random.Random(0)
    counts = [sample_loops(rng, 6, 16) for _ in range(4000)]
    assert min(counts) == 1 and max(counts) == 16
    assert 6 < sum(counts) / len(counts) < 7.2  # Poisson of mean 6, plus one, cut at 16


def test_train_demo_command_writes_a_model_with_its_gates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is scored by one engine; those of other layouts and of drafts are started by test_accuracy.py."""
    monkeypatch.setattr(accuracy, "layout_runs", lambda *_: [])
    monkeypatch.setattr(accuracy, "may_read_drafts", lambda *_: False)
    monkeypatch.setattr(demo, "GATE_STEPS", 2)
    monkeypatch.setattr(demo, "DISTIL_STEPS", range(1))
    parser = argparse.ArgumentParser()
    add_train_demo_arguments(parser)
    output = tmp_path / "model"
    arguments = ["--output", str(output), "--steps", "2", "--batch-size", "4", "--examples", "12"]
    assert run_train_demo(parser.parse_args(arguments)) == 0
    files = {path.name for path in output.iterdir()}
    expected = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert files >= expected | {"lookahead_gate.safetensors", "preloop_gate.safetensors"}
    said = capsys.readouterr().err
    assert "demo: 12 questions" in said and "fixed depth" in said and re.search(r"^own +0\.5 ", said, re.MULTILINE)


def test_train_demo_names_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    parser = argparse.ArgumentParser()
    add_train_demo_arguments(parser)
    with pytest.raises(ConfigError, match="file"):
        run_train_demo(parser.parse_args(["--output", str(tmp_path / "file" / "x"), "--steps", "1"]))
