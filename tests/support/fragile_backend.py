"""A backend for tests of isolation, whose models do to their process what the first value of a row says.

y = 2x, and `pid` is the process that ran it, for each row. The model's file (or its parameter `words`) holds words: `overlapped`
lets batches overlap; `abort`, `hang`, `raise` and `refuse` are done at load; `wait` holds every batch until the file `go` lies
beside the model's.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from headrace.core.errors import ConfigError, Finding
from headrace.core.ledger import HOST, Kind, MemoryAccount
from headrace.core.tensor import Array
from headrace.runtimes.base import Backend, Execution, ExecutionLost, InputRefused, LoadedModel
from headrace.runtimes.overlapped import InFlightBatch, OverlappedExecution

FACTORY = "tests.support.fragile_backend:FragileBackend"
ABORT, SEGFAULT, HANG, RAISE, REFUSE, LOST, EXIT, BIG, UNKNOWN = -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0, -9.0

logger = logging.getLogger("headrace.fragile")


class FragileBackend(Backend):
    """Backend whose models fail by the words of their file and by values of requests."""

    def load(
        self, file: Path, instances: int, parameters: dict[str, str], account: MemoryAccount | None = None
    ) -> FragileModel:
        if account is not None:
            account.reservation(0, Kind.WEIGHTS, int(parameters["weights"]))
            account.reservation(HOST, Kind.BUFFERS, 10)
        words = parameters["words"].split() if "words" in parameters else file.read_text().split()
        logger.warning("loads %s for %d with %s", file.name, instances, sorted(parameters))
        print("printed by the child", file=sys.stderr, flush=True)
        if "abort" in words:
            os.abort()
        if "hang" in words:
            threading.Event().wait()
        if "refuse" in words:
            raise ConfigError([Finding(file.name, 3, "is refused", "write another")])
        if "raise" in words:
            raise RuntimeError("secret /path")
        return FragileModel(words, file.parent / "go")


class FragileModel(LoadedModel):
    """Loaded model that fails by the words of its file and by values of requests."""

    def __init__(self, words: list[str], go: Path) -> None:
        self._words = words
        self._go = go if "wait" in words else None

    def execution(self, index: int) -> FragileExecution:
        return OverlappedFragile(self._go) if "overlapped" in self._words else FragileExecution(self._go)

    def close(self) -> None:
        logger.warning("closed")


class FragileExecution(Execution):
    """One batch after the other."""

    def __init__(self, go: Path | None) -> None:
        self._go = go

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        while self._go is not None and not self._go.exists():
            time.sleep(0.005)
        x = np.asarray(inputs["x"])
        if x.dtype.hasobject:
            texts = np.empty(x.shape, object)
            texts.reshape(-1)[:] = [item + b"!" for item in x.reshape(-1).tolist()]
            return {"y": texts}
        for row in x:
            misbehave(float(row.flat[0]))
        y = x * 2
        if BIG in x:
            y = np.tile(y, (1, 100_000))
        return {"y": y, "pid": np.full((len(x), 1), os.getpid(), np.int64)}

    def close(self) -> None:
        return


class OverlappedFragile(FragileExecution):
    """Two batches open at the same time; they are run when they are finished."""

    depth = 2

    def begin(self, like: Mapping[str, Array], rows: int) -> InFlightBatch:
        return InFlightBatch({"x": np.zeros((rows, *like["x"].shape[1:]), like["x"].dtype)}, rows)

    def launch(self, in_flight: InFlightBatch) -> None:
        if RAISE - 0.5 in in_flight.inputs["x"]:
            raise RuntimeError("at the launch: /secret")

    def finish(self, in_flight: InFlightBatch) -> dict[str, Array]:
        return self.run(in_flight.inputs)

    def discard(self, in_flight: InFlightBatch) -> None:
        return


def misbehave(value: float) -> None:
    """Do what a row says."""
    if value == ABORT:
        os.abort()
    if value == SEGFAULT:
        ctypes.string_at(0)
    if value == HANG:
        threading.Event().wait()
    if value == RAISE:
        raise RuntimeError("poisoned: /secret/path")
    if value == REFUSE:
        raise InputRefused("five is too much")
    if value == LOST:
        raise ExecutionLost("sticky: /secret/path")
    if value == EXIT:
        os._exit(3)
    if value == UNKNOWN:
        os.kill(os.getpid(), signal.SIGKILL)


# Commands of tests, and reports to them.


def x_of(*values: float) -> dict[str, Array]:
    """Inputs of a row for each value."""
    return {"x": np.array([[value] * 3 for value in values], np.float32)}


def values(outputs: dict[str, Array]) -> list[float]:
    """The first of each row of y."""
    result: list[float] = np.asarray(outputs["y"])[:, 0].tolist()
    return result


def pid(outputs: dict[str, Array]) -> int:
    """The process that ran it."""
    return int(np.asarray(outputs["pid"])[0, 0])


def fly(execution: OverlappedExecution, *rows: float) -> InFlightBatch:
    """Launch a batch of a row for each value."""
    like = x_of(rows[0])
    in_flight = execution.begin(like, len(rows))
    in_flight.inputs["x"][:] = x_of(*rows)["x"]  # type: ignore[index]
    execution.launch(in_flight)
    return in_flight
