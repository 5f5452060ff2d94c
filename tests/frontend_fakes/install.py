"""Puts the fake engine's processes in the place of the real ones."""

import sys
from pathlib import Path

import depthbatch.frontend.llm as llm_module
import pytest
from depthbatch.frontend.launch import Launcher
from depthbatch.frontend.tokenizer import Tokenizer

FAKE = Path(__file__).parent / "fake_engine.py"
_load = llm_module.load_model_tokenizer


def use_fake_engine(patch: pytest.MonkeyPatch) -> None:
    """The Launcher starts fake_engine.py; every model has the demo's tokenizer, whatever it is called."""
    patch.setattr(Launcher, "program", staticmethod(lambda name: [sys.executable, str(FAKE), name]))
    for module in ("llm", "async_engine"):
        patch.setattr(f"depthbatch.frontend.{module}.load_model_tokenizer", _load_demo)


def _load_demo(model: str) -> Tokenizer | None:
    return _load("demo")
