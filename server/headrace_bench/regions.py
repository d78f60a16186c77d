"""System shared memory that holds the inputs of all prepared requests (`--shared-memory`)."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from headrace.core.errors import BadRequest, HeadraceError

from headrace_bench.inputs import Request
from headrace_bench.target import Control
from headrace_bench.wire import Placement, Placements

FOLDER = "/dev/shm"
PREFIX = "hrbench_client_"
# Tensors begin at multiples of it, so that a server can read them in place.
_ALIGNMENT = 64


@contextmanager
def shared_inputs(control: Control, requests: Sequence[Request]) -> Iterator[list[Placements]]:
    """Write the inputs into shared memory, register it with the server, and remove it at the end.

    Args:
        control: calls to the server.
        requests: the prepared requests.

    Yields:
        Placements of each request.

    Raises:
        BadRequest: this system has no such memory, or too little of it.
        HeadraceError: the server refuses the registration.
    """
    placements, size = _layout(requests)
    name = f"{PREFIX}{os.getpid()}"
    path = f"{FOLDER}/{name}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise BadRequest(
            f"--shared-memory: {path} cannot be created ({error.strerror}): it needs Linux and a writable {FOLDER}; "
            "leave --shared-memory out"
        ) from None
    try:
        _fill(descriptor, size, requests, placements)
        _register(control, name, size)
        try:
            yield placements
        finally:
            with suppress(HeadraceError):  # a server that has ended reads the memory no more
                control.unregister(name)
    finally:
        os.close(descriptor)
        os.unlink(path)


def _register(control: Control, name: str, size: int) -> None:
    try:
        control.register(name, f"/{name}", size)
    except HeadraceError as error:
        cure = "the server may lack the shared-memory extension, or forbid it to clients: leave --shared-memory out"
        raise HeadraceError(f"--shared-memory: {error}; {cure}") from None


def _layout(requests: Sequence[Request]) -> tuple[list[Placements], int]:
    name, offset = f"{PREFIX}{os.getpid()}", 0
    result: list[Placements] = []
    for request in requests:
        places = {}
        for tensor in request:
            places[tensor.name] = Placement(name, offset)
            offset += -(-max(1, len(tensor.raw)) // _ALIGNMENT) * _ALIGNMENT
        result.append(places)
    return result, offset


def _fill(descriptor: int, size: int, requests: Sequence[Request], placements: Sequence[Placements]) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)  # a full folder is an error here, not a SIGBUS later
    except OSError as error:
        raise BadRequest(
            f"--shared-memory: {size} bytes do not fit into {FOLDER} ({error.strerror}): lower --distinct or --batch"
        ) from None
    with mmap.mmap(descriptor, size) as memory:
        for request, places in zip(requests, placements, strict=True):
            for tensor in request:
                offset = places[tensor.name].offset
                memory[offset : offset + len(tensor.raw)] = tensor.raw
