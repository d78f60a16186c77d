"""Inputs of a Python model in GPU memory of another process: regions, their lifetime, and DLPack capsules over them."""

from __future__ import annotations

import gc
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace_model import device, protocol, python_tensors
from headrace_model import python_backend as pb_utils
from headrace_model.device import DlpackError, IpcArray, IpcHandleError, IpcRegions

from tests.support.fake_ipc_driver import HANDLE_BYTES, FakeIpcDriver, host_array, install

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fake driver needs /dev/shm")
FP32 = protocol.CODES["FP32"]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIpcDriver]:
    monkeypatch.setattr(device, "_driver", device._driver)
    yield install()
    gc.collect()  # closes regions while their driver is there
    device._primary_context.cache_clear()


@pytest.fixture
def handle() -> Iterator[bytes]:
    """Memory of the fake GPU: bytes 0 to 255."""
    path = Path("/dev/shm", f"test-{uuid.uuid4().hex}")
    path.write_bytes(bytes(range(256)))
    yield path.name.encode().ljust(HANDLE_BYTES, b"\0")
    path.unlink()


def test_a_region_is_opened_once_and_closed_when_it_is_dropped(driver: FakeIpcDriver, handle: bytes) -> None:
    regions = IpcRegions()
    assert regions.region(7, handle, 0) is regions.region(7, handle, 0)
    regions.region(8, handle, 0)
    assert (driver.opened, len(driver.sizes), driver.depth) == (2, 2, 0)
    regions.close(7)
    regions.close(7)
    regions.close(99)
    assert len(driver.sizes) == 1
    regions.region(7, handle, 0)
    assert driver.opened == 3


def test_tensors_capsules_and_arrays_keep_a_region_open(driver: FakeIpcDriver, handle: bytes) -> None:
    regions = IpcRegions()
    tensor = python_tensors.create_input(
        "x", IpcArray(regions.region(7, handle, 0), 16, (2, 4), protocol.CODES["UINT8"])
    )
    regions.close(7)
    array, unused = host_array(tensor.to_dlpack()), tensor.to_dlpack()
    del tensor
    gc.collect()
    assert len(driver.sizes) == 1
    assert array.tolist() == [[16, 17, 18, 19], [20, 21, 22, 23]]
    del array
    gc.collect()
    assert len(driver.sizes) == 1
    del unused
    gc.collect()
    assert driver.sizes == {}


def test_an_error_while_a_capsule_is_freed_is_not_lost(driver: FakeIpcDriver, handle: bytes) -> None:
    regions = IpcRegions()
    source = IpcArray(regions.region(7, handle, 0), 0, (4,), protocol.CODES["UINT8"])
    with pytest.raises(TypeError, match="int"):
        int(source.capsule)  # frees the capsule while the error is raised
    regions.close(7)
    del source
    gc.collect()
    assert driver.sizes == {}


@pytest.mark.parametrize("name", [name for name in protocol.CODES if name != "BYTES"])
def test_a_capsule_has_device_datatype_and_shape(driver: FakeIpcDriver, handle: bytes, name: str) -> None:
    code = protocol.CODES[name]
    region = IpcRegions().region(1, handle, 0)
    source = IpcArray(region, 8, (2, 1, 3), code)
    capsule = source.capsule  # frees the tensor with it
    tensor = device.read_capsule(capsule)
    assert (tensor.device_type, tensor.device_id) == (device.CUDA, 0)
    kind = {"B": 6, "U": 1, "I": 0, "F": 2}[name[0]]
    bits = source.dtype.itemsize * 8
    assert (tensor.kind, tensor.bits, tensor.lanes) == (4 if name == "BF16" else kind, bits, 1)
    assert tensor.data + tensor.byte_offset == region.address + 8
    again = device.DeviceArray(source.capsule)  # also checks that it is contiguous
    assert (again.shape, again.dtype) == ((2, 1, 3), source.dtype)
    content = np.arange(256, dtype=np.uint8)[8 : 8 + 6 * source.dtype.itemsize].tobytes()
    assert source.to_host().tobytes() == again.to_host().tobytes() == content


def test_an_input_on_a_gpu_is_a_tensor_of_triton(driver: FakeIpcDriver, handle: bytes) -> None:
    tensor = python_tensors.create_input("x", IpcArray(IpcRegions().region(1, handle, 0), 0, (2, 4), FP32))
    assert isinstance(tensor, pb_utils.Tensor)
    assert (tensor.name(), tensor.shape(), tensor.is_cpu()) == ("x", [2, 4], False)
    assert tensor.triton_dtype() == FP32
    with pytest.raises(pb_utils.TritonModelException, match="in the memory of a GPU: use to_dlpack"):
        tensor.as_numpy()
    assert tensor.__dlpack_device__() == (2, 0)
    # PyTorch passes more arguments than the first version of DLPack had.
    for capsule in (tensor.to_dlpack(), tensor.__dlpack__(stream=1, max_version=(1, 0), dl_device=None, copy=None)):
        np.testing.assert_array_equal(host_array(capsule).view(np.uint8).reshape(-1), np.arange(32))
    # As an input of a call to another model, or as an output.
    np.testing.assert_array_equal(tensor._array.view(np.uint8).reshape(-1), np.arange(32))
    host = python_tensors.create_input("x", np.zeros(3, np.float32))
    assert host.is_cpu()


def test_errors_of_the_driver_are_named(driver: FakeIpcDriver, handle: bytes) -> None:
    regions = IpcRegions()
    with pytest.raises(IpcHandleError, match="cuIpcOpenMemHandle failed with the status 400 of CUDA"):
        regions.region(1, os.urandom(8).hex().encode().ljust(HANDLE_BYTES, b"\0"), 0)
    with pytest.raises(DlpackError, match="cuDeviceGet failed with the status 101 of CUDA"):
        regions.region(2, handle, 3)
    assert driver.depth == 0
    regions.region(1, handle, 0)  # an error is not kept


def test_an_old_numpy_is_named(driver: FakeIpcDriver, handle: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    class OldNumpy:
        ndarray: Any = object
        __version__ = "1.17.0"

    source = IpcArray(IpcRegions().region(1, handle, 0), 0, (2,), FP32)
    with monkeypatch.context() as patch:
        patch.setattr(device, "np", OldNumpy)
        with pytest.raises(DlpackError, match=r"to_dlpack needs NumPy 1\.22 or later, this is 1\.17\.0"):
            _ = source.capsule
