"""The plain evaluation: exit rules by hand, and scores of a trace whose every token is known."""

import torch

from depthbatch.training.data import heldout
from depthbatch.training.demo_tokenizer import IM_END, VOCAB_SIZE, build_tokenizer
from depthbatch.training.huginn import HuginnSize, HuginnTrainer
from depthbatch.training.ouro import OuroSize, OuroTrainer
from reference.teacher_forcing import (
    Trace,
    convergence_exits,
    fixed_depth,
    hazard_exits,
    score,
    trace_huginn,
    trace_ouro,
)


def test_hazard_exits_accumulate_start_at_two_and_include_the_threshold() -> None:
    """Columns: sure at loop 1 (leaves at 2, the least), half and half (3/4 is reached at 2), never, late."""
    hazards = torch.tensor([[1.0, 0.5, 0.0, 0.0], [0.0, 0.5, 0.0, 0.25], [0.0, 0.5, 0.0, 0.5], [0.0, 0.0, 1.0, 1.0]])
    assert hazard_exits(hazards, 0.75).tolist() == [2, 2, 4, 4]
    assert hazard_exits(hazards, 0.625).tolist() == [2, 2, 4, 3]
    assert hazard_exits(hazards, 1.0).tolist() == [4, 4, 4, 4]
    assert hazard_exits(hazards, 0.5, least=1).tolist() == [1, 1, 4, 3]


def test_convergence_exits_are_strict() -> None:
    distances = torch.tensor([[0.01, 0.9], [0.5, 0.8], [0.3, 0.7], [0.2, 0.6]])
    assert convergence_exits(distances, 0.5).tolist() == [3, 4]
    assert convergence_exits(distances, 0.51).tolist() == [2, 4]


def known_trace() -> Trace:
    """Two answers of two tokens: `copy` is right from depth 2 on, `hop3` only at depth 3, after a first token right at 3."""
    return Trace(
        right=torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool),
        decided=torch.tensor([False, True, False, True]),
        row=torch.tensor([0, 0, 1, 1]),
        signal=torch.zeros(3, 4),
        states=torch.zeros(3, 4, 1),
        embedding=torch.zeros(4, 1),
        classes=["copy", "hop3"],
    )


def test_scores_of_a_known_trace() -> None:
    """First tokens are read at full depth and do not count towards the mean depth."""
    trace = known_trace()
    two = score(trace, fixed_depth(trace, 2))
    assert two.class_accuracy == {"copy": 1.0, "hop3": 0.0} and two.accuracy == 0.5 and two.mean_depth == 2.0
    mixed = score(trace, torch.tensor([1, 2, 1, 3]))
    assert mixed.accuracy == 1.0 and mixed.mean_depth == 2.5
    assert mixed.class_depth == {"copy": 2.0, "hop3": 3.0}
    assert mixed.class_accuracy == {"copy": 1.0, "hop3": 1.0}


def test_traces_agree_with_greedy_decoding_at_full_depth() -> None:
    """Exact under teacher forcing must mean that decoding the tokens one by one gives the answer.

    An untrained model answers nothing right, so its own greedy continuation is taken as the answer.
    """
    tokenizer = build_tokenizer()
    model = OuroTrainer(OuroSize(VOCAB_SIZE, 32, 64, 1, 1, 128, total_ut_steps=3), seed=5)
    example = heldout(0, 1)[0]
    ids = tokenizer.encode(example.prompt).ids
    with torch.no_grad():
        greedy = int(model.logits(model(torch.tensor([ids])).states[-1, 0, -1]).argmax())
    trace = trace_ouro(model, [example])
    answer = [*tokenizer.encode(example.answer).ids, IM_END]
    assert trace.right.shape == (3, len(answer))
    assert bool(trace.right[-1, 0]) == (greedy == answer[0])
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[answer[0]] = model(torch.tensor([ids])).states[-1, 0, -1]
    assert bool(trace_ouro(model, [example]).right[-1, 0])


def test_huginn_trace_has_one_row_a_depth() -> None:
    model = HuginnTrainer(HuginnSize(VOCAB_SIZE, 32, 1, 64, 1, 1, 1, 128))
    trace = trace_huginn(model, heldout(0, 12), 4)
    assert trace.right.shape == trace.signal.shape and trace.right.shape[0] == 4
    assert (~trace.decided).sum() == 12
    torch.testing.assert_close(trace.signal[0], torch.ones_like(trace.signal[0]))
