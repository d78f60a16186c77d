"""Distillation on the CPU: losses by hand, order of the samples, learning rate, and a student that learns."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch, which the test environment does not install")

from headrace_engines.optimize.pruning_program import training  # noqa: E402
from headrace_engines.optimize.pruning_program.training import TrainingData, TrainingOptions, Workers  # noqa: E402
from torch import fx, nn  # noqa: E402


def softmax(values: np.ndarray) -> np.ndarray:
    exponentials = np.exp(values - values.max(1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(1, keepdims=True))


def test_loss_is_softened_divergence_plus_cross_entropy() -> None:
    random = np.random.default_rng(0)
    student, teacher = random.standard_normal((2, 6, 5))
    labels = random.integers(0, 5, 6)
    options = TrainingOptions(temperature=3.0, distillation=0.6)
    p, q = softmax(teacher / 3), softmax(student / 3)
    soft = 9 * (p * (np.log(p) - np.log(q))).sum(1).mean()
    hard = -np.log(softmax(student)[np.arange(6), labels]).mean()
    given = torch.from_numpy(student), torch.from_numpy(teacher)
    assert float(training.distillation_loss(*given, torch.from_numpy(labels), options)) == pytest.approx(
        0.6 * soft + 0.4 * hard
    )
    assert float(training.distillation_loss(*given, None, options)) == pytest.approx(soft)
    assert float(training.distillation_loss(given[1], given[1], None, options)) == pytest.approx(0, abs=1e-12)


def test_softmax_at_the_end_is_left_out_of_the_training() -> None:
    graph = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)))
    logits = training.logits_network(graph)
    x = torch.randn(5, 4)
    np.testing.assert_allclose(torch.softmax(logits(x), 1).detach(), graph(x).detach(), atol=1e-6)
    assert {id(p) for p in logits.parameters()} == {id(p) for p in graph.parameters()}
    plain = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 3)))
    assert training.logits_network(plain) is plain


def test_outputs_without_classes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[4, 3, 2\].*\[samples, classes\]"):
        training.class_logits(torch.zeros(4, 3, 2))


def test_processes_share_each_batch_and_a_seed_fixes_the_order() -> None:
    options = TrainingOptions(batch=8, seed=3)
    whole = [batch.tolist() for batch in training._batches(20, options, 1, Workers())]
    parts = [[b.tolist() for b in training._batches(20, options, 1, Workers(rank, 2))] for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*parts, strict=True)] == [sorted(batch) for batch in whole]
    assert len(whole) == 2
    assert [batch.tolist() for batch in training._batches(20, options, 1, Workers())] == whole
    assert [batch.tolist() for batch in training._batches(20, options, 2, Workers())] != whole
    assert [len(batch) for batch in training._batches(5, options, 0, Workers())] == [5]


def test_learning_rate_rises_and_falls_to_zero() -> None:
    rates = [training._rate(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == 1.0
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] < 0.01


def test_student_learns_the_teacher_and_equal_seeds_give_equal_students() -> None:
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    start = fx.symbolic_trace(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    inputs = np.random.default_rng(2).standard_normal((256, 6)).astype(np.float32)
    data, options = TrainingData(inputs, None), TrainingOptions(epochs=20, batch=32, learning_rate=0.02)
    device, shares = torch.device("cpu"), []
    students = [copy.deepcopy(start) for _ in range(2)]
    for student in students:
        training.distil(student, teacher, data, options, device, Workers(), lambda done, _: shares.append(done))
    assert shares[:160] == sorted(shares[:160])
    assert shares[-1] == 1.0
    expected = training.answers(teacher, inputs, device, 100).argmax(1)
    before = (training.answers(start, inputs, device, 100).argmax(1) == expected).mean()
    after = (training.answers(students[0], inputs, device, 100).argmax(1) == expected).mean()
    assert after > max(before, 0.85)
    for one, other in zip(students[0].parameters(), students[1].parameters(), strict=True):
        assert torch.equal(one, other)
