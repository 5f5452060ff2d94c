"""``bench trace --live``: the real processes launch exactly the stages of the pure core, in every mode."""

from pathlib import Path

import msgspec
import pytest

from depthbatch.benchmarks.trace import live_trace, trace, virtual_engine
from depthbatch.benchmarks.workload import Workload
from depthbatch.common.config import EngineConfig
from depthbatch.scheduler.config import SchedulerConfig

WORKLOAD = Path(__file__).parent.parent / "data" / "traces" / "ouro_sharegpt.workload.json"


@pytest.mark.parametrize(
    ("policy", "mode"), [("refill", "lookahead"), ("refill", "off"), ("no-refill", "async"), ("cb", "lookahead")]
)
def test_live_equals_the_core(policy: str, mode: str) -> None:
    """Hundreds of stages with refills and finishes: one stage launched early, late or with another row would shift all
    later queue sizes. All requests arrive in one message, else the first stages would depend on timing."""
    workload = Workload(Workload.read(WORKLOAD).requests[:40])
    options = EngineConfig(policy=policy, max_num_seqs=16, preemption="off", prefix_caching="off")
    info = virtual_engine(workload, 16, 4, None)
    options = msgspec.structs.replace(options, kv_layout=info.kv_layout)
    expected = list(trace(workload, SchedulerConfig.resolve(options, info)))
    live = msgspec.structs.replace(options, device="simulated:h100-ouro-1.4b", async_scheduling=mode)
    launched = list(live_trace(workload, live, info.num_blocks - 1))
    times = [(line.pop("start_s"), line.pop("end_s")) for line in launched]
    assert launched == expected
    ends = [0.0, *(end for _, end in times)]
    assert all(before <= start <= end for before, (start, end) in zip(ends, times, strict=False)), times
    assert len(expected) > 200
