"""The tensors that a plan takes and gives: their types, and their memory on both sides."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.errors import BuildError
from server.cuda.driver import Stream
from server.cuda.memory import DeviceBuffer, PinnedBuffer, download, upload

Array = npt.NDArray[Any]

# TensorRT's names; BF16 and FP8 have no NumPy type and travel as their bit patterns.
_DTYPES = {
    "FLOAT": "<f4",
    "HALF": "<f2",
    "BF16": "<u2",
    "FP8": "u1",
    "INT8": "i1",
    "UINT8": "u1",
    "INT32": "<i4",
    "INT64": "<i8",
    "BOOL": "?",
}


def numpy_type(datatype: Any) -> np.dtype[Any]:
    """How NumPy holds a `tensorrt.DataType`.

    Raises:
        BuildError: it holds it in no way.
    """
    found = _DTYPES.get(datatype.name)
    if found is None:
        raise BuildError(
            f"the engine has a tensor of type {datatype.name}: inputs and outputs must be of a type of NumPy's"
        )
    return np.dtype(found)


class Tensor:
    """One input or output of a plan and the memory it is kept in, which grows once and stays.

    Args:
        name: of the tensor.
        dtype: how NumPy holds it.
        shape: -1 where free.
        on_host: True for what TensorRT reads or writes in the host's memory (values that decide on shapes).
    """

    def __init__(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], *, on_host: bool = False) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.on_host = on_host
        self._device = DeviceBuffer()
        self._pinned = PinnedBuffer()
        self._staged: Array | None = None

    @property
    def address(self) -> int:
        """Where TensorRT finds it."""
        return self._pinned.address if self.on_host else self._device.address

    def fit(self, values: Array) -> Array:
        """An input's values as they are sent.

        Raises:
            BuildError: they are of another type.
        """
        if values.dtype == self.dtype:
            return values
        if values.dtype.name == "bfloat16" and self.dtype == np.uint16:
            return values.view(np.uint16)
        raise BuildError(f"input {self.name} is {values.dtype}: the engine takes {self.dtype}")

    def stage(self, values: Array) -> None:
        """Copy an input's values to pinned memory and make room for them on the GPU."""
        values = self.fit(values)
        self._reserve(values.nbytes)
        self._staged = self._pinned.view(values.shape, self.dtype)
        np.copyto(self._staged, values)

    def send(self, stream: Stream) -> None:
        """Queue the copy of what is staged to the GPU."""
        if self._staged is not None and not self.on_host:
            upload(self._device, self._staged, stream)

    def expect(self, shape: tuple[int, ...]) -> None:
        """Make room for an output of this shape."""
        self._reserve(math.prod(shape) * self.dtype.itemsize)
        self._staged = self._pinned.view(shape, self.dtype)

    def allocate(self, size_bytes: int) -> int:
        """Make room for an output whose shape comes later, and return its address."""
        self._device.reserve(size_bytes)
        return self._device.address

    def expect_allocated(self, shape: tuple[int, ...]) -> None:
        """Say the shape of an output that was given its memory by `allocate`."""
        self._pinned.reserve(math.prod(shape) * self.dtype.itemsize)
        self._staged = self._pinned.view(shape, self.dtype)

    def fetch(self, stream: Stream) -> None:
        """Queue the copy of an output from the GPU."""
        if self._staged is not None and not self.on_host:
            download(self._staged, self._device, stream)

    def values(self) -> Array:
        """A copy of the output, once the stream is there."""
        assert self._staged is not None
        return self._staged.copy()

    def close(self) -> None:
        """Give the memory back."""
        self._staged = None
        self._device.free()
        self._pinned.free()

    def _reserve(self, size_bytes: int) -> None:
        # A view of memory that is about to be given back must not be used by accident.
        self._staged = None
        self._pinned.reserve(size_bytes)
        if not self.on_host:
            self._device.reserve(size_bytes)


class OutputMemory:
    """Memory for an output whose shape is known only when it is computed; TensorRT asks for it while it runs.

    Attributes:
        shape: what TensorRT told last, None before.
        raised: what went wrong, None if nothing did; no exception can pass through TensorRT.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.shape: tuple[int, ...] | None = None
        self.raised: BaseException | None = None

    def begin(self) -> None:
        """Forget the last execution."""
        self.shape = None
        self.raised = None

    def reallocate(self, size_bytes: int) -> int:
        """Make room for so much; returns its address, 0 if there is none."""
        try:
            return self._tensor.allocate(size_bytes)
        except BaseException as error:
            self.raised = error
            return 0

    def take(self) -> None:
        """Read the shape that TensorRT has told, after the stream is there.

        Raises:
            BuildError: it has told none.
        """
        if self.raised is not None:
            raise self.raised
        if self.shape is None:
            raise BuildError(f"the engine has not told the shape of its output {self._tensor.name}")
        self._tensor.expect_allocated(self.shape)


def output_allocator(trt: Any, memory: OutputMemory) -> Any:
    """The IOutputAllocator that TensorRT is handed."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]  # the base is known at run time only
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)

        def reallocate_output(self, tensor_name: str, memory_: int, size: int, alignment: int) -> int:
            return memory.reallocate(size)

        def reallocate_output_async(
            self, tensor_name: str, memory_: int, size: int, alignment: int, stream: int
        ) -> int:
            return memory.reallocate(size)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            memory.shape = tuple(int(size) for size in shape)

    return Allocator()
