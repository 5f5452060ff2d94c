"""An engine in one process with tokens that are a known function of (prompt, seed, position): makes HTTP tests fast.

Parameters, detokenizing and stop strings are the frontend's own code; scheduler and worker are replaced by a loop.
It has slots, so that requests can be caught waiting, and counts what holds one.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator

import numpy as np

from depthbatch.common.frames import MAX_LOGPROBS
from depthbatch.common.gates import Gate
from depthbatch.common.grammar_host import GrammarHost
from depthbatch.common.messages import EngineInfo, FinishReason, TokenEvent
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.frontend.grammar import GrammarChecker
from depthbatch.frontend.output import OutputAssembler, OutputDelta, Scoring
from depthbatch.frontend.params import RequestDefaults, SamplingParams
from depthbatch.frontend.tokenizer import Tokenizer
from fakes.chat_tokenizer import EOS_ID, VOCAB_SIZE

R_MAX = 4
MAX_MODEL_LEN = 512
NATURAL_LENGTH = 40  # tokens after which the fake model says end of sequence


def fake_info(**changes: object) -> EngineInfo:
    fields = {
        "model": "fake", "architecture": "fake", "vocab_size": VOCAB_SIZE, "r_max": R_MAX, "r_min": 1, "default_gate": Gate.LOOKAHEAD,
        "gates": (Gate.NONE, Gate.FIXED, Gate.REPLAY, Gate.LOOKAHEAD, Gate.OWN), "default_threshold": 0.5, "kv_layout": "last_exited", "block_size": 16, "num_blocks": 100,
        "kv_bytes_per_token": 1024, "max_model_len": MAX_MODEL_LEN, "boundary_layers": 0, "buckets": (1, 2, 4, 8), "device": "cpu",
        "dtype": "float32", "eos_token_ids": (EOS_ID,), "max_logprobs": MAX_LOGPROBS, "grammars": True,
    }  # fmt: skip
    return EngineInfo(**{**fields, **changes})  # type: ignore[arg-type]


def demo_host() -> GrammarHost:
    """For grammars: the demo's tokens are bytes, as the fake model's are."""
    return GrammarHost(resolve_model_dir("demo") / "tokenizer.json", 264, (2,))


def fake_token(prompt: list[int], seed: int, position: int) -> int:
    """One of 64 byte tokens: ASCII letters, and the bytes of some longer characters that only fit together by luck."""
    digest = hashlib.blake2b(repr((prompt, seed, position)).encode(), digest_size=2).digest()
    alphabet = b"abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,\xf0\x9f\x98\x80\xd7\xa9\xea\xb0\x80"
    return alphabet[int.from_bytes(digest, "little") % len(alphabet)]


def fake_logprob(token: int) -> float:
    """Of any token anywhere: multiples of 1/64, so that they survive float32."""
    return -(1 + token % 7) / 64


def fake_scores(tokens: list[int]) -> bytes:
    """Rows of scores: the token itself is likeliest, its successors follow."""
    rows = np.zeros((len(tokens), 1 + 2 * MAX_LOGPROBS), np.int32)
    for row, token in zip(rows, tokens, strict=True):
        top = [(token + i) % VOCAB_SIZE for i in range(MAX_LOGPROBS)]
        logprobs = [fake_logprob(token) - i for i in range(MAX_LOGPROBS)]
        row[0] = np.float32(fake_logprob(token)).view(np.int32)
        row[1 : 1 + MAX_LOGPROBS] = top
        row[1 + MAX_LOGPROBS :] = np.array(logprobs, np.float32).view(np.int32)
    return rows.tobytes()


class FakeEngine:
    """``step_s`` seconds a token; ``gate_open`` cleared holds every sequence in prefill."""

    def __init__(self, tokenizer: Tokenizer | None, slots: int = 8, step_s: float = 0.0, **info: object) -> None:
        self.info = fake_info(**info)
        self.tokenizer = tokenizer
        self.step_s = step_s
        self.fail_at: int | None = None  # position at which a sequence ends with an internal error
        self.prefill_open = asyncio.Event()
        self.prefill_open.set()
        self.waiting = 0
        self.running: dict[str, asyncio.Event] = {}
        self.tokens_made = 0
        self._slots = asyncio.Semaphore(slots)
        self._defaults = RequestDefaults(self.info, seed=0)
        self._grammars = GrammarChecker(demo_host)
        self._aborts: set[str] = set()
        self._known: set[str] = set()

    async def abort(self, request_id: str) -> bool:
        if request_id in self._known:
            self._aborts.add(request_id)
        return request_id in self._known

    async def generate(
        self, prompt: list[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[OutputDelta, None]:
        resolved = self._defaults.resolve(params, len(prompt), ordinal=0)
        if params.constraint is not None:
            self._grammars.check(resolved.grammar)  # proved, then not obeyed
        detokenizer = self.tokenizer.detokenizer() if self.tokenizer else None
        assembler = OutputAssembler(
            request_id,
            detokenizer,
            tuple(params.stop),
            params.min_tokens,
            Scoring(params.logprobs, params.prompt_logprobs, prompt),
        )
        self._known.add(request_id)
        self.waiting += 1
        try:
            await self._slots.acquire()
        except BaseException:
            self._known.discard(request_id)
            raise
        finally:
            self.waiting -= 1
        self.running[request_id] = asyncio.Event()
        try:
            while not self.prefill_open.is_set() and request_id not in self._aborts:
                await asyncio.sleep(0.005)
            for position in range(resolved.max_tokens):
                await asyncio.sleep(self.step_s)
                delta = assembler.push(self._event(prompt, resolved, request_id, position))
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self.running.pop(request_id).set()
            self._known.discard(request_id)
            self._aborts.discard(request_id)
            self._slots.release()

    def _event(self, prompt: list[int], resolved: object, request_id: str, position: int) -> TokenEvent:
        if request_id in self._aborts:
            return TokenEvent(0, (), (), FinishReason.ABORT)
        if self.fail_at == position:
            raise RuntimeError("the fake engine was told to fail here")
        seed = resolved.seed if resolved.temperature > 0 else 0
        token = fake_token(prompt, seed, position)
        if position >= NATURAL_LENGTH:
            token = EOS_ID
        depth = R_MAX if position == 0 else min(resolved.max_loops, max(resolved.min_loops, 1 + position % R_MAX))
        self.tokens_made += 1
        enough = position + 1 >= resolved.min_tokens
        scores = fake_scores([token]) if resolved.logprobs else b""
        prompt_scores = fake_scores(prompt[1:]) if resolved.prompt_logprobs and position == 0 else b""
        stop = token in resolved.stop_token_ids and enough
        last = FinishReason.LENGTH if position + 1 == resolved.max_tokens else None
        reason = FinishReason.STOP if stop else last
        return TokenEvent(0, (token,), (depth,), reason, token if stop else None, scores, prompt_scores)
