"""`python -m tests.support.fake_gpu_server serve ...`: a real server in a process whose GPU and TensorRT are fakes.

The GPU fetches rows where they lie, and clients share its memory by handles that name files. Child processes of a server with
front ends are forks, with the same fakes.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.__main__ import main
from headrace.core.tensor import Array
from headrace.runtimes.cuda import devices
from headrace.runtimes.tensorrt import buffers
from headrace.server import data_plane
from headrace.server.front_ends import child_main as child_program
from headrace.server.front_ends import engine_process

from tests.support import fake_builder, fake_nvml
from tests.support.fake_gpu import install_gpu
from tests.support.fake_streams import LateCuda
from tests.support.lost_gpu_cases import FILE

ORDERS = "FAKE_BUILDER_ORDERS"
GPUS = "FAKE_GPUS"  # number of GPUs
HANDLE_BYTES = 64
SHARED = "/dev/shm"


class Exported(dict[bytes, Array]):
    """Memory of other processes by handle: the names of files, filled up with zeros."""

    def __contains__(self, handle: object) -> bool:
        assert isinstance(handle, bytes)
        path = Path(SHARED, handle.rstrip(b"\0").decode())
        if not path.is_file():
            return False
        self[handle] = np.memmap(path, np.uint8, "r+")
        return True


class Memory:
    """This process's memory as a GPU reads it: what is not there any more is no signal, but zeros."""

    def __init__(self) -> None:
        self.open()

    def open(self) -> None:
        """Read this process's memory from now on; in a fork, not that of its parent."""
        self._file = os.open("/proc/self/mem", os.O_RDONLY)

    def read(self, address: int, size_bytes: int) -> bytes:
        try:
            result = os.pread(self._file, size_bytes, address)
        except OSError:
            result = b""
        return result.ljust(size_bytes, b"\0")


class FakeGather:
    """Stands for `headrace.runtimes.cuda.kernels.launching.RowGather`."""

    def __init__(self, cuda: LateCuda, memory: Memory, gpu: int) -> None:
        self._cuda = cuda
        self._memory = memory
        self._gpu = gpu

    def launch(
        self, stream: Any, addresses: int, row_bytes: int, rows: int, total: int, destination: int, blocks: int
    ) -> None:
        def gather() -> None:
            table = struct.unpack(f"={rows}Q", ctypes.string_at(addresses, 8 * rows))
            for address in (*table, destination):
                self._cuda.check_on_gpu(address, self._gpu)
            for row in range(total):
                values = self._memory.read(table[min(row, rows - 1)], row_bytes)
                ctypes.memmove(destination + row * row_bytes, values, row_bytes)

        self._cuda.submit(gather, stream.handle)

    def close(self) -> None:
        pass


def fail(cuda: LateCuda, file: Path, gpus: set[int]) -> None:
    """Let GPUs fail in this process for good once a file exists, and delete it."""
    while not file.exists():
        time.sleep(0.02)
    file.unlink()
    cuda.lost = gpus


def may_fail(cuda: LateCuda, gpus: set[int]) -> None:
    """Let GPUs fail on request if the environment names the file."""
    if FILE in os.environ:
        threading.Thread(target=fail, args=(cuda, Path(os.environ[FILE]), gpus), daemon=True).start()


def report_copies(cuda: LateCuda) -> None:
    """Print the copies between GPUs to standard error, if there are several."""
    if cuda.devices > 1:
        pairs = sorted({f"{source} to {target}" for source, target, _ in cuda.peer_copies})
        sys.stderr.write(f"copies between GPUs: {', '.join(pairs)}\n")


if __name__ == "__main__":
    patch = pytest.MonkeyPatch()
    if ORDERS in os.environ:  # a builder for tests, since the real one has no GPU
        patch.setattr(
            data_plane,
            "Reconciler",
            partial(data_plane.Reconciler, builder=fake_builder.command(Path(os.environ[ORDERS]))),
        )
    cuda = install_gpu(patch)
    cuda.devices = int(os.environ.get(GPUS, "1"))
    if ("--front-ends", "0") in pairwise(sys.argv):  # this process alone
        may_fail(cuda, {0})
    cuda.exported = Exported()
    memory = Memory()
    patch.setattr(buffers, "RowGather", lambda device: FakeGather(cuda, memory, device))
    fake_nvml.install(patch, fake_nvml.FakeNvml())
    patch.setattr(devices, "pci_addresses", lambda: [f"0000:0{gpu}:00.0" for gpu in range(1, cuda.devices + 1)])
    run_child = child_program.run

    run_engine = engine_process.EngineProcess.run

    def run_with_failures(process: engine_process.EngineProcess) -> int:
        may_fail(cuda, {0, 1})
        return run_engine(process)

    patch.setattr(engine_process.EngineProcess, "run", run_with_failures)

    def run(sock: socket.socket) -> int:
        memory.open()
        try:
            return run_child(sock)
        finally:
            report_copies(cuda)

    patch.setattr(child_program, "run", run)
    status = main()
    report_copies(cuda)
    sys.exit(status)
