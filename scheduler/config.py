"""The scheduler's settings: frozen, resolved once from the engine's options and what the worker reports.

Knows neither models nor devices; everything it needs of them is in EngineInfo.
"""

from dataclasses import dataclass
from typing import NamedTuple

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import MAX_DEPTH, MAX_STAGES_IN_FLIGHT
from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import EngineInfo

DEFAULT_TTFT_TARGET_MS = 1000.0
DEFAULT_ITL_TARGET_MS = 100.0


class DraftLimit(NamedTuple):
    """Which drafts may run."""

    lanes: int  # draft lanes of a sequence, at most
    depth: int  # loops after which a lane may be read for its draft


@dataclass(frozen=True)
class SchedulerConfig:
    """Symbols of scheduling.md in words. The options have been checked where they were given; raises ConfigError on what
    only shows once the worker has told its side."""

    policy: str
    max_num_seqs: int  # W
    max_num_batched_tokens: int  # M, prompt tokens in one prefill batch
    min_free_slots: int  # S
    min_coda_batch: int  # K
    r_max: int  # loops of prefill and of a full-depth token
    block_size: int  # tokens
    num_blocks: int  # logical blocks, dummy block 0 included
    max_model_len: int  # tokens, prompt and output
    buckets: tuple[int, ...]  # ascending row counts of decode stages
    vocab_size: int
    objective: str = "throughput"  # of auto; the targets are its
    ttft_target_s: float = DEFAULT_TTFT_TARGET_MS / 1e3
    itl_target_s: float = DEFAULT_ITL_TARGET_MS / 1e3
    kv_headroom: float = 0.0  # share of the blocks kept free at admission
    preemption: str = "recompute"
    host_blocks: int = 0  # of host memory, for preempted sequences
    block_bytes: int = 0  # of K/V in a block
    prefix_caching: bool = False
    kv_events: bool = False  # what happens to cached prefixes is collected
    generated_prefixes: bool = False  # outputs are kept, too, at the depths that their tokens went
    seeded_state: bool = False  # a prompt's K/V depend on its request's seed
    async_scheduling: str = "off"
    gates: tuple[Gate, ...] = tuple(Gate)
    kv_layout: KVLayout = KVLayout.SINGLE
    draft_lanes: int = 0  # N: successors of a token that may be on their way with it; 0 = no speculation
    draft_depth: int | None = 1  # loops after which a token is read for the draft of its successor; None = learned
    learned_drafts: bool = False  # the policy says how many of the N draft lanes run, and at which depth
    coda_layers: int = 0  # layers whose K/V a final readout writes

    def __post_init__(self) -> None:
        _check(self.r_max <= MAX_DEPTH, f"r-max must be at most {MAX_DEPTH}, not {self.r_max}")
        _check(self.num_blocks >= 2, f"kv-blocks must be at least 2 (block 0 is a dummy), not {self.num_blocks}")
        _check(self.num_blocks < 1 << 31, f"kv-blocks {self.num_blocks}: their numbers have 31 bits")
        _check(self.max_model_len >= 2, f"max-model-len must be at least 2, not {self.max_model_len}")
        _check(
            bool(self.buckets) and list(self.buckets) == sorted(set(self.buckets)) and self.buckets[0] >= 1,
            f"buckets {self.buckets} are not ascending row counts",
        )
        _check(
            self.buckets[-1] >= self.max_num_seqs,
            f"largest bucket {self.buckets[-1]} is below max-num-seqs {self.max_num_seqs}",
        )

    @classmethod
    def resolve(cls, options: EngineConfig, info: EngineInfo) -> "SchedulerConfig":
        """Applies the defaults of scheduling.md. Raises ConfigError on bad values and combinations."""
        width = options.max_num_seqs
        layout = KVLayout(info.kv_layout)
        gate = info.default_gate
        if gate.may_exit_early and not layout.allows_early_exit:
            raise ConfigError(f"kv-layout {layout} cannot serve gate {gate.label}: early exits would leave holes")
        caching = options.prefix_caching or ("on" if layout.keeps_every_loop(info.r_max) else "off")
        if caching != "off" and not layout.keeps_every_loop(info.r_max):
            raise ConfigError(
                f"prefix-caching needs a KV layout with a plane a loop: under {layout} a prompt sees a cached prefix "
                "otherwise than its own tokens"
            )
        if caching == "off" and options.kv_events is not None:
            raise ConfigError(f"kv_events_config needs prefix caching, which kv_layout {layout} has not")
        learned_drafts = info.draft_lanes > 0 and options.speculation == "auto"
        fixed_drafts = info.draft_lanes > 0 and not learned_drafts  # they ask for a coda, and exited rows go with it
        coda_batch = 1 if info.boundary_layers == 0 else width if fixed_drafts else max(1, width // 4)
        return cls(
            policy=options.policy,
            max_num_seqs=width,
            max_num_batched_tokens=options.max_num_batched_tokens,
            min_free_slots=max(1, width // 8) if options.min_free_slots is None else options.min_free_slots,
            min_coda_batch=coda_batch if options.min_coda_batch is None else options.min_coda_batch,
            r_max=info.r_max,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            buckets=tuple(info.buckets),
            vocab_size=info.vocab_size,
            objective=options.objective,
            ttft_target_s=(options.ttft_target_ms or DEFAULT_TTFT_TARGET_MS) / 1e3,
            itl_target_s=(options.itl_target_ms or DEFAULT_ITL_TARGET_MS) / 1e3,
            kv_headroom=options.kv_headroom,
            preemption=options.preemption,
            host_blocks=info.host_blocks if options.preemption == "offload" else 0,
            block_bytes=info.kv_bytes_per_token * info.block_size,
            prefix_caching=caching != "off",
            generated_prefixes=caching == "generated",
            kv_events=options.kv_events is not None,
            seeded_state=options.state_init == "seeded",
            async_scheduling=options.async_scheduling,
            gates=tuple(info.gates),
            kv_layout=layout,
            draft_lanes=info.draft_lanes,
            draft_depth=options.draft_depth or (None if learned_drafts else max(1, info.r_max // 8)),
            learned_drafts=learned_drafts,
            coda_layers=info.coda_layers,
        )

    @property
    def drafts(self) -> DraftLimit | None:
        """The fixed limit of drafts; None without speculation, or where it is learned."""
        if not self.draft_lanes or self.learned_drafts or self.draft_depth is None:
            return None
        return DraftLimit(self.draft_lanes, self.draft_depth)

    @property
    def usable_blocks(self) -> int:
        """Blocks that sequences may hold."""
        return self.num_blocks - 1

    @property
    def max_blocks_per_seq(self) -> int:
        return self.blocks_for(self.max_model_len)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` positions."""
        return -(-tokens // self.block_size)

    @property
    def max_stages_in_flight(self) -> int:
        return 1 if self.async_scheduling == "off" else MAX_STAGES_IN_FLIGHT

    @property
    def max_cores_in_flight(self) -> int:
        return 2 if self.async_scheduling == "lookahead" else 1


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def bucket_table(buckets: tuple[int, ...], width: int) -> list[int]:
    """[width + 1]: the smallest bucket that holds so many rows."""
    table, larger = [], iter(buckets)
    bucket = next(larger)
    for rows in range(width + 1):
        while rows > bucket:
            bucket = next(larger)
        table.append(bucket)
    return table
