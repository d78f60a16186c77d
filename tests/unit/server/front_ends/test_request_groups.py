"""Groups of the requests of one turn of a front end's event loop."""

from __future__ import annotations

from typing import Any

import numpy as np
from headrace.core.request import InferRequest
from headrace.server.front_ends.request_groups import MIN_SLOT_BYTES, group_requests
from hypothesis import given
from hypothesis import strategies as st

LARGE, SMALL = MIN_SLOT_BYTES, 100


def infer_request(rows: int = 1, row_bytes: int = LARGE, shape_key: object = None, **more: Any) -> InferRequest:
    inputs: dict[str, Any] = {"x": np.empty((rows, row_bytes), np.uint8)}
    size_bytes = rows * row_bytes
    return InferRequest(inputs=inputs, rows=rows, shape_key=shape_key, received_ns=1, size_bytes=size_bytes, **more)


def sizes(requests: list[InferRequest], max_rows: int = 8, row_bytes: int = 4) -> list[int]:
    """Members of each group."""
    pairs = [(request, number) for number, request in enumerate(requests)]
    return [len(group) for group in group_requests(pairs, max_rows, row_bytes)]


requests = st.builds(
    infer_request,
    st.integers(1, 9),
    st.sampled_from([SMALL, LARGE, LARGE + 1]),
    st.sampled_from([None, "a", "b"]),
    priority=st.sampled_from([0, 0, 0, 1]),
)


@given(st.lists(requests, max_size=30), st.integers(0, 12), st.sampled_from([0, 4, LARGE // 4]))
def test_each_request_is_in_one_group_that_may_share_a_batch(
    pending: list[InferRequest], max_rows: int, row_bytes: int
) -> None:
    groups = group_requests([(request, number) for number, request in enumerate(pending)], max_rows, row_bytes)
    assert sorted(number for group in groups for _, number in group) == list(range(len(pending)))
    for group in groups:
        numbers = [number for _, number in group]
        assert numbers == sorted(numbers)
        if len(group) == 1:
            continue
        members = [request for request, _ in group]
        assert sum(request.rows for request in members) <= max_rows
        assert len({request.shape_key for request in members}) == 1
        assert not any(request.priority for request in members)
        is_large = {request.size_bytes >= MIN_SLOT_BYTES for request in members}
        assert len(is_large) == 1
        if True in is_large:
            assert len({request.inputs["x"].shape for request in members}) == 1
            assert members[0].rows * row_bytes < MIN_SLOT_BYTES


def test_large_requests_form_groups_of_equal_shapes() -> None:
    assert sizes([infer_request() for _ in range(5)]) == [5]
    assert sizes([infer_request(2), infer_request(), infer_request(2), infer_request()]) == [2, 2]
    assert sizes([infer_request(), infer_request(1, SMALL), infer_request()]) == [2, 1]
    assert sizes([infer_request() for _ in range(5)], max_rows=2) == [2, 2, 1]


def test_large_outputs_and_small_inputs_beside_large_ones_are_sent_alone() -> None:
    assert sizes([infer_request(), infer_request()], row_bytes=MIN_SLOT_BYTES) == [1, 1]
    mixed = [infer_request(), infer_request()]
    for request in mixed:
        request.inputs["y"] = np.empty((1, 4), np.uint8)
    assert sizes(mixed) == [1, 1]
    texts = [infer_request(), infer_request()]
    for request in texts:
        request.inputs = {"x": np.empty((1, LARGE), object)}
    assert sizes(texts) == [1, 1]
