"""``check_family`` agrees with the references of known families, and says where a family or a reference is wrong."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from depthbatch.common.errors import ModelError
from depthbatch.common.kv_layout import KVLayout
from depthbatch.deploy.family_check import Reference, check_family, random_weights
from depthbatch.worker.layers.blocks import AttentionContext
from depthbatch.worker.models.huginn import Huginn
from depthbatch.worker.models.interface import WorkItem
from depthbatch.worker.models.llama_like import StackedModel
from depthbatch.worker.models.nanbeige import NanbeigeFamily
from fakes.checkpoints import FIDELITY, HUGINN_TINY
from reference import decoding, huginn, nanbeige

NANBEIGE = FIDELITY / "nanbeige-tiny"


def whole(model: decoding.Reference) -> Reference:
    """A reference's forward pass of a whole sequence, every loop with K/V of its own."""

    def logits(ids: Sequence[int], loops: int) -> torch.Tensor:
        memory = decoding.new_memory(model, "depth_indexed", loops, len(ids))
        state = model.prelude(ids, 0, memory)
        for loop in range(loops):
            state = model.core(state, loop, 0, memory)
        return model.logits(state, 0, memory)

    return logits


@pytest.fixture
def right() -> Reference:
    """Nanbeige's."""
    return whole(nanbeige.NanbeigeReference(NANBEIGE))


def test_known_families_agree() -> None:
    """Two references that were written from published code: without layers outside the loop, and with a state beside the
    injection. Tokens are compared under the layouts that keep every loop, on both backends."""
    found = check_family(NANBEIGE, whole(nanbeige.NanbeigeReference(NANBEIGE)), outputs=8)
    assert found.largest_difference < 1e-5 and found.layouts == (KVLayout.DEPTH_INDEXED,)
    assert (found.tokens, found.near_ties) == (2 * 5 * 8, 0)
    found = check_family(HUGINN_TINY, whole(huginn.HuginnReference(HUGINN_TINY)), outputs=4)
    assert found.layouts == (KVLayout.LAST_EXITED, KVLayout.DEPTH_INDEXED) and found.tokens == 2 * 2 * 5 * 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda logits, loops: logits + 1e-3 * logits.abs().max() * (loops == 2), "logits after loop 2"),
        (lambda logits, loops: logits.flip(-1), "logits after loop 1"),
        (lambda logits, loops: logits * torch.nan, "logits after loop 1"),
        (lambda logits, loops: logits[-1:], r"gives \[1, 176\] logits, not \[5, 176\]"),
    ],
)
def test_another_reference_is_told_apart(
    wrong: Callable[[torch.Tensor, int], torch.Tensor], message: str, right: Reference
) -> None:
    """The loop at which it differs is named; a NaN is no agreement, and neither is one row for all."""
    with pytest.raises(ModelError, match=message):
        check_family(NANBEIGE, lambda ids, loops: wrong(right(ids, loops), loops))


def vector(like: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-3, 3, like.shape[-1])


def told(model: decoding.Reference) -> decoding.Reference:
    """The model, but the last loop adds a vector to the state."""
    plain = model.core

    def core(state: decoding.State, plane: int, start: int, memory: decoding.Memory) -> decoding.State:
        return plain((state[0] + (plane == model.r_max - 1) * vector(state[0]), *state[1:]), plane, start, memory)

    model.core = core  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize(
    ("family", "directory", "model"),
    [(StackedModel, NANBEIGE, nanbeige.NanbeigeReference), (Huginn, HUGINN_TINY, huginn.HuginnReference)],
)
def test_rows_at_several_loops_are_tried(
    family: type[StackedModel],
    directory: Path,
    model: Callable[[Path], decoding.Reference],
    by_row: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that takes the loop of the first row for that of all gives right logits of whole prompts, and wrong tokens: with
    a coda, too, where all tokens are at full depth."""
    plain = family.core

    def core(
        self: StackedModel, item: WorkItem, positions: torch.Tensor, loops: torch.Tensor, attend: AttentionContext
    ) -> WorkItem:
        last = (loops if by_row else loops[:1]) == self.spec.r_max
        changed = item[0] + last.unsqueeze(-1) * vector(item[0])
        return plain(self, (changed, *item[1:]), positions, loops, attend)

    monkeypatch.setattr(family, "core", core)
    check = partial(check_family, directory, whole(told(model(directory))), outputs=8)
    if by_row:
        assert check().near_ties == 0
    else:
        with pytest.raises(ModelError, match=r"attention backend default, kv_layout \w+: output token"):
            check()


def test_layouts_that_share_planes_compare_no_tokens(right: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not compared is not counted."""
    loops = NanbeigeFamily.loops
    single = {"layouts": (KVLayout.SINGLE,), "default_layout": KVLayout.SINGLE}
    monkeypatch.setattr(NanbeigeFamily, "loops", lambda self, config: replace(loops(self, config), **single))
    found = check_family(NANBEIGE, right)
    assert (found.tokens, found.layouts) == (0, ()) and found.largest_difference < 1e-5


def test_random_weights(tmp_path: Path) -> None:
    """Norms differ from 1, or one that is left out would not show; weights that are there are kept."""
    (tmp_path / "config.json").write_bytes((NANBEIGE / "config.json").read_bytes())
    random_weights(tmp_path)
    model = whole(nanbeige.NanbeigeReference(tmp_path))
    assert check_family(tmp_path, model, outputs=2).tokens == 20
    norm = decoding.read_model(tmp_path)[1]["model.norm.weight"]
    assert norm.std() > 0.1
    with pytest.raises(ModelError, match=r"model\.safetensors is there already"):
        random_weights(tmp_path)
