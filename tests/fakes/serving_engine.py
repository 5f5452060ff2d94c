"""An engine in one process with tokens that are a known function of (prompt, seed, position): makes HTTP tests fast.

Parameters, detokenizing and stop strings are the frontend's own code; scheduler and worker are replaced by a loop.
It has slots, so that requests can be caught waiting, and counts what holds one.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from depthbatch.common.frames import MAX_LOGPROBS
from depthbatch.common.gates import Gate
from depthbatch.common.grammar_host import GrammarHost
from depthbatch.common.messages import EngineInfo, FinishReason, RequestParams, TokenEvent
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.frontend.grammar import GrammarChecker
from depthbatch.frontend.output import IndexedDelta, OutputAssembler, OutputDelta
from depthbatch.frontend.params import RequestDefaults, SamplingParams
from depthbatch.frontend.prompt_checks import check_token_ids
from depthbatch.frontend.prompts import assembler_of, check_stop
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


def fake_drafts(position: int) -> tuple[int, int]:
    """Accepted and rejected with the token at an output position."""
    return int(position % 3 == 1), int(position % 5 == 2)


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


@dataclass(eq=False)
class FakeSequence:
    """One request; ``name`` is its caller's."""

    name: str
    prompt: list[int]
    resolved: RequestParams
    assembler: OutputAssembler
    deadline_s: float | None  # on the loop's clock
    aborted: bool = False


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
        self.running: set[FakeSequence] = set()
        self.known: set[FakeSequence] = set()
        self.tokens_made = 0
        self.resolved: list[RequestParams] = []  # of all sequences
        self.clients: list[int] = []  # of all requests, in the order they came
        self._slots = asyncio.Semaphore(slots)
        self._defaults = RequestDefaults(self.info, seed=0)
        self._grammars = GrammarChecker(demo_host)

    async def abort(self, request_id: str) -> bool:
        found = [sequence for sequence in self.known if sequence.name == request_id]
        for sequence in found:
            sequence.aborted = True
        return bool(found)

    async def abort_all(self) -> None:
        for sequence in self.known:
            sequence.aborted = True

    keeps_answers = False

    def kept_answer(self, request_id: str) -> None:
        return None

    def abort_kept(self, request_id: str) -> bool:
        return False

    def resume_all(self, *_: object) -> AsyncGenerator[list[IndexedDelta], None]:
        raise NotImplementedError

    async def generate_all(
        self,
        requests: Sequence[tuple[list[int], SamplingParams]],
        request_id: str,
        client: int = 0,
        form: bytes | None = None,
    ) -> AsyncGenerator[list[IndexedDelta], None]:
        """One task a sequence; their deltas as they come. Nothing starts unless every request is good."""
        self.clients.append(client)
        sequences = [self._sequence(request_id, prompt, params) for prompt, params in requests]
        queue: asyncio.Queue[IndexedDelta | BaseException | None] = asyncio.Queue()

        async def pump(index: int, sequence: FakeSequence) -> None:
            try:
                await self._run(sequence, lambda delta: queue.put_nowait(IndexedDelta(index, delta)))
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        self.known.update(sequences)
        tasks = [asyncio.create_task(pump(index, sequence)) for index, sequence in enumerate(sequences)]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield [item]
        finally:
            for task in tasks:
                task.cancel()
            self.known.difference_update(sequences)  # a client that leaves now cancels what follows
            await asyncio.gather(*tasks, return_exceptions=True)

    def _sequence(self, name: str, prompt: list[int], params: SamplingParams) -> FakeSequence:
        """Raises RequestError, as EngineClient.check does."""
        check_stop(params, self.tokenizer)
        check_token_ids(prompt, self.info)
        resolved = self._defaults.resolve(params, len(prompt), 0, self.tokenizer and self.tokenizer.encode_bare)
        self.resolved.append(resolved)
        if params.constraint is not None:
            self._grammars.check(resolved.grammar)  # proved, then not obeyed
        deadline_s = None if params.timeout_s is None else asyncio.get_running_loop().time() + params.timeout_s
        return FakeSequence(name, prompt, resolved, assembler_of(name, prompt, params, self.tokenizer), deadline_s)

    async def _run(self, sequence: FakeSequence, put: Callable[[OutputDelta], None]) -> None:
        try:
            async with asyncio.timeout_at(sequence.deadline_s), self._slot(sequence):
                while not self.prefill_open.is_set() and not sequence.aborted:
                    await asyncio.sleep(0.005)
                for position in range(sequence.resolved.max_tokens):
                    await asyncio.sleep(self.step_s)
                    delta = sequence.assembler.push(self._event(sequence, position))
                    put(delta)
                    if delta.finish_reason is not None:
                        return
        except TimeoutError:
            put(sequence.assembler.push(TokenEvent(0, (), (), FinishReason.TIMEOUT)))

    @contextlib.asynccontextmanager
    async def _slot(self, sequence: FakeSequence) -> AsyncIterator[None]:
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.running.add(sequence)
        try:
            yield
        finally:
            self.running.discard(sequence)
            self._slots.release()

    def _event(self, sequence: FakeSequence, position: int) -> TokenEvent:
        prompt, resolved = sequence.prompt, sequence.resolved
        if sequence.aborted:
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
        accepted, rejected = fake_drafts(position) if resolved.speculation else (0, 0)
        event = TokenEvent(0, (token,), (depth,), reason, token if stop else None, scores, prompt_scores)
        cached = 0 if position or resolved.cache_salt else len(prompt) // 2
        return msgspec.structs.replace(event, accepted_drafts=accepted, rejected_drafts=rejected, cached_tokens=cached)
