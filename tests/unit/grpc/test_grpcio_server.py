"""Log lines of grpcio: disconnects of clients are no server errors, all others are."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest
from headrace.grpc.grpcio_server import _is_server_error


class ExecuteBatchError(Exception):
    """As grpcio names its own."""


def logged(error: BaseException) -> logging.LogRecord:
    try:
        raise error
    except BaseException:
        return logging.LogRecord("grpc", logging.ERROR, "file", 1, "it went wrong", (), sys.exc_info())


@pytest.mark.parametrize("error", [asyncio.CancelledError(), ExecuteBatchError()])
def test_disconnects_of_clients_are_not_logged(error: BaseException) -> None:
    assert not _is_server_error(logged(error))


def test_server_errors_are_logged() -> None:
    assert _is_server_error(logged(RuntimeError("a fault")))
    assert _is_server_error(logging.LogRecord("grpc", logging.ERROR, "file", 1, "it went wrong", (), None))
