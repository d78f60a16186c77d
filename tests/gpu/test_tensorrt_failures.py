"""Failures on a real GPU: no memory, damaged plans, spoilt captures, interrupts; and that nothing is left behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from headrace.runtimes.cuda.devices import describe
from headrace.runtimes.cuda.driver import CudaGraph, CudaStream, DeviceError, OutOfDeviceMemory, current
from headrace.runtimes.cuda.memory import DeviceBuffer, PinnedBuffer, download
from headrace_engines.progress import silent
from headrace_engines.targets.base import TargetSpec

from tests.gpu.test_tensorrt_engines import ORDER, TARGET, built, refused, rows
from tests.support.gpu_marks import gpu_marks
from tests.support.gpu_process_memory import process_gpu_bytes
from tests.support.tensorrt_networks import convolutions, pictures

pytestmark = gpu_marks(120)


def test_a_profile_larger_than_the_gpu_is_an_error(tmp_path: Path) -> None:
    # The inputs have room, what is computed from them has not.
    rows_most = describe().memory_bytes // 2 // (3 * 16 * 16 * 4)
    with (
        refused("optimization.profiles"),
        built(tmp_path, convolutions(), TargetSpec("fp32", (rows(1, 1, rows_most),))),
    ):
        pass
    assert {path.name for path in tmp_path.iterdir()} <= {"model.plan"}


@contextlib.contextmanager
def full_gpu(left_bytes: int) -> Iterator[None]:
    """Meanwhile so much of the GPU's memory is free, and no more can be had; the device is current."""
    import pycuda.driver as cuda

    with current():
        left = DeviceBuffer(left_bytes)
        blocks: list[DeviceBuffer] = []
        # What garbage and the driver's pools hold counts as taken, and comes free as soon as an allocation would fail.
        size_bytes, _ = cuda.mem_get_info()
        while size_bytes >= 1 << 20:
            try:
                blocks.append(DeviceBuffer(size_bytes))
            except OutOfDeviceMemory:
                size_bytes //= 2
        left.free()
        try:
            yield
        finally:
            for block in blocks:
                block.free()


@pytest.mark.whole_gpu
def test_a_full_gpu_is_a_temporary_error(tmp_path: Path) -> None:
    path = tmp_path / "model.plan"
    # 32 KiB of FP32 a row behind each convolution.
    TARGET.build(convolutions(), TargetSpec("fp32", (rows(1, 8, 1 << 16),)), path, silent)
    with full_gpu(512 << 20), refused("on the GPU", "optimization.profiles"):
        TARGET.open(path)
    engine = TARGET.open(path)
    assert engine.run({"x": pictures(4)})["logits"].shape == (4, 10)
    with full_gpu(64 << 20), refused("running model.plan", "the GPU's memory is full"):
        engine.run({"x": pictures(1 << 16)})
    assert engine.run({"x": pictures(1 << 12)})["logits"].shape == (1 << 12, 10)
    engine.close()


def test_nothing_stays_on_the_gpu(tmp_path: Path) -> None:
    model, inputs = convolutions(), {"x": pictures(16)}
    path = tmp_path / "model.plan"
    TARGET.build(model, TargetSpec("fp32", (rows(1, 8, 1 << 12),)), path, silent)
    used_bytes = []
    for _ in range(4):
        engine = TARGET.open(path, model)
        engine.run(inputs)
        engine.time(inputs, 0.01)
        engine.layers(inputs)
        with refused("was not built for"):
            engine.run({"x": pictures(1 << 13)})
        engine.close()
        used_bytes.append(process_gpu_bytes())
    # The first one loads kernels, which stay; 4,096 rows take 128 MiB and more.
    assert used_bytes[3] - used_bytes[1] < 32 << 20, used_bytes


def test_a_capture_that_fails_leaves_the_stream_usable(tmp_path: Path) -> None:
    with current():
        stream, block = CudaStream(), DeviceBuffer(64)
        for spoil in (stream.synchronize, lambda: DeviceBuffer(1 << 20)):
            # Waiting, and allocating with cuMemAlloc, are not allowed while a stream is captured by this thread.
            with contextlib.suppress(DeviceError):
                CudaGraph(stream, spoil).close()
            stream.synchronize()
            values = PinnedBuffer()
            values.reserve(64)
            download(values.view((16,), np.dtype(np.float32)), block, stream)
            stream.synchronize()
            values.free()
        block.free()


_INTERRUPTED = """
import sys, pathlib
from headrace_engines.targets.tensorrt.target import TensorRtTarget
from tests.gpu.test_tensorrt_engines import ORDER, convolutions
def report(done, note):
    if done > 0.02:
        print("building", flush=True)
try:
    TensorRtTarget(optimization_level=5).build(convolutions(), ORDER, pathlib.Path(sys.argv[1], "model.plan"), report)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_stops_a_build(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "building\n"
        child.send_signal(signal.SIGINT)
        start_s = time.monotonic()
        lines = child.communicate(timeout=60)[0].splitlines()
        print(f"stopped after {time.monotonic() - start_s:.1f} s")
    finally:
        child.kill()
        child.wait()
    assert lines[-1] == "interrupted"
    assert child.returncode == 0
    assert list(tmp_path.iterdir()) == []


_OPENED = """
import sys, pathlib
from headrace_engines.errors import BuildError
from headrace_engines.targets.tensorrt.target import TensorRtTarget
for name in sys.argv[1:]:
    try:
        TensorRtTarget().open(pathlib.Path(name)).close()
    except BuildError as error:
        print(str(error).replace(chr(10), " "))
    else:
        print("opened")
"""


def test_a_damaged_header_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.plan"
    TARGET.build(convolutions(), ORDER, path, silent)
    whole = path.read_bytes()
    damaged = []
    # Magic number of a plan, and the version of its format.
    for offset in range(8):
        damaged.append(tmp_path / f"{offset}.plan")
        damaged[-1].write_bytes(whole[:offset] + bytes([whole[offset] ^ 0xFF]) + whole[offset + 1 :])
    done = subprocess.run(
        [sys.executable, "-c", _OPENED, *map(str, damaged)], capture_output=True, text=True, timeout=60, cwd=Path.cwd()
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 8
    assert all("build it again" in line for line in lines[:4]), lines
    assert all(line == "opened" or "build it again" in line for line in lines), lines
