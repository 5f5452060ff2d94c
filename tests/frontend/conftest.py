"""The frontend under test runs the fake engine's processes instead of the real ones."""

import sys
from pathlib import Path

import pytest
from depthbatch.frontend.launch import Launcher

FAKE = Path(__file__).parent.parent / "frontend_fakes" / "fake_engine.py"


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Launcher starts fake_engine.py. The model's tokenizer is the demo's, whatever the model is called."""
    import depthbatch.frontend.llm as llm_module

    monkeypatch.setattr(Launcher, "program", staticmethod(lambda name: [sys.executable, str(FAKE), name]))
    load = llm_module.load_model_tokenizer
    fake_load = lambda model: load("demo")  # noqa: E731
    monkeypatch.setattr("depthbatch.frontend.llm.load_model_tokenizer", fake_load)
    monkeypatch.setattr("depthbatch.frontend.async_engine.load_model_tokenizer", fake_load)
