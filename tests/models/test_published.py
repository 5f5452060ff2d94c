"""The engine's models give the published code's logits, no reference of ours between.

The values were computed by other code on weights with random norms; every depth and position of four prompts is compared.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from depthbatch.common.kv_layout import KVLayout
from depthbatch.worker.models.interface import WorkItem
from depthbatch.worker.models.loader import load_model
from fakes.checkpoints import FIDELITY, tiny_config, write_checkpoint
from fakes.model_batch import Batch, packed_rows

RETROFITTED = ("retro-llama-tiny", "retro-tinyllama-tiny", "retro-olmo-tiny")
ATOL = 1e-4


class Published:
    """Four prompts as one packed batch, and what the published code says about them."""

    def __init__(self, name: str, model_dir: Path | None = None, **options: Any) -> None:
        self.values = np.load(FIDELITY / name / "expected.npz")
        self.prompts = [self.values[f"prompt_{i}"].tolist() for i in range(4)]
        self.tokens = [token for prompt in self.prompts for token in prompt]
        self.model = load_model(str(model_dir or FIDELITY / name), **options)
        self.batch = Batch(self.model, KVLayout.DEPTH_INDEXED, 4)

    def expected(self, key: str, index: int) -> np.ndarray:
        """[all positions, ...] of entry ``index`` of an array."""
        return np.concatenate([self.values[f"{key}_{i}"][index] for i in range(4)])

    def prelude(self) -> WorkItem:
        return self.batch.prelude(self.tokens, packed_rows(self.prompts, 1))

    def check_depths(self, item: WorkItem, key: str, depths: list[int]) -> None:
        """Runs the core from ``item`` and compares the logits after each of ``depths``."""
        for loop in range(1, max(depths) + 1):
            rows = packed_rows(self.prompts, loop)
            before, item = item, self.batch.core(item, rows)
            if key == "logits" and "convergence_0" in self.values:
                distance = self.model.convergence(before, item)
                np.testing.assert_allclose(distance, self.expected("convergence", loop - 1), atol=ATOL)
            if loop in depths:
                logits = self.batch.logits(item, rows)
                np.testing.assert_allclose(logits, self.expected(key, depths.index(loop)), atol=ATOL)


@pytest.mark.parametrize("name", ("huginn-tiny", *RETROFITTED))
def test_logits_and_distances_from_a_zero_state(name: str) -> None:
    """Blocks of each layout, grouped heads, llama3 scaling (all three zones occur), one norm after the coda: leaving out
    any of them moves logits by far more than 1e-4."""
    published = Published(name, r_max=8)
    published.check_depths(published.prelude(), "logits", published.values["steps"].tolist())


@pytest.mark.parametrize("name", RETROFITTED)
def test_logits_from_a_given_state(name: str) -> None:
    """The state is the adapter's first half: from a zero state an adapter with its halves swapped could pass one loop."""
    published = Published(name)
    state = torch.from_numpy(np.concatenate([published.values[f"init_state_{i}"] for i in range(4)]))
    item = (state, published.prelude()[1])
    published.check_depths(item, "logits_from_state", published.values["state_steps"].tolist())


@pytest.mark.parametrize("name", RETROFITTED)
def test_drawn_states_are_distributed_as_the_published_ones(name: str) -> None:
    """Standard deviation and cut from the config's ``init_values``, not Huginn's formula for another width."""
    published = Published(name, state_init="seeded")
    ours = published.prelude()[0]
    theirs = np.concatenate([published.values[f"init_state_{i}"] for i in range(4)])
    assert abs(ours.std().item() / theirs.std() - 1) < 0.05
    assert ours.abs().max() <= 3 * 0.008703882797784892 * 1.0001
    assert ours.abs().max() > 0.8 * np.abs(theirs).max()


@pytest.mark.parametrize("mode", ["embed-init", "skip-adapter"])
def test_other_starts_of_the_fork(mode: str, tmp_path: Path) -> None:
    """``initial_state_mode``: the injection as the state, and the first loop without the adapter."""
    config = tiny_config(FIDELITY / "retro-olmo-tiny", initial_state_mode=mode)
    tensors = load_file(FIDELITY / "retro-olmo-tiny" / "model.safetensors")
    published = Published("retro-olmo-tiny", write_checkpoint(tmp_path, config, tensors))
    key = "logits_" + mode.replace("-", "_")
    published.check_depths(published.prelude(), key, published.values["state_steps"].tolist())


@pytest.mark.parametrize(("key", "skips"), [("logits", False), ("logits_skip_norm", True)])
def test_nanbeige_logits(key: str, skips: bool, tmp_path: Path) -> None:
    """One to four loops, with the norm after every loop and after the last alone; heads are not width / head_dim."""
    source = FIDELITY / "nanbeige-tiny"
    config = tiny_config(source, skip_loop_final_norm=skips)
    model_dir = write_checkpoint(tmp_path, config, load_file(source / "model.safetensors"))
    published = Published("nanbeige-tiny", model_dir, r_max=4)
    published.check_depths(published.prelude(), key, published.values["loops"].tolist())


def test_dory_logits() -> None:
    """One to four loops; prompts of 33 and 64 tokens are longer than the window of 12, so a layer that forgets it shows."""
    published = Published("dory-tiny", r_max=4)
    published.check_depths(published.prelude(), "logits", published.values["loops"].tolist())
