"""Who may touch the tokenizer: the fast tokenizers' library answers two threads at once with an error, or with a wait
that stops the event loop."""

import concurrent.futures
import threading
from typing import Any

import httpx
import pytest

from depthbatch.frontend.client import Client
from depthbatch.frontend.tokenizer import Tokenizer
from fakes.running import LIMIT_S, RunningFrontend


def test_one_thread_owns_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row ""Already borrowed" from the fast tokenizer": texts that come by HTTP (both endpoints, /tokenize, /detokenize)
    and by ZMQ, many at once, are encoded and decoded by one thread, which is not the event loop's. Bug: either API had a
    thread of its own, with one tokenizer between them."""
    calls: dict[str, set[int]] = {}

    def spy(name: str) -> None:
        original = getattr(Tokenizer, name)

        def spied(*args: Any, **kwargs: Any) -> Any:
            calls.setdefault(name, set()).add(threading.get_ident())
            return original(*args, **kwargs)

        monkeypatch.setattr(Tokenizer, name, spied)

    for name in ("encode", "encode_chat", "decode"):
        spy(name)
    with RunningFrontend(monkeypatch) as frontend, concurrent.futures.ThreadPoolExecutor(8) as pool:
        chat = {"messages": [{"role": "user", "content": "5+5="}], "max_tokens": 2}
        jobs = [
            *(("/v1/completions", {"prompt": "12+30=" * 20, "max_tokens": 2, "echo": True}) for _ in range(8)),
            *(("/v1/chat/completions", chat) for _ in range(8)),
            *(("/tokenize", {"prompt": "say abc="}) for _ in range(8)),
            *(("/detokenize", {"tokens": [20, 21]}) for _ in range(8)),
        ]

        def ask_http(job: tuple[str, dict[str, Any]]) -> int:
            return httpx.post(frontend.url + job[0], json=job[1], timeout=LIMIT_S).status_code

        def ask_zmq(_: int) -> str:
            client = Client(f"ipc://{frontend.engine.run_dir}/api", LIMIT_S)
            kinds = [message["type"] for message in client.generate("12+30=", max_tokens=2)]
            client.close()
            return str(kinds[-1])

        answers, native = pool.map(ask_http, jobs), pool.map(ask_zmq, range(8))
        statuses = dict(zip([path for path, _ in jobs], answers, strict=True))
        assert set(native) == {"finished"}
    assert statuses["/v1/completions"] == statuses["/tokenize"] == statuses["/detokenize"] == 200
    assert calls["encode"] and calls["decode"] and len(set().union(*calls.values())) == 1
    assert frontend.loop_thread not in calls["encode"]
