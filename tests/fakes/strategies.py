"""Small random engines and requests: small enough that every limit binds often."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import RequestParams, Submit
from depthbatch.scheduler.config import SchedulerConfig

VOCAB = 40
EARLY_GATES = (Gate.REPLAY, Gate.OWN, Gate.DELAYED, Gate.LOOKAHEAD, Gate.CONVERGENCE, Gate.PRELOOP)
KNOWN_AHEAD = (Gate.NONE, Gate.FIXED, Gate.REPLAY, Gate.LOOKAHEAD, Gate.DELAYED, Gate.CONVERGENCE)

COMMON_PREFIXES = ([], list(range(8)), [*range(5), 9, 9, 9], list(range(8, 15)))


@st.composite
def configs(
    draw,
    policies=("cb", "no-refill", "refill"),
    modes=("off", "async", "lookahead"),
    preemption=("off", "recompute", "offload"),
):
    width = draw(st.integers(1, 6))
    block_size = draw(st.integers(1, 4))
    max_len = draw(st.integers(4, 28))
    need = -(-max_len // block_size)
    blocks = draw(st.integers(max(1, need // 2), need * width + 2))
    r_max = draw(st.integers(1, 5))
    layout = draw(st.sampled_from([layout for layout in KVLayout if layout.allows_early_exit]))
    preempts = draw(st.sampled_from(preemption))
    return SchedulerConfig(
        policy=draw(st.sampled_from(policies)),
        max_num_seqs=width,
        max_num_batched_tokens=draw(st.integers(1, 24)),
        min_free_slots=draw(st.integers(1, width)),
        min_coda_batch=draw(st.integers(1, width)),
        r_max=r_max,
        block_size=block_size,
        num_blocks=blocks + 1,
        max_model_len=max_len,
        buckets=draw(st.sampled_from([(8,), (1, 2, 4, 8), (2, 6)])),
        vocab_size=VOCAB,
        kv_headroom=draw(st.sampled_from([0.0, 0.0, 0.2])),
        preemption=preempts,
        host_blocks=draw(st.integers(1, 2 * need * width)) if preempts == "offload" else 0,
        async_scheduling=draw(st.sampled_from(modes)),
        kv_layout=layout,
        prefix_caching=layout.keeps_every_loop(r_max) and draw(st.booleans()),
    )


@st.composite
def drafting_configs(draw, policies=("refill", "auto"), modes=("off", "async", "lookahead")):
    """Engines with speculation; blocks and rows are often too few for all drafts."""
    config = draw(configs(policies, modes))
    lanes = draw(st.integers(1, 4))
    r_max = max(config.r_max, 2)
    buckets = draw(st.sampled_from([(8,), (1, 2, 4, 8), (2, 6), (1, 4, 16, 32)]))
    layout = draw(st.sampled_from([KVLayout.LAST_EXITED, KVLayout.LAST_EXITED, KVLayout.DEPTH_INDEXED]))
    return replace(
        config,
        r_max=r_max,
        kv_layout=layout,
        gates=tuple(Gate) if layout.allows_early_exit else (Gate.NONE, Gate.FIXED),
        draft_lanes=lanes,
        draft_depth=draw(st.sampled_from([1, 1, 1, 2, r_max])),
        coda_layers=draw(st.sampled_from([0, 2])),
        buckets=buckets,
        prefix_caching=draw(st.booleans()),
    )


@st.composite
def submits(draw, config, request_id, gates=tuple(Gate), stops=True, drafts=False):
    """A request the engine may or may not be able to serve."""
    gate = draw(st.sampled_from(gates))
    max_loops = draw(st.integers(1, config.r_max))
    max_tokens = draw(st.integers(1, 14))
    common = draw(st.sampled_from(COMMON_PREFIXES))
    prompt = [*common, *draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=16 - len(common)))]
    depths = draw(st.lists(st.integers(1, 6), max_size=max_tokens)) if gate is Gate.REPLAY else []
    return Submit(
        request_id,
        np.asarray(prompt, dtype=np.int32).tobytes(),
        RequestParams(
            max_tokens=max_tokens,
            min_tokens=draw(st.sampled_from([0, 0, 0, max_tokens]) if drafts else st.integers(0, max_tokens)),
            stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=6))) if stops else (),
            temperature=draw(st.sampled_from([0.0, 0.7])),
            top_k=draw(st.sampled_from([0, 5])),
            min_p=draw(st.sampled_from([0.0, 0.1])),
            seed=request_id,
            gate=gate,
            exit_threshold=draw(st.sampled_from([0.5, 0.5, 1.0])),
            min_loops=max_loops if gate is Gate.FIXED else draw(st.integers(1, max_loops)),
            max_loops=max_loops,
            exit_depths=bytes(depths),
            priority=draw(st.sampled_from([0, 0, 0, 1])),
            logprobs=draw(st.sampled_from([False, False, True])),
            speculation=not drafts or draw(st.sampled_from([True, True, True, False])),
        ),
    )


@st.composite
def workloads(draw, config, gates=tuple(Gate), stops=True, max_size=12, drafts=False):
    count = draw(st.integers(1, max_size))
    return [draw(submits(config, index, gates, stops, drafts)) for index in range(count)]


def prompt_of(submit):
    return np.frombuffer(submit.prompt, "<i4").tolist()
