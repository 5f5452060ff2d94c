"""``auto`` decides by stage times. In virtual time, where stages take what a device profile says, it orders them unlike any
fixed policy; what requests get must be the same."""

import dataclasses
from itertools import combinations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from depthbatch.common.config import ASYNC_MODES, OBJECTIVES, EngineConfig
from depthbatch.common.frames import ROW_POSITION, Stage
from depthbatch.common.gates import Gate
from depthbatch.common.kv_layout import KVLayout
from depthbatch.common.messages import RequestParams, StageResult, Submit
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.scheduler.policy.auto import AutoPolicy
from depthbatch.scheduler.stage_batch import ScheduledStage
from depthbatch.worker.device_profile import CoreCost, DeviceProfile, LinearCost, StageFlops
from fakes.lockstep import Answer, Late, LockstepEngine
from fakes.paged_model import plain_decode
from fakes.paged_worker import PagedWorker
from fakes.small_engine import BASE
from fakes.strategies import prompt_of, workloads
from reference.oracle import HUGINN, OURO, R_MAX, prompts_of

Stages = list[tuple[int, int]]  # stage, rows


def profile(boundary_ms: float, prefill_ms: float = 4.0, row_ms: float = 0.02) -> DeviceProfile:
    """A core step takes 1 ms and something a row."""
    boundary = LinearCost(boundary_ms / 2, row_ms)
    core, prefill = CoreCost(1.0, row_ms, 1e-5), LinearCost(prefill_ms, 0.05)
    return DeviceProfile("drawn", 4, 1, core, boundary, boundary, prefill, StageFlops(1.0, 1.0))


class VirtualClock:
    """A device that runs stages in order, each for its profile's time."""

    def __init__(self, device: DeviceProfile) -> None:
        self._device = device
        self.now_s = self._free_s = 0.0

    def timed(self, stage: ScheduledStage, result: StageResult) -> StageResult:
        header, context = stage.header, 0
        if header.stage == Stage.CORE:
            context = int(stage.frame[ROW_POSITION].sum()) + header.rows
        start_s = max(self.now_s, self._free_s)
        self._free_s = start_s + self._device.stage_seconds(Stage(header.stage), header.rows, context, header.n_tokens)
        return replace(result, start_s=start_s, end_s=self._free_s)

    def delivered(self, result: StageResult) -> float:
        self.now_s = max(self.now_s, result.end_s)
        return self.now_s


def serve(config: SchedulerConfig, requests: list[Submit], device: DeviceProfile) -> tuple[dict, Stages, Scheduler]:
    """Tokens and depths by request, and the order of stages; results come when the device has finished a stage."""
    scheduler, worker, clock = Scheduler(config), PagedWorker(config), VirtualClock(device)
    answers: dict[int, tuple[list[int], list[int]]] = {}
    stages: Stages = []
    in_flight: list[StageResult] = []
    for submit in requests:
        if scheduler.submit(submit, 0.0) is None:
            answers[submit.request_id] = ([], [])
    while scheduler.num_unfinished or in_flight:
        stage = scheduler.next_stage(clock.now_s)
        if stage is not None:
            stages.append((int(stage.header.stage), stage.header.rows))
            in_flight.append(clock.timed(stage, worker.execute(stage)))
            continue
        assert in_flight, "requests are left, but nothing can run"
        result = in_flight.pop(0)
        for event in scheduler.complete(result, clock.delivered(result)):
            answers[event.request_id][0].extend(event.token_ids)
            answers[event.request_id][1].extend(event.exit_depths)
    scheduler.verify()
    return answers, stages, scheduler


def engine_config(policy: str, mode: str, objective: str = "throughput", **changes: object) -> SchedulerConfig:
    six = dataclasses.replace(
        BASE, max_num_seqs=6, max_num_batched_tokens=24, num_blocks=90, max_model_len=40, buckets=(6,)
    )
    values = {"preemption": "off", "kv_layout": KVLayout.LAST_EXITED, "ttft_target_s": 0.02, "itl_target_s": 0.01}
    changes = values | {"policy": policy, "async_scheduling": mode, "objective": objective} | changes
    return dataclasses.replace(six, **changes)


@settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_policy_mode_and_objective_gives_the_plain_loops_answers(data: st.DataObject) -> None:
    """Against a batch-1 loop, with costs drawn over a factor of 50, all gates, chunked prefill and stop tokens. The fake
    cache remembers depths, so one exit a loop off changes all later tokens of its sequence."""
    device = profile(data.draw(st.floats(0.1, 5.0)), data.draw(st.floats(0.5, 20.0)), data.draw(st.floats(0.0, 0.2)))
    requests = data.draw(workloads(engine_config("auto", "off"), max_size=20))
    for policy in ("no-refill", "refill", "auto"):
        for mode in ASYNC_MODES:
            for objective in OBJECTIVES if policy == "auto" else ("throughput",):
                config = engine_config(policy, mode, objective)
                answers, _, _ = serve(config, requests, device)
                for submit in requests:
                    if submit.request_id in answers:
                        expected = plain_decode(prompt_of(submit), submit.params, config)
                        assert answers[submit.request_id] == (expected.tokens, expected.depths)


def test_auto_orders_stages_unlike_the_fixed_policies_here() -> None:
    """Without this the test above might compare equal schedules: with a boundary of three core steps auto waits with
    coda, so it has fewer codas than K = 1, and a tight ITL target gives latency an order of its own."""
    rng = np.random.default_rng(0)
    requests = [
        Submit(
            index,
            rng.integers(0, 40, 12).astype(np.int32).tobytes(),
            RequestParams(
                max_tokens=24,
                gate=Gate.REPLAY,
                max_loops=4,
                exit_depths=rng.integers(1, 5, 24).astype(np.uint8).tobytes(),
            ),
        )
        for index in range(24)
    ]
    orders, codas, answers = [], [], []
    for policy, objective in (("refill", "throughput"), ("auto", "throughput"), ("auto", "latency")):
        config = engine_config(
            policy, "off", objective, max_num_batched_tokens=200, ttft_target_s=2.0, itl_target_s=0.01
        )
        got, stages, scheduler = serve(config, requests, profile(3.0))
        answers.append(got)
        orders.append(stages)
        codas.append(sum(stage == Stage.CODA for stage, _ in stages))
        assert policy != "auto" or scheduler.policy.theta > 0  # type: ignore[attr-defined]
    assert codas[1] < 0.8 * codas[0]
    assert all(one != other for one, other in combinations(orders, 2))
    assert all(answer == answers[0] for answer in answers)


class TimedEngine(LockstepEngine):
    """The real worker, in virtual time."""

    def use(self, device: DeviceProfile) -> "TimedEngine":
        self._clock = VirtualClock(device)
        return self

    def _run(self, stage: ScheduledStage, now: float) -> Late:
        late = super()._run(stage, now)
        return Late(stage, self._clock.timed(stage, late.result))

    def _deliver(self, scheduler: Scheduler, late: Late, now: float, answers: list[Answer]) -> None:
        if isinstance(scheduler.policy, AutoPolicy):
            self.most_theta = max(getattr(self, "most_theta", 0.0), scheduler.policy.theta)
        super()._deliver(scheduler, late, self._clock.delivered(late.result), answers)


@pytest.mark.parametrize("model", [OURO, HUGINN], ids=["ouro", "huginn"])
def test_the_real_worker_gives_auto_the_tokens_of_refill(model) -> None:  # type: ignore[no-untyped-def]
    """fp32, last_exited, every mode: a row's neighbours, its plane and its stage's place in the order all differ from
    refill's, tokens and exit depths do not. Random weights: a K/V entry that is wrong changes all later tokens."""
    prompts = prompts_of(model)
    gates = [Gate.REPLAY, Gate.DELAYED, Gate.OWN, Gate.NONE]
    rng = np.random.default_rng(3)
    r_max = R_MAX[model]
    requests = [
        RequestParams(
            max_tokens=14,
            gate=gates[index % len(gates)],
            exit_threshold=0.5 if model == OURO else 0.8,
            min_loops=2,
            max_loops=r_max,
            exit_depths=rng.integers(1, r_max + 1, 14).astype(np.uint8).tobytes() if index % len(gates) == 0 else b"",
        )
        for index in range(len(prompts))
    ]
    got, codas = [], []
    for policy, mode in (("refill", "off"), *(("auto", mode) for mode in ASYNC_MODES)):
        options = {"policy": policy, "async_scheduling": mode, "max_num_seqs": 5, "min_free_slots": 1, "kv_blocks": 120}
        config = EngineConfig.from_values(
            {"model": str(model), "kv_layout": "last_exited", "dtype": "float32", "max_loops": r_max}
            | options
            | ({"min_coda_batch": 1} if policy == "refill" else {})
        )
        engine = TimedEngine(config).use(profile(3.0))
        got.append([(a.tokens, a.depths) for a in engine.run(list(zip(prompts, requests, strict=True)))])
        codas.append(sum(ran.header.stage == Stage.CODA for ran in engine.history))
        assert policy != "auto" or engine.most_theta > 0.0
    assert all(answers == got[0] for answers in got[1:])
    assert all(count < codas[0] for count in codas[1:])
