"""Directories of the tiny random checkpoints in the public formats."""

from pathlib import Path

import pytest

FIDELITY = Path(__file__).resolve().parents[1] / "data" / "fidelity"


@pytest.fixture
def ouro_directory() -> Path:
    """Ouro: 3 layers, 4 loops."""
    return FIDELITY / "ouro-tiny"


@pytest.fixture
def huginn_directory() -> Path:
    """Huginn: 2-4-2."""
    return FIDELITY / "huginn-tiny"
