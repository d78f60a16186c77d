"""The GPUs that the contract is held against: the fake in every run, the real one where there is one.

A test here takes `gpu` and runs once on each. `pytest tests/gpu/contract -k fake` needs no GPU.
"""

from __future__ import annotations

import gc
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from headrace_engines.progress import silent
from headrace_engines.targets.base import TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support import fake_streams
from tests.support.exported_memory import Owner
from tests.support.fake_gpu import install_tensorrt
from tests.support.fake_streams import LateCuda
from tests.support.kernels_on_host import install_host_kernels

Export = Callable[[bytes], AbstractContextManager["ExportedMemory | Owner"]]


@dataclass
class ExportedMemory:
    """Memory of another process on the GPU.

    Attributes:
        handle: its IPC handle, 64 bytes.
        content: reads what is in it now.
    """

    handle: bytes
    content: Callable[[], bytes]


@dataclass
class GpuUnderTest:
    """A GPU that the contract is held against.

    Attributes:
        fake: the fake, None for the real one.
        export: makes memory of another process with this content.
        used_bytes: device memory that this process has allocated.
        slack_bytes: by how much `used_bytes` may differ although everything was freed.
    """

    fake: LateCuda | None
    export: Export
    used_bytes: Callable[[], int]
    slack_bytes: int


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> GpuUnderTest:
    """The fake or the real GPU."""
    under_test: GpuUnderTest = request.getfixturevalue(f"{request.param}_gpu")
    return under_test


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuUnderTest]:
    """Streams that are late, TensorRT by ONNX Runtime, kernels compiled for the host; holds that everything is freed."""
    cuda = LateCuda()
    fake_streams.install(monkeypatch, cuda)
    install_tensorrt(monkeypatch, cuda)
    install_host_kernels(monkeypatch, cuda)

    @contextmanager
    def export(content: bytes) -> Iterator[ExportedMemory]:
        handle = (b"%08d" % len(cuda.exported)).ljust(64, b"h")
        memory = cuda.exported[handle] = np.frombuffer(bytearray(content), np.uint8)
        yield ExportedMemory(handle, memory.tobytes)

    yield GpuUnderTest(cuda, export, cuda.used_bytes, 0)
    gc.collect()  # a stream is freed with its object, which the traceback of an expected error may still hold
    assert cuda.depth == 0, "a context was left current"
    assert not cuda.live, "memory was not freed"
    assert not cuda.registered, "memory is still pinned"
    assert not cuda.graphs, "a graph was not destroyed"
    assert not cuda.queues, "a stream was not destroyed"


@pytest.fixture
def real_gpu() -> GpuUnderTest:
    """The machine's GPU."""
    if importlib.util.find_spec("pycuda") is None:
        pytest.skip("needs an NVIDIA GPU and PyCUDA")
    from headrace.runtimes.cuda import devices

    from tests.support.gpu_process_memory import process_gpu_bytes

    if not devices.count():
        pytest.skip("needs an NVIDIA GPU")
    return GpuUnderTest(None, lambda content: closing(Owner(content)), process_gpu_bytes, 32 << 20)


@pytest.fixture
def needs_kernels(gpu: GpuUnderTest) -> None:
    """For tests that launch kernels: the fake compiles them for the host."""
    if gpu.fake is not None and shutil.which("g++") is None:
        pytest.skip("needs g++")


Build = Callable[..., Path]


@pytest.fixture(scope="session")
def built_plans() -> dict[tuple[str, bytes, str], bytes]:
    """Plans of the session: the real builder takes seconds for each."""
    return {}


@pytest.fixture
def build(gpu: GpuUnderTest, tmp_path: Path, built_plans: dict[tuple[str, bytes, str], bytes]) -> Build:
    """`build(model, order)`: the file of a plan."""
    if gpu.fake is None and importlib.util.find_spec("tensorrt") is None:
        pytest.skip("needs TensorRT")

    def built(model: onnx.ModelProto, order: TargetSpec) -> Path:
        path = tmp_path / "model.plan"
        target = TensorRtTarget(optimization_level=1)
        key = (repr(target.describe()), model.SerializeToString(), repr(order))
        if key not in built_plans:
            # Level 1 builds in a second or two what level 3 builds in ten; kernels' speed is not what is tested.
            target.build(model, order, path, silent)
            built_plans[key] = path.read_bytes()
        path.write_bytes(built_plans[key])
        return path

    return built
