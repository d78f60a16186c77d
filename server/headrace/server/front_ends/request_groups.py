"""Divides the requests of one turn of a front end's event loop into groups, each of which is sent and queued as one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

from headrace.core.request import NO_RANGES, InferRequest
from headrace.core.tensor import ResidentRows, is_resident
from headrace.server.front_ends import frames
from headrace.server.front_ends.remote_regions import region_of

# Smaller tensors are sent in frames: copying them costs less than a slot.
MIN_SLOT_BYTES = 32 << 10

_Waiter = TypeVar("_Waiter")


def group_requests(
    pending: Sequence[tuple[InferRequest, _Waiter]], max_rows: int, row_bytes: int
) -> list[list[tuple[InferRequest, _Waiter]]]:
    """Divide requests of one version, in their order, into groups that may share a batch.

    Requests with large inputs form groups of their own: those with inputs of equal shapes, all of them large, and with small
    outputs. Their rows are sent in slots of the arena.

    Args:
        pending: requests with their completions.
        max_rows: most rows of a group; below 2 each request is sent alone.
        row_bytes: outputs of one row, 0 if that differs from request to request.
    """
    if max_rows < 2 or len(pending) < 2:
        return [[pair] for pair in pending]
    groups: list[list[tuple[InferRequest, _Waiter]]] = []
    open_groups: dict[Hashable, tuple[list[tuple[InferRequest, _Waiter]], int]] = {}
    for pair in pending:
        request = pair[0]
        key = _group_key(request, row_bytes) if request.rows < max_rows and _is_plain(request) else _ALONE
        if key is _ALONE:
            groups.append([pair])
            continue
        group, rows = open_groups.get(key, ([], 0))
        if not group or rows + request.rows > max_rows or len(group) >= frames.MAX_MEMBERS:
            group, rows = [], 0
            groups.append(group)
        group.append(pair)
        open_groups[key] = (group, rows + request.rows)
    return groups


_ALONE: Hashable = object()


def are_in_regions(request: InferRequest, row_bytes: int) -> bool:
    """Return True if all inputs of a request are in shared memory of clients, and no output needs a slot."""
    if request.output_ranges or request.rows * row_bytes >= MIN_SLOT_BYTES:
        return False
    return all(is_resident(array) and region_of(array).region.isascii() for array in request.inputs.values())


def _group_key(request: InferRequest, row_bytes: int) -> Hashable:
    """Return a key that is equal for the requests of a group, `_ALONE` for a request that is sent alone."""
    inputs = request.inputs
    if ResidentRows in map(type, inputs.values()):
        if not are_in_regions(request, row_bytes):
            return _ALONE
        return (ResidentRows, *[(name, array.shape) for name, array in inputs.items()])
    if request.size_bytes < MIN_SLOT_BYTES:
        return request.shape_key
    if request.rows * row_bytes >= MIN_SLOT_BYTES:
        return _ALONE  # its outputs need a slot of their own
    for array in inputs.values():
        if array.nbytes < MIN_SLOT_BYTES or array.dtype.hasobject:
            return _ALONE
    return (request.shape_key, *[(name, array.shape) for name, array in inputs.items()])


def _is_plain(request: InferRequest) -> bool:
    """Return True for a request without options, which may be a member of a group."""
    return not (
        request.deadline_ns
        or request.priority
        or request.queue_timeout_ns
        or request.client
        or request.parameters
        or request.output_ranges is not NO_RANGES
    )
