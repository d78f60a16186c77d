"""Non-maximum suppression: the rules, and a slow reference on random boxes."""

from __future__ import annotations

import numpy as np
import pytest
from headrace.core.errors import BadRequest
from headrace.inference.pipelines.steps.nms import suppress
from headrace.inference.pipelines.steps.options import NmsOptions
from hypothesis import given
from hypothesis import strategies as st

BOXES = np.array([[0, 0, 10, 10], [1, 1, 10, 10], [20, 20, 30, 30], [0, 0, 10, 11]], np.float32)
SCORES = np.array([0.8, 0.9, 0.7, 0.1], np.float32)


def kept(
    boxes: np.ndarray = BOXES, scores: np.ndarray = SCORES, classes: np.ndarray | None = None, **options: object
) -> list[int]:
    result: list[int] = suppress(boxes, scores, classes, NmsOptions(**options)).tolist()  # type: ignore[arg-type]
    return result


def test_the_best_of_overlapping_boxes_remains() -> None:
    assert kept() == [1, 2]


def test_boxes_of_different_classes_do_not_suppress_each_other() -> None:
    assert kept(classes=np.array([7, 3, 3, 7])) == [1, 0, 2]


def test_thresholds_and_the_number_of_boxes_bound_the_result() -> None:
    assert kept(score_threshold=0.75) == [1]
    assert kept(score_threshold=0.9) == []  # at the threshold: dropped
    assert kept(iou_threshold=1.0) == [1, 0, 2, 3]
    assert kept(iou_threshold=1.0, max_boxes=2) == [1, 0]


def test_corners_come_in_any_order_and_centers_mean_the_same_boxes() -> None:
    swapped = BOXES[:, [2, 3, 0, 1]]
    low, high = BOXES[:, :2], BOXES[:, 2:]
    centers = np.concatenate([(low + high) / 2, high - low], axis=1)
    assert kept(swapped) == kept(centers, format="center") == kept()


def test_equal_scores_prefer_the_lower_index() -> None:
    assert kept(scores=np.full(4, 0.5, np.float32)) == [0, 2]


def test_no_boxes_and_boxes_without_scores_give_none() -> None:
    assert kept(np.zeros((0, 4), np.float32), np.zeros(0, np.float32)) == []
    assert kept(scores=np.full(4, np.nan, np.float32)) == []


def test_boxes_without_an_area_suppress_nothing() -> None:
    points = np.zeros((3, 4), np.float32)
    assert kept(points, np.ones(3, np.float32)) == [0, 1, 2]


def test_tensors_of_different_length_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"shapes are \[\[4, 4\], \[3\]\]"):
        kept(scores=SCORES[:3])


def reference(boxes: np.ndarray, scores: np.ndarray, classes: np.ndarray, threshold: float) -> list[int]:
    result: list[int] = []
    for i in sorted(range(len(boxes)), key=lambda i: (-scores[i], i)):
        if scores[i] <= 0:
            continue
        for j in result:
            a, b = boxes[i].astype(float), boxes[j].astype(float)
            w = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
            h = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
            union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - w * h
            if classes[i] == classes[j] and union > 0 and w * h / union > threshold:
                break
        else:
            result.append(i)
    return result


@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.sampled_from([0.0, 0.3, 0.5, 0.9]))
def test_random_boxes_agree_with_a_reference(seed: int, count: int, threshold: float) -> None:
    generator = np.random.default_rng(seed)
    # Whole numbers, so that both compute the same quotients.
    low = generator.integers(0, 30, (count, 2))
    boxes = np.concatenate([low, low + generator.integers(1, 20, (count, 2))], axis=1).astype(np.float32)
    scores = generator.integers(0, 8, count).astype(np.float32) / 8
    classes = generator.integers(0, 3, count)
    assert kept(boxes, scores, classes, iou_threshold=threshold) == reference(boxes, scores, classes, threshold)


def test_a_huge_box_leaves_the_other_classes_exact() -> None:
    boxes = np.array([[0, 0, 10, 10], [1, 1, 10, 10], [0, 0, 1e25, 1e25]], np.float32)
    assert kept(boxes, np.array([0.9, 0.8, 0.7], np.float32), np.array([1, 1, 0])) == [0, 2]


def test_centers_with_a_negative_side_have_no_area() -> None:
    boxes = np.array([[5, 5, 10, 10], [5, 5, -10, -10], [5, 5, -10, 10]], np.float32)
    assert kept(boxes, np.array([0.7, 0.9, 0.8], np.float32), format="center") == [1, 2, 0]
