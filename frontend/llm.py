"""LLM: prompts in, outputs out, in the caller's thread. The plain way to use the engine from Python."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import DepthbatchError, RequestError
from depthbatch.common.messages import SchedulerStats
from depthbatch.common.model_dir import resolve_model_dir
from depthbatch.frontend.engine_client import EngineClient
from depthbatch.frontend.grammar import GrammarChecker, host_of
from depthbatch.frontend.health import EngineHealth
from depthbatch.frontend.live_requests import News
from depthbatch.frontend.loading_progress import LoadingProgress
from depthbatch.frontend.output import IndexedDelta, OutputAssembler, RequestOutput
from depthbatch.frontend.params import SamplingParams
from depthbatch.frontend.process_metrics import flat_stats
from depthbatch.frontend.prompts import Prompt, assembler_of, encode_prompt, load_texts, print_start

Conversation = Sequence[Mapping[str, Any]]
Progress = Callable[[int, int], None]  # finished and total requests


class LLM:
    """An engine in its own processes, used from one thread.

        with LLM("demo") as llm:
            for out in llm.generate(["12+30="], SamplingParams(max_tokens=8)):
                print(out.text, out.exit_depths)

    ``options`` are the command-line options with underscores. Raises ConfigError, ModelError, EngineDeadError.
    """

    def __init__(self, model: str = "demo", *, quiet: bool = False, **options: Any) -> None:
        self._setup(EngineConfig.from_values({"model": model, **options}), quiet)

    @classmethod
    def from_config(cls, config: EngineConfig, quiet: bool = False) -> Self:
        """The engine of a configuration that is at hand. Raises as the constructor does."""
        llm = cls.__new__(cls)
        llm._setup(config, quiet)
        return llm

    def _setup(self, config: EngineConfig, quiet: bool) -> None:
        self._inboxes: dict[int, deque[News]] = {}  # of live requests, one for each open run
        resolve_model_dir(config.model)  # a wrong name costs nothing
        self._grammars = GrammarChecker(lambda: host_of(config.model, self.info))
        self._client = EngineClient(config)
        loading = LoadingProgress(config.model)
        if not quiet:
            self._client.on_loading = loading
        try:
            self._client.launch()
            self.tokenizer, self.sampling_defaults = load_texts(config)  # while the worker loads the weights
            if self.tokenizer is not None:
                self._client.encode = self.tokenizer.encode_bare
            self.info = self._client.wait_ready()
            loading.close()
            if not quiet:
                print_start(self.info, self.sampling_defaults)
        except BaseException:
            loading.close()
            self._client.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Progress | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Runs all prompts together; outputs in the order of the prompts.

        Args:
            prompts: texts or lists of token ids, or one of them.
            params: for all prompts, or one for each; None: the model's defaults.
            progress: called with (finished, total) whenever a request has finished.
            use_tqdm: a bar on stderr says how many have.

        Raises RequestError, before anything runs where it can, and EngineDeadError when the engine is lost.
        """
        prompts = _as_list(prompts)
        encoded, per_prompt = self._prepare(prompts, params)
        outputs = [
            RequestOutput(prompt if isinstance(prompt, str) else None, ids)
            for prompt, ids in zip(prompts, encoded, strict=True)
        ]
        finished = 0
        with tqdm(total=len(outputs), unit="req", disable=not use_tqdm) as bar:
            for index, delta in self._run(encoded, per_prompt):
                outputs[index].append(delta)
                if delta.finish_reason is not None:
                    finished += 1
                    bar.update()
                    if progress is not None:
                        progress(finished, len(outputs))
        return outputs

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation (maps with ``role`` and ``content``) or several, through the model's chat template.

        ``template_options``: add_generation_prompt, continue_final_message, and what the template itself knows. The rest
        is as of generate; ``prompt`` of an output is None. Raises RequestError where there is no template.
        """
        if self.tokenizer is None:
            raise RequestError("messages: this model has no tokenizer; give token ids to generate", "messages")
        one = bool(messages) and isinstance(messages[0], Mapping)
        several: Sequence[Any] = [messages] if one else messages
        if not all(each and all(isinstance(message, Mapping) for message in each) for each in several) or not several:
            raise RequestError("messages must be a conversation (maps with role and content) or several", "messages")
        prompts = [self.tokenizer.encode_chat(each, self.info.max_model_len, **template_options) for each in several]
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[IndexedDelta]:
        """The same as pieces, as they come. Closing the iterator aborts what still runs. Raises like generate."""
        return self._run(*self._prepare(_as_list(prompts), params))

    def health(self) -> EngineHealth:
        self._pump(0.0)
        return self._client.health()

    def stats(self) -> dict[str, float]:
        """The scheduler's counters since its start, by name. Raises EngineDeadError."""
        return flat_stats(self.scheduler_stats())

    def scheduler_stats(self) -> SchedulerStats:
        """The same as typed numbers."""
        self._client.ask_stats()
        while self._client.stats is None:
            self._pump(0.1)
            if self._client.failure is not None:
                raise self._client.failure
        return self._client.stats

    def close(self) -> None:
        self._grammars.close()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> tuple[list[list[int]], list[SamplingParams]]:
        """Token ids and parameters of every prompt, all of them checked."""
        if isinstance(params, Sequence) and not isinstance(params, str):
            per_prompt = list(params)
        else:
            per_prompt = [SamplingParams(**self.sampling_defaults) if params is None else params] * len(prompts)
        if len(per_prompt) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(per_prompt)} params", "params")
        encoded = []
        for index, (prompt, own) in enumerate(zip(prompts, per_prompt, strict=True)):
            try:
                encoded.append(self._encode_checked(prompt, own))
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                raise RequestError(f"prompts[{index}]: {error}", error.param) from None
        return encoded, per_prompt

    def _encode_checked(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Token ids of a prompt that the engine will take. Raises RequestError."""
        token_ids = encode_prompt(prompt, params, self.tokenizer, self.info.max_model_len)
        resolved = self._client.check(token_ids, params)
        if params.constraint is not None:
            self._grammars.check(resolved.grammar)
        return token_ids

    def _run(self, encoded: list[list[int]], per_prompt: list[SamplingParams]) -> Iterator[IndexedDelta]:
        client, live = self._client, dict[int, tuple[int, OutputAssembler]]()
        inbox = deque[News]()
        try:
            request_ids = client.submit_all(list(zip(encoded, per_prompt, strict=True)))
            for index, (request_id, ids, own) in enumerate(zip(request_ids, encoded, per_prompt, strict=True)):
                live[request_id] = (index, assembler_of(str(index), ids, own, self.tokenizer))
                self._inboxes[request_id] = inbox
            while live:
                if not inbox:
                    self._pump(1.0)
                    continue
                request_id, event = inbox.popleft()
                if request_id not in live:
                    continue  # what followed a stop string
                index, assembler = live[request_id]
                if isinstance(event, DepthbatchError):
                    del live[request_id]
                    raise event
                delta = assembler.push(event)
                if delta.finish_reason is not None:
                    del live[request_id], self._inboxes[request_id]
                    client.abort(request_id)  # still live only after a stop string
                yield IndexedDelta(index, delta)
        finally:
            for request_id in live:
                client.abort(request_id)
            self._inboxes = {key: box for key, box in self._inboxes.items() if box is not inbox}

    def _pump(self, timeout_s: float) -> None:
        """Waits for news and hands each to the run that its request belongs to: several may be open at a time, and
        ``stats`` and ``health`` pump too.
        """
        self._client.wait(timeout_s)
        for news in self._client.poll():
            inbox = self._inboxes.get(news[0])
            if inbox is not None:
                inbox.append(news)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several. Raises RequestError."""
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be texts or lists of token ids, not {repr(prompts)[:80]}", "prompts")
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
