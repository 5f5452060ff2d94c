"""The frontend under test runs the fake engine's processes instead of the real ones."""

import pytest

from fakes.install import use_fake_engine


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_engine(monkeypatch)
