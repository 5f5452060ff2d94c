"""What the batch-1 references say one request of the engine must yield."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from depthbatch.common.gates import Gate
from depthbatch.common.messages import RequestParams
from fakes.lockstep import Answer
from reference import dory, huginn, nanbeige, ouro, retrofitted
from reference.decoding import Result

FIDELITY = Path(__file__).parent.parent / "data" / "fidelity"
OURO, HUGINN = FIDELITY / "ouro-tiny", FIDELITY / "huginn-tiny"
RETROFITTED = tuple(FIDELITY / f"retro-{base}-tiny" for base in ("llama", "tinyllama", "olmo"))
NANBEIGE, DORY = FIDELITY / "nanbeige-tiny", FIDELITY / "dory-tiny"
REFERENCES = {OURO: ouro, HUGINN: huginn, NANBEIGE: nanbeige, DORY: dory} | dict.fromkeys(RETROFITTED, retrofitted)


R_MAX = {OURO: 4, HUGINN: 5, NANBEIGE: 2, DORY: 2} | dict.fromkeys(
    RETROFITTED, 5
)  # Huginn's own is 8: shorter here, to keep the tests short
NEAR_TIE = 2e-4  # logits; engine and reference round differently by up to 5e-5


def prompts_of(model: Path) -> list[list[int]]:
    """The fidelity prompts (5, 17, 33 and 64 tokens) and three made of them, of 1, 16 and 40 tokens."""
    values = np.load(model / "expected.npz")
    prompts = [values[f"prompt_{index}"].tolist() for index in range(4)]
    return [*prompts, prompts[0][:1], prompts[3][5:21], prompts[3][10:50]]


class Agreement(NamedTuple):
    """How far one answer could be compared."""

    compared: int  # tokens
    total: int


def compare(
    model: Path, prompt: list[int], params: RequestParams, layout: str, answer: Answer, state_seed: int | None = None
) -> Agreement:
    """Asserts that tokens and exit depths are the reference's, given where the prompt was cut.

    The reference knows no interruption, so a request that was preempted or rebuilt must not show it. Where the
    reference's two best logits are a near tie the engine may take the other one; what comes after it is then another
    text, and is not compared.
    """
    assert len(answer.tokens) == len(answer.depths) == params.max_tokens
    assert answer.finish_reason == "length"
    key = _depth_params(params)
    whole = _generate(model, tuple(prompt), key, params.max_tokens, layout, answer.chunks, state_seed)
    return Agreement(_equal_until_tie(whole, answer.tokens, answer.depths), params.max_tokens)


def _equal_until_tie(part: Result, tokens: list[int], depths: list[int]) -> int:
    for index, (token, wanted) in enumerate(zip(tokens, part.tokens, strict=True)):
        assert depths[index] == part.depths[index], f"depth of token {index}: {depths} instead of {part.depths}"
        if token != wanted:
            gap = part.logits[index][wanted] - part.logits[index][token]
            assert gap < NEAR_TIE, f"token {index}: {tokens} instead of {part.tokens}, logits {gap} apart"
            return index
    return len(tokens)


def _depth_params(params: RequestParams) -> RequestParams:
    """What of the parameters the reference knows, as a key."""
    return RequestParams(
        max_tokens=1,
        gate=params.gate,
        exit_threshold=params.exit_threshold,
        min_loops=params.min_loops,
        max_loops=params.max_loops,
        exit_depths=params.exit_depths,
    )


@cache
def _generate(
    model: Path,
    ids: tuple[int, ...],
    params: RequestParams,
    count: int,
    layout: str,
    chunks: tuple[int, ...],
    state_seed: int | None,
) -> Result:
    state = {} if state_seed is None else {"state_seed": state_seed}
    return REFERENCES.get(model, ouro).generate(
        model,
        ids,
        count,
        layout,
        **state,
        gate=params.gate.label,
        threshold=params.exit_threshold,
        min_loops=params.min_loops,
        max_loops=params.max_loops,
        exit_depths=tuple(params.exit_depths) if params.gate is Gate.REPLAY else (),
        chunk=chunks,
        r_max=R_MAX.get(model),
    )
