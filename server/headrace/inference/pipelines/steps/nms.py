"""Built-in step `nms`: non-maximum suppression of boxes.

Greedy suppression as in torchvision's `nms` and ONNX's NonMaxSuppression: boxes in descending order of score; a box is dropped if
its intersection over union with a kept box of the same class exceeds the threshold.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.core.errors import BadRequest
from headrace.core.tensor import Array
from headrace.inference.pipelines.steps.options import NmsOptions

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

# Boxes that are compared with each other; the cost grows with the square.
MAX_CANDIDATES = 4096


def suppress(boxes: Array, scores: Array, classes: Array | None, options: NmsOptions) -> Ints:
    """Return the indices of the kept boxes, best first; of equal scores the lower index comes first.

    Args:
        boxes: float (n, 4).
        scores: float (n,).
        classes: integers (n,); boxes of different classes do not suppress each other. None: all are of one class.
        options: thresholds.

    Returns:
        int64 (kept,), at most `max_boxes`.

    Raises:
        BadRequest: the tensors do not have the same number of boxes.
    """
    count = boxes.shape[0]
    if scores.shape != (count,) or (classes is not None and classes.shape != (count,)):
        shapes = [list(array.shape) for array in (boxes, scores, classes) if array is not None]
        raise BadRequest(f"nms needs boxes [n, 4], scores [n] and classes [n], the shapes are {shapes}")
    corners = _corners(boxes.astype(np.float32), options.format)
    values = scores.astype(np.float32)
    # A comparison with NaN is false, so boxes without a score are dropped.
    candidates = np.flatnonzero(values > options.score_threshold)
    order = candidates[np.argsort(-values[candidates], kind="stable")][:MAX_CANDIDATES]
    kept: list[int] = []
    areas = _areas(corners)
    while order.size and len(kept) < options.max_boxes:
        best, rest = int(order[0]), order[1:]
        kept.append(best)
        remains = _overlap(corners, areas, best, rest) <= options.iou_threshold
        if classes is not None:
            remains |= classes[rest] != classes[best]
        order = rest[remains]
    return np.array(kept, np.int64)


def _corners(boxes: Floats, layout: str) -> npt.NDArray[np.float64]:
    values = boxes.astype(np.float64)
    if layout == "center":
        half = np.maximum(values[:, 2:], 0.0) / 2
        return np.concatenate([values[:, :2] - half, values[:, :2] + half], axis=1)
    # Either corner may come first.
    return np.concatenate([np.minimum(values[:, :2], values[:, 2:]), np.maximum(values[:, :2], values[:, 2:])], axis=1)


def _areas(corners: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    areas: npt.NDArray[np.float64] = (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])
    return areas


def _overlap(
    corners: npt.NDArray[np.float64], areas: npt.NDArray[np.float64], best: int, rest: npt.NDArray[np.intp]
) -> npt.NDArray[np.float64]:
    """Return the intersection over union of one box with others; 0 for boxes without an area."""
    low = np.maximum(corners[best, :2], corners[rest, :2])
    high = np.minimum(corners[best, 2:], corners[rest, 2:])
    sides = np.clip(high - low, 0.0, None)
    shared = sides[:, 0] * sides[:, 1]
    union = areas[best] + areas[rest] - shared
    overlap: npt.NDArray[np.float64] = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return overlap
