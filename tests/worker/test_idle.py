"""Idle accounting and the simulated device: its clock, its tokens, its drafts."""

import re

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from depthbatch.common.config import EngineConfig
from depthbatch.common.errors import ConfigError
from depthbatch.common.frames import SLOT_PARAMS, Stage, lane_of, slot_param_words
from depthbatch.common.messages import RequestParams, StageBatch, Submit, Variant
from depthbatch.scheduler.config import SchedulerConfig
from depthbatch.scheduler.core import Scheduler
from depthbatch.worker import simulated
from depthbatch.worker.device_profile import DeviceProfile, parse_profile
from depthbatch.worker.process import IdleClock
from depthbatch.worker.runner.stage_input import StageError
from depthbatch.worker.simulated import SimulatedRunner, find_profile, simulated_info
from fakes.overlapped_serving import serve
from fakes.worker import PROFILE


def profile() -> DeviceProfile:
    return parse_profile(PROFILE, "test")


def runner(**options: object) -> SimulatedRunner:
    config = EngineConfig.from_values({"device": "simulated:test", "max_num_seqs": 4, "max_model_len": 64} | options)
    info = simulated_info(config, profile())
    return SimulatedRunner(profile(), info, config.max_num_seqs, config.draft_acceptance)


def core(step: int, positions: tuple[int, ...] = (9, 19)) -> tuple[StageBatch, np.ndarray]:
    rows = len(positions)
    frame = np.array([range(1, rows + 1), positions, [1] * rows, range(1, rows + 1)], np.int32)
    return StageBatch(step, Stage.CORE, bucket=rows, rows=rows), frame


def test_swap_space_for_no_block_is_refused() -> None:
    """Bug: on a simulated device it turned offloading off without a word. What fits is taken, up to what all sequences can
    fill: 4 of 64 tokens are 16 blocks of 16."""
    big = msgspec.structs.replace(profile(), bytes_per_kv_token=1 << 20)
    config = EngineConfig(device="simulated:test", max_num_seqs=4, max_model_len=64, preemption="offload")
    for gib, blocks in ((1.0, 16), (0.125, 8)):
        assert simulated_info(msgspec.structs.replace(config, swap_space=gib), big).host_blocks == blocks
    with pytest.raises(ConfigError, match=r"swap_space 0\.001 GiB holds no KV block of 0\.0156 GiB$"):
        simulated_info(msgspec.structs.replace(config, swap_space=0.001), big)


def test_waits_are_booked_by_what_the_next_stage_says() -> None:
    """Three stages with gaps 0, 2 and 5: busy and both kinds of idle add up to the time from first start to last end."""
    clock = IdleClock()
    for start, end, no_work in ((10.0, 11.0, True), (11.0, 12.5, False), (14.5, 15.0, False), (20.0, 21.0, True)):
        clock.book(start, end, no_work)
    assert (clock.busy_s, clock.idle_scheduler_s, clock.idle_no_work_s, clock.steps) == (4.0, 2.0, 5.0, 4)


def test_stage_times_follow_the_cost_model() -> None:
    """t = delta + gamma B + alpha N_c with N_c the sum of position + 1: 5 + 0.5 * 2 + 0.01 * 30 ms."""
    device = runner()
    stage = device.launch(*core(1))
    assert stage.ready_s - stage.start_s == pytest.approx(6.3e-3)
    prompt = np.array([1, 0, 10, 1, *range(10), 1, 0, 3], np.int32)
    prefill = device.launch(StageBatch(2, Stage.PREFILL, 0, 1, n_tokens=10, n_updates=1), prompt)
    assert prefill.ready_s - prefill.start_s == pytest.approx(6.2e-3)


def test_queued_stages_run_back_to_back_without_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is ours: stages that arrive late in wall time, but before their predecessor ends, start at its end."""
    now = [100.0]
    monkeypatch.setattr(simulated.time, "monotonic", lambda: now[0])
    device = runner()
    starts, ends = [], []
    for step in range(50):
        stage = device.launch(*core(step))
        starts.append(stage.start_s)
        ends.append(stage.ready_s)
        now[0] += 1e-3  # faster than the device
    assert starts[1:] == ends[:-1]
    assert ends[-1] == pytest.approx(100.0 + 50 * 6.3e-3)
    now[0] = 200.0  # the queue ran dry
    assert device.launch(*core(50)).start_s == 200.0


def test_drafts_are_right_as_often_as_asked() -> None:
    """A draft is the token that the readout for good gives, or another, by (seed, position) alone; final tokens are those of a
    device whose drafts are always right."""

    def tokens(loops: int, acceptance: float) -> list[int]:
        device = SimulatedRunner(profile(), info, 4, acceptance)
        drawn = []
        for position in range(1, 600):
            lane = int(lane_of(np.array([1]), np.array([position]), device.limits.num_slots, device.limits.lanes)[0])
            frame = np.array([[1], [position], [loops], [lane]], np.int32)
            stage = device.launch(StageBatch(position, Stage.CODA, bucket=1, rows=1), frame)
            drawn += stage.output.token_ids.tolist()
        return drawn

    config = EngineConfig(device="simulated:test", max_num_seqs=4, speculation=1, kv_layout="last_exited")
    info = simulated_info(config, profile())
    final = tokens(4, 1.0)
    assert tokens(-1, 1.0) == final == tokens(4, 0.7)
    drafts = tokens(-1, 0.7)
    assert np.mean(np.equal(drafts, final)) == pytest.approx(0.7, abs=0.06) and tokens(-2, 0.7) == drafts


def test_tokens_are_a_function_of_seed_and_position_alone() -> None:
    """The same (seed, position) in other slots and batches gives the same token; another seed or position another."""
    device = runner()
    params = np.zeros(3, SLOT_PARAMS)
    params["slot"], params["seed_high"] = (1, 2, 3), (7, 7, -8)
    frame = np.array([[1, 2, 3, 4], [5, 5, 5, 6], [1, 1, 1, 1], [1, 2, 3, 4]], np.int32)
    header = StageBatch(1, Stage.CODA, bucket=4, rows=4, n_slot_params=3)
    first = device.launch(header, frame, slot_param_words(params)).output.token_ids
    assert first[0] == first[1] and first[0] != first[2]
    again = device.launch(StageBatch(2, Stage.CODA, 1, 1), np.array([2, 5, 3, 2], np.int32)).output.token_ids
    other = device.launch(StageBatch(3, Stage.CODA, 1, 1), np.array([2, 6, 3, 2], np.int32)).output.token_ids
    assert again.tolist() == [first[1]] and other[0] != first[1]
    assert ((first >= 0) & (first < 49152)).all()


def test_gates_never_fire() -> None:
    header, frame = core(1)
    batch = StageBatch(1, Stage.CORE, header.bucket, header.rows, variant=Variant.GATES)
    assert runner().launch(batch, frame).output.fired.tolist() == [0, 0]


def test_the_same_checks_as_a_real_worker() -> None:
    header, frame = core(1)
    frame[0, 0] = 9
    with pytest.raises(StageError, match="slot out of range"):
        runner().launch(header, frame)


def test_bad_profiles_and_options_are_one_line() -> None:
    """What a user can get wrong: no such profile, a missing or unknown key, a gate the device cannot decide."""
    with pytest.raises(ConfigError, match="nowhere"):
        find_profile("nowhere")
    with pytest.raises(ConfigError, match=r"gone\.json: No such file"):
        find_profile("/tmp/gone.json")
    with pytest.raises(ConfigError, match="r_max"):
        parse_profile(PROFILE.replace('"r_max":4,', ""), "p")
    with pytest.raises(ConfigError, match="speed"):
        parse_profile(PROFILE.replace('"r_max":4,', '"r_max":4,"speed":1,'), "p")
    with pytest.raises(ConfigError, match="delta_ms"):
        parse_profile(PROFILE.replace("5.0", "-5.0"), "p")
    with pytest.raises(ConfigError, match="gate 'delayed'"):
        runner(gate="delayed")
    with pytest.raises(ConfigError, match="max_loops 5"):
        runner(max_loops=5)


def instant() -> DeviceProfile:
    """One that takes no time worth waiting for."""
    return parse_profile(re.sub(r"(_ms\":)[0-9.]+", r"\g<1>1e-6", PROFILE), "test")


SPECULATES = {"policy": "refill", "kv_layout": "last_exited", "speculation": 2}


@pytest.mark.parametrize(("option", "share"), [({"draft_acceptance": 0.6}, 0.6), ({}, 0.9)])
def test_the_scheduler_on_it_counts_that_share(option: dict[str, float], share: float) -> None:
    """Through the scheduler: answers are those without drafts, and what it accepts is what the device was told, or nine
    of ten."""
    params = RequestParams(max_tokens=50, max_loops=2)
    submits = [Submit(i, np.arange(3 + i, dtype=np.int32).tobytes(), replace(params, seed=i)) for i in range(6)]
    answers = []
    for options in ({"policy": "refill", "kv_layout": "last_exited"}, SPECULATES | option):
        config = EngineConfig.from_values(
            {"device": "simulated:test", "max_num_seqs": 4, "max_model_len": 64, **options}
        )
        device = runner(**options)
        device._profile = instant()
        scheduler = Scheduler(SchedulerConfig.resolve(config, simulated_info(config, profile())))
        answers.append(serve(scheduler, device, submits)[0])
    assert answers[0] == answers[1]
    chains = scheduler.admission.chains
    assert chains is not None
    right, wrong = chains.right.sum(), chains.wrong.sum()
    assert right + wrong > 100 and abs(right / (right + wrong) - share) < 0.06
