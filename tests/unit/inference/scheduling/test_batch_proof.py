"""The three tests of a batch size: each kind of fault is found, and right models pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from headrace.core.tensor import BY_NAME
from headrace.inference.scheduling.batch_proof import BatchTests, ProofError, Row, RunBatch, run_rows

from tests.support.networks import network, residual, squeeze_excite, transformer

Array = np.ndarray[Any, Any]
FP32, INT64 = BY_NAME["FP32"], BY_NAME["INT64"]
WEIGHTS = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
Compute = Callable[[Array], Array]


def rows(count: int = 4, *shape: int) -> list[Row]:
    """Return different rows of X."""
    random = np.random.default_rng(1)
    return [{"X": random.standard_normal((1, *(shape or (4,)))).astype(np.float32)} for _ in range(count)]


def proof_of(compute: Compute) -> BatchTests:
    """Return the tests of a function of X (rows, 4) to Y (rows, 4)."""

    def run_arrays(inputs: dict[str, Array]) -> dict[str, Array]:
        with np.errstate(all="ignore"):
            return {"Y": compute(inputs["X"])}

    run = run_rows(run_arrays, ["Y"])
    return BatchTests(run, rows(), {"X": FP32, "Y": FP32}, 1e-5)


def onnx_tests(model: onnx.ModelProto, shape: Sequence[int], session: ort.InferenceSession | None = None) -> BatchTests:
    """Return the tests of an ONNX model of one input that ONNX Runtime runs."""
    session = session or ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    source, names = session.get_inputs()[0].name, [node.name for node in session.get_outputs()]
    run = run_rows(lambda inputs: dict(zip(names, session.run(names, inputs), strict=True)), names)
    data = [{source: row["X"]} for row in rows(4, *shape)]
    return BatchTests(run, data, dict.fromkeys([source, *names], FP32), 1e-5)


def fault_of(tests: BatchTests, *sizes: int) -> str:
    """Return the kind of the first fault; "" if all sizes are proven."""
    faults = [tests.check(size) for size in sizes or (2, 3, 8)]
    return next((fault.test for fault in faults if fault), "")


def test_a_model_that_keeps_rows_apart_is_proven() -> None:
    assert fault_of(proof_of(lambda x: np.tanh(x @ WEIGHTS))) == ""


@pytest.mark.parametrize("build", [residual, squeeze_excite, transformer])
def test_networks_of_onnx_runtime_raise_no_false_alarm(build: Callable[[], onnx.ModelProto]) -> None:
    model = build()
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim][1:]
    assert fault_of(onnx_tests(model, shape), 2, 3, 8, 64) == ""


@pytest.mark.parametrize(
    "text",
    [
        "M = ReduceMean <axes: ints = [0]> (x)\n y = Sub (x, M)",
        "M = ReduceMax <axes: ints = [0]> (x)\n y = Sub (x, M)",
        "M = ReduceMean <axes: ints = [0]> (x)\n S = Mul (M, tiny)\n y = Add (x, S)",
    ],
)
def test_a_reduction_over_the_batch_is_found(text: str) -> None:
    model = network(text, {"tiny": np.array(1e-7, np.float32)}, ("N", 4))
    assert fault_of(onnx_tests(model, (4,))) == "influence"


def test_a_reshape_that_moves_rows_is_found() -> None:
    text = "T = Transpose (x)\n y = Reshape (T, shape)"
    model = network(text, {"shape": np.array([-1, 4])}, ("N", 4))
    assert fault_of(onnx_tests(model, (4,))) == "influence"


def test_rows_at_the_wrong_place_are_found() -> None:
    found = []

    def mirrored(x: Array) -> Array:
        return np.tanh(x)[::-1] if len(x) == 8 else np.tanh(x)

    tests = proof_of(mirrored)
    found = [tests.check(size) for size in (2, 3, 8)]
    assert found[:2] == [None, None]
    assert found[2] is not None
    assert "of 8" in str(found[2])


def test_a_result_that_depends_on_the_place_is_found() -> None:
    assert fault_of(proof_of(lambda x: x + 0.1 * (np.arange(len(x)) == 3)[:, None]), 8) == "position"


def test_another_result_for_one_size_is_found() -> None:
    assert fault_of(proof_of(lambda x: x * (1.01 if len(x) == 8 else 1.0)), 2, 3) == ""
    assert fault_of(proof_of(lambda x: x * (1.01 if len(x) == 8 else 1.0)), 8) == "alone"


def test_a_read_past_the_own_row_is_found() -> None:
    def past(x: Array) -> Array:
        flat = np.append(x.reshape(-1), 0.0).astype(np.float32)
        return x + 1e-6 * flat[1:].reshape(x.shape)

    assert fault_of(proof_of(past)) == "influence"


def padded_run(buckets: Sequence[int], leak: float) -> RunBatch:
    """Return a model that pads batches to buckets in memory of its own, where earlier rows remain."""
    memory = np.zeros((buckets[-1], 4), np.float32)

    def run(inputs: dict[str, Array]) -> dict[str, Array]:
        x = inputs["X"]
        size = next(bucket for bucket in buckets if bucket >= len(x))
        memory[: len(x)] = x
        leaked = leak * memory[len(x) : size].sum() if leak else 0.0
        return {"Y": (np.tanh(memory[: len(x)]) + leaked).astype(np.float32)}

    return run_rows(run, ["Y"])


@pytest.mark.parametrize(("leak", "fault"), [(0.0, ""), (1e-9, "alone")])
def test_padding_that_leaks_is_found_by_nan_in_the_padding(leak: float, fault: str) -> None:
    run = padded_run((1, 2, 4, 8), leak)
    tests = BatchTests(run, rows(), {"X": FP32, "Y": FP32}, 1e-5)
    found = tests.check(3, lambda padding: run([*padding] * 8))
    assert (found.test if found else "") == fault


def test_an_attention_without_its_mask_is_found() -> None:
    def run(batch: Sequence[Row], is_masked: bool) -> list[Row]:
        longest = max(row["X"].shape[1] for row in batch)
        results = []
        for row in batch:
            scores = np.ones((1, longest), np.float32)
            scores[:, : row["X"].shape[1]] = np.exp(np.minimum(row["X"], 80))
            total = scores[:, : row["X"].shape[1]].sum() if is_masked else scores.sum()
            results.append({"Y": np.array([[scores[0, 0] / total]], np.float32)})
        return results

    lengths = [rows(1, length)[0] for length in (2, 5, 9, 3)]
    kinds = {"X": FP32, "Y": FP32}
    assert fault_of(BatchTests(lambda batch: run(batch, True), lengths, kinds, 1e-5)) == ""
    assert fault_of(BatchTests(lambda batch: run(batch, False), lengths, kinds, 1e-5)) != ""


@pytest.mark.parametrize(("offset", "is_right"), [(0, True), (1, False)])
def test_a_ragged_offset_by_one_is_found(offset: int, is_right: bool) -> None:
    def run(batch: Sequence[Row]) -> list[Row]:
        joined = np.concatenate([row["X"][0] for row in batch] + [np.zeros(1, np.float32)])
        starts = np.cumsum([0, *(row["X"].shape[1] for row in batch)])
        moved = [start + offset if index else 0 for index, start in enumerate(starts)]
        pairs = pairwise(moved)
        return [{"Y": np.array([[joined[first:end].max()]], np.float32)} for first, end in pairs]

    lengths = [rows(1, length)[0] for length in (2, 5, 9, 3)]
    tests = BatchTests(run, lengths, {"X": FP32, "Y": FP32}, 1e-5)
    assert (fault_of(tests) == "") == is_right


def test_outputs_in_memory_that_is_used_again_are_found() -> None:
    memory = np.zeros((8, 4), np.float32)

    def shared(x: Array) -> Array:
        np.tanh(x, out=memory[: len(x)])
        return memory[: len(x)]

    assert fault_of(proof_of(shared)) == "memory"


def test_a_captured_graph_with_a_stale_pointer_is_found() -> None:
    slots = [np.zeros((8, 4), np.float32) for _ in range(2)]
    turn = [0]

    def run(x: Array) -> Array:
        turn[0] += 1
        slots[turn[0] % 2][: len(x)] = x
        captured = slots[0] if len(x) == 3 else slots[turn[0] % 2]  # the graph of three rows reads its first slot
        return np.tanh(captured[: len(x)])

    assert fault_of(proof_of(run), 2, 8) == ""
    assert fault_of(proof_of(run), 3) != ""


def test_noise_of_equal_runs_is_no_fault_and_hides_none() -> None:
    noise = np.random.default_rng(3)

    def noisy(x: Array) -> Array:
        return np.tanh(x) + noise.standard_normal(x.shape).astype(np.float32) * 1e-7

    assert fault_of(proof_of(noisy)) == ""
    assert fault_of(proof_of(lambda x: noisy(x) + 0.01 * np.nanmax(x))) == "influence"


def test_a_model_that_refuses_nan_is_tested_with_other_values() -> None:
    def strict(x: Array) -> Array:
        if not np.isfinite(x).all():
            raise ValueError("NaN")
        return np.tanh(x)

    assert fault_of(proof_of(strict)) == ""
    assert fault_of(proof_of(lambda x: strict(x) + 1e-3 * x.mean())) == "influence"


def test_a_size_that_fails_is_a_fault() -> None:
    def fixed(x: Array) -> Array:
        if len(x) == 3:
            raise ValueError("reshape")
        return np.tanh(x)

    assert fault_of(proof_of(fixed), 2, 3) == "run"


def test_rows_without_finite_outputs_prove_nothing() -> None:
    with pytest.raises(ProofError, match="'Y' of a row alone is not finite"):
        proof_of(lambda x: x * np.nan)


def test_rows_with_equal_outputs_are_not_telling() -> None:
    assert proof_of(np.tanh).is_telling
    assert not proof_of(np.zeros_like).is_telling


def test_a_reference_widens_the_bound_by_the_models_own_difference() -> None:
    def rounded(x: Array) -> Array:
        return np.tanh(x).astype(np.float16 if len(x) == 1 else np.float32).astype(np.float32)

    tests = proof_of(rounded)
    assert fault_of(tests) == "alone"
    tests.refer(run_rows(lambda inputs: {"Y": np.tanh(inputs["X"])}, ["Y"]))
    assert fault_of(tests) == ""


@pytest.mark.parametrize(
    ("error", "place_of_error", "floor", "is_fault"),
    [
        (0.0, "y", 1e-5, False),
        (1e-6, "y", 1e-5, False),
        (0.1, "y", 1e-5, True),
        (1, "n", 1e-5, True),
        (1, "n", 1e-3, False),
    ],
)
def test_a_row_of_a_batch_is_compared_with_the_row_alone(
    error: float, place_of_error: str, floor: float, is_fault: bool
) -> None:
    def run(rows: Sequence[Row]) -> Sequence[Row]:
        return [{"y": row["x"] * 2, "n": np.argmax(row["x"], axis=1)} for row in rows]

    random = np.random.default_rng(0)
    rows = [{"x": random.standard_normal((1, 4)).astype(np.float32)} for _ in range(5)]
    tests = BatchTests(run, rows[:4], {"x": FP32, "y": FP32, "n": INT64}, floor)
    (output,) = run(rows[4:])
    changed = {name: values + error if name == place_of_error else values for name, values in output.items()}
    fault = tests.compare(rows[4], changed, 8, 3, None)
    assert (fault is not None) is is_fault
    if fault is not None:
        assert str(fault).startswith(f"alone: output '{place_of_error}' of row 3 of 8 differs by ")


@pytest.mark.parametrize(
    ("gap", "moved", "is_ranked", "text"),
    [
        (
            0.015,
            0.008,
            False,
            "output 'y' of row 1 of 2 has another class than the row alone: scores 0.015 apart, 0.01 is",
        ),
        (0.015, 0.007, False, ""),
        (0.009, 0.008, False, ""),  # a near tie: rounding decides
        (0.015, 0.008, True, "output 'classes' of row 1 of 2 has another class than the row alone: scores 0.015 apart"),
        (0.015, 0.007, True, ""),
        (0.009, 0.008, True, ""),
        (0.3, 0.0, None, "output 'classes' of row 1 of 2 has another class than the row alone: scores 0.3 apart"),
    ],
)
def test_the_class_of_a_row_is_that_of_the_row_alone_unless_two_are_near(
    gap: float, moved: float, is_ranked: bool | None, text: str
) -> None:
    """The second class comes nearer to the best by twice `moved`; None: both change their ranks, without their scores."""

    def outputs_of(y: Array) -> Row:
        order = np.argsort(-y, axis=1)[:, :2]
        ranks = {"scores": np.take_along_axis(y, order, axis=1), "classes": order.astype(np.int32)}
        return {"y": y} if is_ranked is False else ranks

    def run(rows: Sequence[Row]) -> Sequence[Row]:
        return [outputs_of(row["x"]) for row in rows]

    rows = [{"x": np.array([[*values, 0.0]])} for values in ((1.0, 1.0 - gap), (0.5, 1.0))]
    classes = {"y": "y"} if is_ranked is False else {"classes": "scores"}
    tests = BatchTests(run, rows, dict.fromkeys(("x", "y", "scores", "classes"), FP32), 0.01, classes)
    tests._bounds = dict.fromkeys(tests._bounds, 0.01)
    changed = dict(outputs_of(rows[0]["x"] + [[-moved, moved, 0.0]]))
    if is_ranked is None:
        changed["classes"] = changed["classes"][:, ::-1]
    fault = tests.compare(rows[0], changed, 2, 1, None)
    assert str(fault or "").startswith(text and f"alone: {text}")
    assert bool(fault) is bool(text)


def test_three_times_the_difference_to_a_reference_is_allowed() -> None:
    def run(rows: Sequence[Row]) -> Sequence[Row]:
        return [{"y": row["x"] + 0.1} for row in rows]

    rows = [{"x": np.full((1, 2), value, np.float32)} for value in (0.0, 1.0)]
    tests = BatchTests(run, rows, {"x": FP32, "y": FP32}, 1e-5)

    def reference(rows: Sequence[Row]) -> Sequence[Row]:
        return [{"y": row["x"]} for row in rows]

    assert tests.compare(rows[0], {"y": rows[0]["x"] + 0.35}, 2, 0, reference) is None
    assert tests.compare(rows[0], {"y": rows[0]["x"] + 0.35}, 2, 0, None) is not None
    assert tests.compare(rows[0], {"y": rows[0]["x"] + 0.45}, 2, 0, reference) is not None


def test_a_row_with_other_outputs_each_time_proves_nothing() -> None:
    random, is_random = np.random.default_rng(1), [False]

    def run(rows: Sequence[Row]) -> Sequence[Row]:
        noise = random.standard_normal(len(rows)) * is_random[0]
        return [{"y": (row["x"] + each).astype(np.float32)} for row, each in zip(rows, noise, strict=True)]

    rows = [{"x": np.full((1, 2), value, np.float32)} for value in (0.0, 1.0)]
    tests = BatchTests(run, rows, {"x": FP32, "y": FP32}, 1e-5)
    assert tests.compare(rows[0], {"y": rows[0]["x"] + 1}, 2, 0, None) is not None
    is_random[0] = True
    assert tests.compare(rows[0], {"y": rows[0]["x"] + 1}, 2, 0, None) is None
