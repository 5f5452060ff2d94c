"""Puts the fake engine's processes in the place of the real ones."""

import sys
from pathlib import Path

import pytest

from depthbatch.common.config import EngineConfig
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.frontend.processes import Launcher
from depthbatch.frontend.prompts import ModelTexts
from depthbatch.frontend.tokenizer import load_tokenizer

FAKE = Path(__file__).parent / "engine_processes.py"


def use_fake_engine(patch: pytest.MonkeyPatch) -> None:
    """The Launcher starts the fake engine; every model has the demo's tokenizer, whatever it is called."""
    patch.setattr(Launcher, "program", staticmethod(lambda name: [sys.executable, str(FAKE), name]))
    for module in ("llm", "async_engine"):
        patch.setattr(f"depthbatch.frontend.{module}.load_texts", _load_demo)
        patch.setattr(f"depthbatch.frontend.{module}.resolve_model_dir", lambda model: None)


def _load_demo(config: EngineConfig) -> ModelTexts:
    return ModelTexts(load_tokenizer(resolve_model_dir("demo")), {})
