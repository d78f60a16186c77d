"""Rows of a tensor as rows of one request (`each`)."""

from __future__ import annotations

import numpy as np
import pytest
from headrace.core.errors import BadRequest
from headrace.core.tensor import BYTES, FP32, TensorSpec
from headrace.inference.pipelines.rows import MAX_EACH_ROWS, count_rows, no_rows, spread

DIMS = {"box": (4,), "image": (3, -1, -1), "id": (1,)}


def test_rows_stay_apart_and_shared_tensors_are_repeated_without_a_copy() -> None:
    boxes = np.arange(12, dtype=np.float32).reshape(3, 4)
    image = np.ones((3, 5, 6), np.float32)
    inputs = spread({"box": boxes, "image": image}, "box", 3, DIMS)
    assert inputs["box"] is boxes
    assert inputs["image"].shape == (3, 3, 5, 6)
    assert np.shares_memory(inputs["image"], image)


def test_a_shared_tensor_may_have_a_batch_dimension_of_one() -> None:
    image = np.ones((1, 3, 5, 6), np.float32)
    inputs = spread({"box": np.zeros((2, 4), np.float32), "image": image}, "box", 2, DIMS)
    assert inputs["image"].shape == (2, 3, 5, 6)


def test_a_list_of_values_is_one_value_a_row() -> None:
    inputs = spread({"box": np.zeros((3, 4), np.float32), "id": np.arange(3)}, "box", 3, DIMS)
    assert inputs["id"].tolist() == [[0], [1], [2]]


def test_a_tensor_with_another_number_of_rows_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"input 'id' has shape \[2, 1\]; with each over 3 rows it needs \[3, 1\]"):
        spread({"box": np.zeros((3, 4), np.float32), "id": np.zeros((2, 1))}, "box", 3, DIMS)


def test_the_number_of_rows_is_bounded() -> None:
    assert count_rows("boxes", np.zeros((MAX_EACH_ROWS, 4))) == MAX_EACH_ROWS
    with pytest.raises(BadRequest, match="4097 rows, at most 4096"):
        count_rows("boxes", np.zeros((MAX_EACH_ROWS + 1, 4)))
    assert count_rows("boxes", np.zeros((96, 4)), earlier_rows=4000) == 96
    with pytest.raises(BadRequest, match="more than 4096 rows in all rows of the request together"):
        count_rows("boxes", np.zeros((97, 4)), earlier_rows=4000)
    with pytest.raises(BadRequest, match="a single value"):
        count_rows("boxes", np.array(1.0))


def test_no_rows_have_the_shape_and_type_of_the_outputs() -> None:
    outputs = no_rows({"y": TensorSpec("y", FP32, (-1, 7)), "t": TensorSpec("t", BYTES, (-1, -1))})
    assert (outputs["y"].shape, outputs["y"].dtype) == ((0, 7), np.float32)
    assert (outputs["t"].shape, outputs["t"].dtype) == ((0, 0), object)
