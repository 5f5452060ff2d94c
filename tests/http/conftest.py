"""One server over the fake engine for the tests that do not disturb it; others start their own."""

from collections.abc import Iterator

import httpx
import pytest

from depthbatch.frontend.tokenizer import Tokenizer
from fakes.chat_tokenizer import byte_tokenizer
from fakes.http_server import LiveServer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def live(tokenizer: Tokenizer) -> Iterator[LiveServer]:
    with LiveServer(tokenizer) as server:
        yield server


@pytest.fixture(scope="session")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=20) as client:
        yield client
