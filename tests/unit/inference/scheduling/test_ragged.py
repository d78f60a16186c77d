"""Batches of requests of different shapes: computed inputs, joined and padded inputs, cut outputs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from headrace.core.completion import Completion
from headrace.core.ragged import computed_values
from headrace.core.request import InferRequest
from headrace.core.tensor import BY_CONFIG_NAME, Array, ModelSpec, PaddedInputs, TensorSpec
from headrace.inference.scheduling.assembly import Staging
from headrace.inference.scheduling.joining import RaggedLayout
from headrace.inference.scheduling.output_check import OutputMismatch
from headrace.inference.scheduling.policy import ComputedInput, HandlePolicy, PaddingPolicy, RaggedPolicy
from headrace.inference.scheduling.queue import Entry
from headrace.inference.scheduling.ragged import (
    OutputLengths,
    PaddedLayout,
    PaddingTrials,
    batch_layout,
)
from headrace.runtimes.base import Execution
from hypothesis import given
from hypothesis import strategies as st

FP32, INT32, INT64 = (BY_CONFIG_NAME[f"TYPE_{name}"] for name in ("FP32", "INT32", "INT64"))
# Two requests: one of two rows of 3 x 1, one of a row of 2 x 2; the example of Triton's published message.
SHAPES = [(2, 3, 1), (1, 2, 2)]


def unchecked(_outputs: Any, _rows: int) -> None:
    """Accept any outputs."""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("BATCH_ELEMENT_COUNT", [6, 4]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [6, 10]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 6, 10]),
        ("BATCH_ITEM_SHAPE", [[3, 1], [3, 1], [2, 2]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [3, 1, 3, 1, 2, 2]),
    ],
)
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_every_kind_of_computed_input(kind: str, expected: list[Any], dtype: str) -> None:
    values = computed_values(kind, SHAPES, np.dtype(dtype))
    assert values.tolist() == expected
    assert values.dtype == dtype


def test_the_shape_of_the_largest_request_is_passed_on() -> None:
    assert computed_values("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", SHAPES, np.dtype("float32")).shape == (6,)


def ragged_layout(scattered: dict[str, str] | None = None) -> RaggedLayout:
    spec = ModelSpec(
        "m",
        "1",
        "",
        {"x": TensorSpec("x", INT64, (-1, -1)), "k": TensorSpec("k", FP32, (-1, 2))},
        {"y": TensorSpec("y", INT64, (-1, -1)), "n": TensorSpec("n", INT64, (-1, 1))},
        8,
        ragged=frozenset({"x"}),
    )
    computed = (ComputedInput(("lengths",), "BATCH_ELEMENT_COUNT", INT32, "x"),)
    policy = RaggedPolicy(frozenset({"x"}), computed, {"y": "x"} if scattered is None else scattered)
    layout = batch_layout(HandlePolicy(ragged=policy), spec)
    assert isinstance(layout, RaggedLayout)
    return layout


def ragged_request(rows: int, length: int, seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {"x": random.integers(0, 100, (rows, length)), "k": random.random((rows, 2), np.float32)}


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=6))
def test_ragged_elements_return_to_their_request(sizes: list[tuple[int, int]]) -> None:
    requests = [ragged_request(rows, length, seed) for seed, (rows, length) in enumerate(sizes)]
    arrangement = ragged_layout().arrange(requests)
    inputs = arrangement.stack(Staging(32))
    assert inputs["x"].ndim == 1
    assert inputs["k"].shape == (sum(rows for rows, _ in sizes), 2)
    assert inputs["lengths"].tolist() == [rows * length for rows, length in sizes]
    rows = len(inputs["k"])
    outputs = {"y": inputs["x"] * 2, "n": np.arange(rows).reshape(rows, 1)}
    first = 0
    for request, result in zip(requests, arrangement.split(outputs, unchecked), strict=True):
        assert np.array_equal(result["y"], 2 * request["x"])
        assert result["n"][:, 0].tolist() == list(range(first, first + len(request["k"])))
        first += len(request["k"])


def entry_of(request: dict[str, Array]) -> Entry:
    infer_request = InferRequest(inputs=request, rows=request["x"].shape[0], shape_key=None, received_ns=0)
    return Entry(infer_request, Completion(), 0, 0)


LIMITS = {"x": ((1,), (12,)), "lengths": ((1,), (3,)), "k": ((1, 2), (5, 2))}


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=12))
def test_a_batch_is_divided_into_groups_that_the_engine_supports(sizes: list[tuple[int, int]]) -> None:
    layout = ragged_layout()
    layout.ranges = [LIMITS]
    entries = [entry_of(ragged_request(rows, length, seed)) for seed, (rows, length) in enumerate(sizes)]
    groups = layout.divide(entries).groups
    assert [entry for group in groups for entry in group] == entries

    def fits(group: list[Entry]) -> bool:
        arranged = layout.arrange([entry.inputs for entry in group]).like()
        limits = [(arranged[name].shape, *bounds) for name, bounds in LIMITS.items()]
        return all(low <= s <= high for shape, *b in limits for low, s, high in zip(b[0], shape, b[1], strict=True))

    for group, following in itertools.pairwise(groups):
        assert not (fits(group) and fits([*group, following[0]])), "the next request would have fitted"
    for group in groups:
        assert fits(group) or len(group) == 1


def test_a_batch_without_bounds_is_not_divided() -> None:
    entries = [entry_of(ragged_request(1, 1000, seed)) for seed in range(5)]
    assert ragged_layout().divide(entries).groups == [entries]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=6))
def test_buffers_of_a_batch_get_the_same_inputs_as_arrays(sizes: list[tuple[int, int]]) -> None:
    requests = [ragged_request(rows, length, seed) for seed, (rows, length) in enumerate(sizes)]
    arrangement = ragged_layout().arrange(requests)
    buffers = {name: np.full(like.shape, 7, like.dtype) for name, like in arrangement.like().items()}
    arrangement.fill(buffers)
    expected = ragged_layout().arrange(requests).stack(Staging(32))
    assert buffers.keys() == expected.keys()
    for name, values in expected.items():
        assert buffers[name].dtype == values.dtype
        assert np.array_equal(buffers[name], values)


def test_a_scattered_output_may_have_more_dimensions() -> None:
    arrangement = ragged_layout().arrange([ragged_request(1, 3, 0), ragged_request(1, 2, 1)])
    elements = arrangement.stack(Staging(8))["x"]
    outputs = {"y": np.stack([elements, -elements], axis=1), "n": np.zeros((2, 1), np.int64)}
    first, second = arrangement.split(outputs, unchecked)
    assert first["y"].shape == (1, 3, 2)
    assert second["y"].shape == (1, 2, 2)
    assert np.array_equal(second["y"][0, :, 1], -elements[3:])


def test_a_scattered_output_of_another_size_is_a_mismatch() -> None:
    arrangement = ragged_layout().arrange([ragged_request(1, 3, 0), ragged_request(1, 2, 1)])
    arrangement.stack(Staging(8))
    with pytest.raises(OutputMismatch, match=r"expected 5 elements: those of input 'x'"):
        arrangement.split({"y": np.zeros(4), "n": np.zeros((2, 1))}, unchecked)


def padded_layout(multiple_of: int = 8, outputs: dict[str, TensorSpec] | None = None) -> PaddedLayout:
    padding = PaddedInputs(frozenset({"ids", "mask"}), 1, multiple_of)
    spec = ModelSpec(
        "m",
        "1",
        "",
        {"ids": TensorSpec("ids", INT64, (-1, -1)), "mask": TensorSpec("mask", INT64, (-1, -1))},
        outputs
        or {"y": TensorSpec("y", INT64, (-1, -1)), "pairs": TensorSpec("pairs", INT64, (-1, -1, -1))}
        | {"total": TensorSpec("total", INT64, (-1, 1))},
        8,
        padded=padding,
    )
    layout = batch_layout(HandlePolicy(padding=PaddingPolicy({"ids": 7, "mask": 0}, padding)), spec)
    assert isinstance(layout, PaddedLayout)
    return layout


def run(inputs: dict[str, Array]) -> dict[str, Array]:
    """A model of texts: per position, per pair of positions, and in all; masked positions do not count."""
    ids = inputs["ids"] * inputs["mask"]
    return {"y": ids, "pairs": ids[:, :, None] * ids[:, None, :], "total": ids.sum(axis=1, keepdims=True)}


class Texts(Execution):
    """Execution of `run`."""

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        return run(inputs)

    def close(self) -> None:
        """Nothing to close."""


def text(rows: int, length: int, seed: int = 0) -> dict[str, Array]:
    ids = np.random.default_rng(seed).integers(1, 100, (rows, length))
    return {"ids": ids, "mask": np.ones_like(ids)}


def learn(layout: PaddedLayout) -> None:
    """Check the model: the layout finds the dimensions of the outputs, and may pad."""
    layout.check(Texts(), [text(1, 3), text(1, 5)])
    assert layout.is_ready


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 8)), min_size=1, max_size=6), st.integers(1, 8))
def test_padding_never_leaks(sizes: list[tuple[int, int]], multiple_of: int) -> None:
    layout = padded_layout(multiple_of)
    learn(layout)
    staging = Staging(32)
    staging.pad("ids", [np.full((9, 1), -1)], 9, (1, 8, -1))  # a buffer with old values
    requests = [text(rows, length, seed) for seed, (rows, length) in enumerate(sizes)]
    arrangement = layout.arrange(requests)
    inputs = arrangement.stack(staging)
    lengths = {length for _, length in sizes}
    if len(lengths) > 1:
        assert inputs["ids"].shape[1] % multiple_of == 0
        assert (inputs["ids"][inputs["mask"] == 0] == 7).all()
    else:
        assert inputs["ids"].shape[1] == lengths.pop()
    for request, result in zip(requests, arrangement.split(run(inputs), unchecked), strict=True):
        for name, expected in run(request).items():
            assert np.array_equal(result[name], expected), name
            assert result[name].flags.c_contiguous


def entries(lengths: list[int]) -> list[Entry]:
    requests = [InferRequest(inputs=text(1, length), rows=1, shape_key=None, received_ns=0) for length in lengths]
    return [Entry(request, Completion(), 0, 0) for request in requests]


def groups_of(layout: PaddedLayout, lengths: list[int]) -> list[list[int]]:
    return [[layout.length(entry.inputs) for entry in group] for group in layout.divide(entries(lengths)).groups]


def test_nothing_is_padded_before_times_are_measured() -> None:
    layout = padded_layout()
    assert groups_of(layout, [3, 4, 3]) == [[3, 3], [4]]
    learn(layout)
    assert groups_of(layout, [3, 4, 3]) == [[3, 3], [4]]


def test_requests_are_padded_where_that_is_faster() -> None:
    layout = padded_layout()
    learn(layout)
    # The time does not depend on rows: a launch is all that counts.
    layout.lengths.seed({(rows, length): 1_000_000 for rows in (1, 2, 4, 8) for length in (1, 2, 4, 8)})
    assert groups_of(layout, [3, 4, 3]) == [[3, 4, 3]]


def test_requests_are_not_padded_where_that_is_slower() -> None:
    layout = padded_layout()
    learn(layout)
    # The time is that of the elements: padding only adds some.
    layout.lengths.seed({(rows, n): 1_000_000 * rows * n for rows in (1, 2, 4, 8) for n in (1, 2, 4, 8)})
    assert groups_of(layout, [3, 4, 3, 8]) == [[3, 3], [4], [8]]


def test_on_a_gpu_requests_are_padded_without_measured_times() -> None:
    layout = padded_layout()
    layout.always = True
    assert groups_of(layout, [3, 4]) == [[3], [4]]  # the dimensions of the outputs are not known yet
    learn(layout)
    assert groups_of(layout, [3, 4]) == [[3, 4]]


def test_requests_whose_own_lengths_differ_run_apart() -> None:
    layout = padded_layout()
    learn(layout)
    layout.always = True
    uneven = InferRequest(
        inputs={"ids": text(1, 3)["ids"], "mask": text(1, 4)["mask"]}, rows=1, shape_key=None, received_ns=0
    )
    batch = [*entries([3]), Entry(uneven, Completion(), 0, 0)]
    assert [len(group) for group in layout.divide(batch).groups] == [1, 1]


def test_only_some_lengths_are_padded() -> None:
    layout = padded_layout(64)
    learn(layout)
    # A run costs as much as 30 elements: short texts are worth padding to 64 only if there are several.
    layout.lengths.seed({(r, n): 1_000_000 * (30 + r * n) for r in (1, 2, 4, 8) for n in (16, 32, 64)})
    cheapest = layout.cheapest([1, 1, 1], [20, 62, 63])
    assert cheapest == [(0, 1), (1, 3)]


def test_a_mismatch_of_padded_outputs_is_found() -> None:
    layout = padded_layout()
    learn(layout)
    arrangement = layout.arrange([text(1, 3), text(1, 4)])
    outputs = run(arrangement.stack(Staging(8)))
    outputs["y"] = outputs["y"][:, :5]
    with pytest.raises(OutputMismatch, match="for inputs padded to 8"):
        arrangement.split(outputs, unchecked)


@pytest.mark.parametrize(
    ("first", "second", "axes", "problem"),
    [
        ((1, 4, 8), (1, 6, 8), {"y": (1,)}, ""),
        ((1, 8, 4), (1, 8, 6), {"y": (2,)}, ""),
        ((1, 4, 4), (1, 6, 6), {"y": (1, 2)}, ""),
        ((1, 8, 8), (1, 8, 8), {}, ""),
        ((1, 4, 6), (1, 6, 6), {"y": (1,)}, ""),
        ((1, 8, 8), (1, 12, 8), {}, "dimension 1 of output 'y' is 8 for the length 4 and 12 for 6"),
    ],
)
def test_dimensions_that_follow_the_length_are_found(
    first: tuple[int, ...], second: tuple[int, ...], axes: dict[str, tuple[int, ...]], problem: str
) -> None:
    lengths = OutputLengths({"y": TensorSpec("y", FP32, (-1, -1, -1))})
    lengths.observe(4, {"y": np.zeros(first)})
    lengths.observe(4, {"y": np.zeros(first)})
    assert not lengths.is_known
    lengths.observe(6, {"y": np.zeros(second)})
    assert lengths.axes == axes
    assert lengths.problem.startswith(problem)
    assert lengths.is_known == (not problem)


def test_outputs_that_cannot_be_cut_disable_padding(caplog: pytest.LogCaptureFixture) -> None:
    layout = padded_layout(outputs={"y": TensorSpec("y", INT64, (-1, -1))})
    for length in (3, 5):
        arrangement = layout.arrange([text(1, length)])
        arrangement.stack(Staging(1))
        arrangement.record({"y": np.zeros((1, 2 * length))}, 1000, 0)
    layout.always = True
    assert groups_of(layout, [3, 4]) == [[3], [4]]
    assert groups_of(layout, [3, 4]) == [[3], [4]]
    assert caplog.text.count("its requests are not padded: dimension 1 of output 'y'") == 1


def test_padding_that_takes_longer_than_estimated_ends() -> None:
    layout = padded_layout()
    learn(layout)
    layout.lengths.seed({(rows, length): 1_000_000 for rows in (1, 2, 4, 8) for length in (1, 2, 4, 8)})
    searched = []
    for _ in range(200):
        division = layout.divide(entries([3, 4]))
        searched.append(len(division.groups) == 1)
        layout.record_division(division, 3_000_000 if division.is_searched else 2_000_000, 2_000_000)
    assert sum(searched[:20]) == 8, "the first trial"
    assert not any(searched[20:])
    assert not layout.trials.is_grouping


def test_padding_that_takes_less_time_stays() -> None:
    layout = padded_layout()
    learn(layout)
    layout.lengths.seed({(rows, length): 1_000_000 for rows in (1, 2, 4, 8) for length in (1, 2, 4, 8)})
    searched = []
    for _ in range(200):
        division = layout.divide(entries([3, 4]))
        searched.append(len(division.groups) == 1)
        layout.record_division(division, *[1_000_000 if division.is_searched else 2_000_000] * 2)
    assert layout.trials.is_grouping
    assert sum(searched[40:]) >= 160 * 14 / 16


def trial(layout: PaddedLayout, elapsed_ns: int, cpu_ns: int) -> None:
    """Run a trial; padded batches take these times, others 2 ms of both."""
    for _ in range(16):
        division = layout.divide(entries([3, 4]))
        layout.record_division(division, *(elapsed_ns, cpu_ns) if division.is_searched else (2_000_000, 2_000_000))


def test_padding_that_takes_more_processor_time_ends() -> None:
    layout = padded_layout()
    learn(layout)
    layout.lengths.seed({(rows, length): 1_000_000 for rows in (1, 2, 4, 8) for length in (1, 2, 4, 8)})
    trial(layout, 1_500_000, 2_500_000)
    assert not layout.trials.is_grouping


def test_trials_become_rarer_while_padding_does_not_pay() -> None:
    now = [0]
    trials = PaddingTrials(lambda: now[0])
    rests = []
    for _ in range(9):
        for _ in range(16):
            searched, is_measured = trials.next()
            assert is_measured
            trials.record(searched, 1e6, 1_200_000 if searched else 1_000_000, 1_000_000)
            now[0] += 1_100_000
        assert not trials.is_grouping
        assert trials.next() == (False, False)
        ended = now[0]
        while not trials.is_grouping:
            now[0] += 10_000_000
            trials.resume(now[0])
        rests.append(now[0] - ended)
    trial_ns = 16 * 1_100_000
    assert rests[0] >= 64 * trial_ns
    assert all(after > 1.9 * before for before, after in itertools.pairwise(rests[:7]))
    assert rests[-1] <= 4097 * trial_ns
