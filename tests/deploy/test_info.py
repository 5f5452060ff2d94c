"""What ``depthbatch info`` says of a model is what its engine has."""

import argparse
from pathlib import Path

import pytest

from depthbatch.common.config import EngineConfig
from depthbatch.deploy.cli.info import add_info_arguments, run_info
from fakes.checkpoints import FIDELITY, OURO_TINY
from fakes.lockstep import LockstepEngine


def row(name: str, model: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The row ``name`` of what is printed."""
    parser = argparse.ArgumentParser()
    add_info_arguments(parser)
    assert run_info(parser.parse_args([str(model), "--kv-blocks", "40"])) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{name} ")]
    return line.removeprefix(name).strip()


@pytest.mark.parametrize("model", [OURO_TINY, FIDELITY / "nanbeige-tiny", FIDELITY / "dory-tiny"], ids=lambda m: m.name)
def test_gates_are_those_of_the_engine(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: replay and gates that decide were offered whatever the KV layout, while the engine has none and fixed under
    depth_indexed. The first list is the default layout's; layouts with others follow."""
    own, *others = row("gates", model, capsys).split("; under ")
    by_layout = dict(other.split(": ") for other in others)
    values = {"model": str(model), "max_num_seqs": 2, "kv_blocks": 20}
    default = LockstepEngine(EngineConfig.from_values(values))
    for layout in default._model.spec.layouts:
        running = LockstepEngine(EngineConfig.from_values(values | {"kv_layout": str(layout)}))
        told = by_layout.get(layout, own.replace(" *", ""))
        assert told == ", ".join(gate.label for gate in running.built.info.gates)
    assert own.replace(" *", "") == ", ".join(gate.label for gate in default.built.info.gates)
    assert f"{default.built.info.default_gate.label} *" in own


@pytest.mark.parametrize(("blocks", "all_fit"), [(40, False), (10_000, True)])
def test_whether_memory_or_the_sequences_end_the_count(
    blocks: int, all_fit: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: where memory is plenty, every layout and type of K/V showed the same count, and nothing said that it was the most
    which the sequences can have."""
    parser = argparse.ArgumentParser()
    add_info_arguments(parser)
    assert run_info(parser.parse_args(["demo", "--kv-blocks", str(blocks), "--max-num-seqs", "2"])) == 0
    *_, last, legend = capsys.readouterr().out.splitlines()
    assert last.endswith(" all") == all_fit
    assert legend == "* = default" + (", all = as many as 2 sequences of 2048 positions can have" if all_fit else "")
