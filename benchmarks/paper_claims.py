"""Every claim of the paper's text that concerns serving, where it stands, and what our results say to it.

The judges (``paper_judges``, ``paper_judges_rest``) compute figure and verdict from results. Where a claim cannot be measured
here, or a test holds it, the row says so.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from depthbatch.benchmarks import paper_judges as judges
from depthbatch.benchmarks import paper_judges_rest as rest
from depthbatch.benchmarks.paper_judges import AGREES, NOT_HERE, Answer, Results
from depthbatch.benchmarks.tables import markdown


class Claim(NamedTuple):
    """One row: a section or figure, the claim in short, the paper's figure, and ours or the function that finds it."""

    place: str
    claim: str
    paper: str
    answer: Answer | Callable[[Results], Answer]


def _not_here(why: str) -> Answer:
    return Answer(why, NOT_HERE)


def _tested(what: str, test: str) -> Answer:
    """A test holds it: ``path::function``."""
    return Answer(f"{what} (`{test}`)", AGREES)


CLAIMS = (
    Claim("abstract, 6.2", "CDB realizes up to 99 % of S_e2e on Ouro", "0.99", judges.most_realized),
    Claim(
        "1, 4.3",
        "a naive implementation can leave fixed-depth batching faster",
        "slower than CB",
        judges.naive_loses,
    ),
    Claim(
        "Fig. 1",
        "refill finishes three sequences in two slots in 6 passes, no-refill in 8",
        "6, 8",
        _not_here("their depths are in the picture alone"),
    ),
    Claim(
        "3",
        "CDB does not change predictions and exit decisions",
        "the same",
        _tested(
            "every policy, mode and objective gives a plain loop's answers",
            "tests/policy/test_equal_answers.py::test_every_policy_mode_and_objective_gives_the_plain_loops_answers",
        ),
    ),
    Claim(
        "4.1, A.4",
        "schedules of Tables 2 and 3 (left): K = 1 keeps 64 rows in the core, no-refill shrinks",
        "20 stages each",
        _tested("byte for byte", "tests/scheduler/test_trace.py::test_prints_the_published_schedule"),
    ),
    Claim(
        "4.2, Table 4",
        "KiB a token: all loops, one plane, two planes (Ouro; Huginn)",
        "768, 192, 384; 1402, 165, 248",
        judges.kv_sizes,
    ),
    Claim("4.2", "last-exited adds copying overhead", "no figure", _not_here("the profiles do not price the copy")),
    Claim("4.3, Fig. 3", "asynchronous preparation alone lowers idle time minimally", "picture", judges.async_alone),
    Claim("4.3, Fig. 3", "with lookahead idle time is nearly zero", "nearly 0", judges.with_lookahead),
    Claim(
        "4.3",
        "an exit that is decided a loop early wastes no loop",
        "none",
        _tested(
            "lookahead takes the decisions of a scheduler that waits",
            "tests/scheduler/test_overlap.py::test_lookahead_takes_the_decisions_of_off",
        ),
    ),
    Claim(
        "5", "S_dec is close to r_max / d on a fully looped model, less so otherwise", "-", judges.bound_of_fully_looped
    ),
    Claim("5, 7", "with more loops a skipped one saves a smaller share", "-", judges.loops_saved),
    Claim(
        "5, Fig. 4",
        "below B* a larger batch is nearly free, above it time grows with it",
        "picture",
        judges.two_regimes,
    ),
    Claim("5, B, Fig. 9", "B* falls with context", "140 to single digits (Ouro)", judges.saturation_falls),
    Claim("B, eq. 3", "a decode step is linear in its depth", "R^2 of 0.999 or more", judges.linear_in_depth),
    Claim(
        "B",
        "delta 5.4 and 2.3 ms; B* 140 and 80 at L = 128; tau_0 0.4 and 2.8 ms",
        "the same",
        _not_here("inputs: the profiles were made from them"),
    ),
    Claim(
        "B",
        "twice the layers (Ouro 2.6B) double delta and slopes, B* stays",
        "picture",
        _not_here("the cost model says so; no second model was measured"),
    ),
    Claim(
        "6.2, Fig. 5",
        "Ouro, refill / CB at the selected threshold",
        "1.32 to 1.53",
        partial(judges.speedup, model="ouro", low=1.32, high=1.53),
    ),
    Claim(
        "6.2, Fig. 5",
        "Ouro, refill, share of S_e2e",
        "0.96 to 0.99",
        partial(judges.realized, model="ouro", low=0.96, high=0.99),
    ),
    Claim(
        "6.2, Fig. 5",
        "Huginn, no-refill / CB at the selected threshold",
        "1.30 to 1.37",
        partial(judges.speedup, model="huginn", low=1.30, high=1.37),
    ),
    Claim(
        "6.2, Fig. 5",
        "Huginn, no-refill, share of S_e2e",
        "0.83 to 0.96",
        partial(judges.realized, model="huginn", low=0.83, high=0.96),
    ),
    Claim(
        "6.2, Fig. 5", "Ouro: refill is the better mode", "refill", partial(judges.other_policy_is_worse, model="ouro")
    ),
    Claim(
        "6.2, Fig. 5",
        "Huginn: no-refill is the better mode",
        "no-refill",
        partial(judges.other_policy_is_worse, model="huginn"),
    ),
    Claim(
        "6.2",
        "at full depth CDB keeps of CB (virtual time, CB one graph a token step)",
        "0.95 to 0.99",
        judges.full_depth_by_launch,
    ),
    Claim(
        "6.2",
        "the same, stages through real processes against CB that waits for nothing",
        "0.95 to 0.99",
        judges.full_depth_of_processes,
    ),
    Claim("6.2, A.2", "W = 2 to 512 is the decode batch of a run", "W", judges.batch_is_w),
    Claim("6.2, Fig. 5", "Ouro: refill within 5 % of S_e2e at every W", "0.95 to 1", judges.near_bound_at_every_width),
    Claim("6.2, Fig. 5", "Ouro: refill beats no-refill at every W", "above 1", judges.refill_wins_at_every_width),
    Claim(
        "6.2, Fig. 5",
        "its advantage is largest around or below B* and narrows above",
        "picture",
        judges.advantage_near_saturation,
    ),
    Claim("6.2, Fig. 5", "Huginn: no-refill is better at small W", "picture", judges.no_refill_wins_when_small),
    Claim("6.2, Fig. 5", "Huginn: the modes converge as W grows", "picture", judges.modes_converge),
    Claim("6.2", "prefill's share of the time, all workloads and W", "3.7 to 36 %", judges.prefill_share),
    Claim("6.2", "it is largest on arXiv", "arXiv", judges.prefill_by_workload),
    Claim("6.2", "it grows with W", "generally", judges.prefill_by_width),
    Claim("6.2", "S_e2e is close to S_dec on Alpaca and ShareGPT, well below on arXiv", "picture", judges.bounds_apart),
    Claim("6.2", "decode takes most of the time", "most", judges.decode_rules),
    Claim("C.1", "throughput is stable at the sample sizes used", "stable", judges.stable),
    Claim(
        "6.3, Fig. 6", "Ouro: no-refill adds half of the capacity that refill adds", "about half", judges.half_the_gain
    ),
    Claim("6.3, Fig. 6", "Huginn: both modes reach the same capacity", "same", judges.same_capacity),
    Claim("6.3, Fig. 6", "with few exits the advantage disappears", "disappears", judges.few_exits),
    Claim(
        "D, Fig. 12, 13",
        "the observations hold for all workloads: CDB sustains more than CB",
        "picture",
        judges.holds_for_all_workloads,
    ),
    Claim("6.4, Fig. 7", "Huginn: K = W/4 is best at every W", "W/4", rest.quarter_of_w),
    Claim("6.4, Fig. 7", "Ouro: K = 1 is best", "1", rest.coda_at_once),
    Claim("6.4, Fig. 7", "at the largest W the choice of K matters less", "less", rest.k_matters_less),
    Claim("6.4, Fig. 7", "a larger K: smaller core batches, larger coda batches", "picture", rest.batches_by_k),
    Claim("6.4, Fig. 7", "fewer boundary layers make K = 1 more competitive", "picture", rest.fewer_layers_favour_k1),
    Claim("6.4, Fig. 7", "and improve throughput", "picture", rest.fewer_layers_are_faster),
    Claim("6.4, Fig. 7", "at 0-4-0 K = 1 is near optimal", "near optimal", rest.fully_looped_wants_k1),
    Claim("6.4, Fig. 7", "the gap to the maximum closes with fewer boundary layers", "closes", rest.gap_closes),
    Claim("A.1", "a token is rebuilt by prefill much faster than decoded", "much faster", rest.prefill_is_cheap),
    Claim(
        "A.1",
        "offloading preserves the exact K/V",
        "exact",
        _tested(
            "bit for bit",
            "tests/engine/test_rebuild.py::test_k_and_v_come_back_from_the_host_bit_for_bit",
        ),
    ),
    Claim("A.2", "a small S interrupts too often, a large one starves decode", "no figure", rest.both_ends_cost),
    Claim("A.2", "short prompts (Alpaca) want more free slots than longer ones", "no figure", rest.short_prompts_wait),
    Claim("A.2", "S = max(1, W/8) is used; how good it is stays open", "-", rest.default_slots),
    Claim("A.2", "headroom 0 % is used; what is best stays open", "-", rest.headroom),
    Claim(
        "A.5",
        "graphs of stages, static shapes, buckets",
        "-",
        _not_here("no GPU; docs/gpu.md says what is tested without"),
    ),
    Claim(
        "C.1, Fig. 10", "request lengths (means, medians, p99)", "18 and 60, 267 and 311, 6989 and 370", rest.lengths
    ),
    Claim(
        "C.2, Fig. 11",
        "exit depths are alike across workloads",
        "picture",
        _not_here("inputs: our depths are drawn from one table a threshold"),
    ),
    Claim("E.1, Table 4", "Huginn is insensitive to sharing planes", "30.9, 32.5, 32.8 %", rest.huginn_shares_planes),
    Claim("E.1, Table 4", "Ouro loses some with two planes, all with one", "78.1, 72.4, 0.2 %", rest.ouro_does_not),
    Claim(
        "E.1, Table 5",
        "Huginn, loops cut: one plane beats one a loop",
        "+7.7 to +1.6 points",
        rest.single_is_better_when_cut,
    ),
    Claim(
        "E.2, Fig. 14", "gated depth is at or above fixed depth at every mean depth", "above", rest.gated_beats_fixed
    ),
    Claim("E.2", "a lookahead gate is as good as the model's own", "the same", rest.lookahead_is_as_good),
    Claim("E.2", "a pre-loop gate is not", "worse", rest.preloop_is_worse),
    Claim("E.2", "Huginn: the exit a loop later costs no accuracy", "none", rest.delay_costs_huginn_nothing),
    Claim(
        "E",
        "GSM8K of Ouro 1.4B and Huginn 3.5B",
        "78.1, 30.9 %",
        _not_here("no such weights here; benchmarks.md says how"),
    ),
)


def claims_report(results: Results) -> str:
    """The table, and how many rows have which verdict."""
    lines, counts = [], {"agree": 0, "agree in part": 0, "contradict": 0, "not measured here": 0, "left open": 0}
    for claim in CLAIMS:
        answer = claim.answer if isinstance(claim.answer, Answer) else _judged(claim.answer, results)
        lines.append((claim.place, claim.claim, claim.paper, answer.ours, answer.verdict))
        kind = {AGREES: "agree", judges.CONTRADICTS: "contradict"}.get(answer.verdict, answer.verdict)
        counts[kind if kind in counts else "agree in part"] += 1
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    table = markdown(("where", "claim", "paper", "ours", ""), lines)
    return f"{len(CLAIMS)} rows: {summary}.\n\n{table}"


def _judged(judge: Callable[[Results], Answer], results: Results) -> Answer:
    try:
        return judge(results)
    except FileNotFoundError as error:
        return _not_here(f"`{Path(error.filename).name}` is not there: its sweep has not run")
