"""Parameters of requests, inputs and outputs: reserved names, values, ranges of shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.core.errors import BadRequest

_MAX_OFFSET = 2**63
_RESERVED = ("triton_", "headrace.", "headrace_")
# Names with a reserved prefix that clients may send. True: the response has the time of each phase.
TIMING_PARAMETER = "headrace_timing"
# Deadline of the request, microseconds after its arrival. Triton's `timeout` limits only the time in the queue.
DEADLINE_PARAMETER = "headrace_deadline_us"
# True: the response may be sent before those of earlier requests on the same gRPC stream.
UNORDERED_PARAMETER = "headrace_unordered"
_CLIENT_PARAMETERS = frozenset({TIMING_PARAMETER, DEADLINE_PARAMETER, UNORDERED_PARAMETER})
_SHARED = "shared_memory_"
_SHARED_PARAMETERS = frozenset({"shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"})


class SharedRange(msgspec.Struct, frozen=True):
    """Range of a client's shared memory.

    Attributes:
        region: registered name.
        offset: start within the region, bytes.
        size_bytes: 0 for a tensor without elements.
    """

    region: str
    offset: int
    size_bytes: int


def request_parameters(parameters: Mapping[str, Any]) -> None:
    """Check the names of request parameters.

    `sequence_id`, `sequence_start` and `sequence_end` are allowed: as in Triton, a model without sequences ignores them.

    Raises:
        BadRequest: a name is reserved, or belongs to a tensor (shared memory).
    """
    for name in parameters:
        if name in _CLIENT_PARAMETERS:
            continue
        _check_parameter(name)
        if name.startswith(_SHARED):
            raise BadRequest(f"parameter {name[:64]!r} belongs to an input or an output, not to the request")


def tensor_parameters(parameters: Mapping[str, Any], kind: str, name: str) -> SharedRange | None:
    """Check the parameters of an input or output, and parse its range of shared memory.

    Args:
        parameters: of the tensor.
        kind: "input" or "output", for errors.
        name: of the tensor, for errors.

    Returns:
        The range of shared memory, None if the tensor is not in shared memory.

    Raises:
        BadRequest: a name is reserved, or the range is incomplete or invalid.
    """
    shared = False
    for parameter in parameters:
        _check_parameter(parameter)
        shared = shared or parameter.startswith(_SHARED)
    return _shared_range(parameters, kind, name) if shared else None


def integer(parameters: Mapping[str, Any], name: str) -> int:
    """Return an integer parameter, 0 if it is absent.

    Raises:
        BadRequest: the value is no integer.
    """
    value = parameters.get(name, 0)
    if type(value) is not int:
        raise BadRequest(f"parameter '{name}' must be a whole number, not {type(value).__name__}")
    return value


def flag(parameters: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a boolean parameter, `default` if it is absent.

    Raises:
        BadRequest: the value is no boolean.
    """
    value = parameters.get(name, default)
    if type(value) is not bool:
        raise BadRequest(f"parameter '{name}' must be true or false, not {type(value).__name__}")
    return value


def _check_parameter(name: str) -> None:
    if name.startswith(_RESERVED):
        raise BadRequest(f"parameter {name[:64]!r} is reserved for the server")


def _shared_range(parameters: Mapping[str, Any], kind: str, name: str) -> SharedRange:
    for parameter in parameters:
        if parameter.startswith(_SHARED) and parameter not in _SHARED_PARAMETERS:
            raise BadRequest(f"{kind} '{name}': unknown parameter {parameter[:64]!r}")
    region = parameters.get("shared_memory_region")
    if region is None or "shared_memory_byte_size" not in parameters:
        raise BadRequest(f"{kind} '{name}' needs both shared_memory_region and shared_memory_byte_size, one is missing")
    if type(region) is not str or not region:
        raise BadRequest(f"{kind} '{name}': shared_memory_region must be the name of a region")
    size_bytes, offset = integer(parameters, "shared_memory_byte_size"), integer(parameters, "shared_memory_offset")
    if not (0 <= size_bytes < _MAX_OFFSET and 0 <= offset < _MAX_OFFSET):
        raise BadRequest(
            f"{kind} '{name}': shared_memory_byte_size and shared_memory_offset must be at least 0, "
            f"they are {size_bytes} and {offset}"
        )
    return SharedRange(region, offset, size_bytes)
