"""Datatypes, tensor specs, rows in GPU memory, ranges of shared memory, and Triton's classification extension.

Datatype names are those of the Open Inference Protocol V2 ("FP32"), of Triton's model configuration ("TYPE_FP32"), of ONNX
(numbers of `TensorProto.DataType`, and ONNX Runtime's "tensor(float)") and of NumPy. NumPy has no BF16: its bit patterns are
held as `uint16`. BYTES is an object array of `bytes`.

An input of a request is a NumPy array or `ResidentRows`. Both have dtype, shape and slices of rows. An execution on a GPU reads
the address. All other code gets a host copy from NumPy, which calls `__array__`: `np.asarray(rows)`,
`np.concatenate([rows, ...])`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsIndex, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from headrace.core.clock import pause
from headrace.core.errors import BadRequest

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, eq=False)
class Datatype:
    """An element type with its names.

    Attributes:
        name: name in the protocol, e.g. "FP32".
        config_name: name in a model configuration, e.g. "TYPE_FP32".
        onnx_number: `TensorProto.DataType` of ONNX.
        ort_name: name in ONNX Runtime, e.g. "tensor(float)".
        dtype: NumPy dtype.
        size_bytes: bytes per element on the wire, 0 for a variable size (BYTES).
    """

    name: str
    config_name: str
    onnx_number: int
    ort_name: str
    dtype: np.dtype[np.generic]
    size_bytes: int

    def __repr__(self) -> str:
        return self.name


def _datatype(name: str, config_name: str, onnx_number: int, ort_name: str, dtype: str) -> Datatype:
    kind: np.dtype[np.generic] = np.dtype(dtype)
    return Datatype(
        name, "TYPE_" + config_name, onnx_number, f"tensor({ort_name})", kind, 0 if dtype == "O" else kind.itemsize
    )


# Little-endian: the byte order of the protocol and of every supported machine.
DATATYPES: tuple[Datatype, ...] = (
    _datatype("BOOL", "BOOL", 9, "bool", "?"),
    _datatype("UINT8", "UINT8", 2, "uint8", "<u1"),
    _datatype("UINT16", "UINT16", 4, "uint16", "<u2"),
    _datatype("UINT32", "UINT32", 12, "uint32", "<u4"),
    _datatype("UINT64", "UINT64", 13, "uint64", "<u8"),
    _datatype("INT8", "INT8", 3, "int8", "<i1"),
    _datatype("INT16", "INT16", 5, "int16", "<i2"),
    _datatype("INT32", "INT32", 6, "int32", "<i4"),
    _datatype("INT64", "INT64", 7, "int64", "<i8"),
    _datatype("FP16", "FP16", 10, "float16", "<f2"),
    _datatype("FP32", "FP32", 1, "float", "<f4"),
    _datatype("FP64", "FP64", 11, "double", "<f8"),
    _datatype("BF16", "BF16", 16, "bfloat16", "<u2"),
    _datatype("BYTES", "STRING", 8, "string", "O"),
)

BY_NAME: dict[str, Datatype] = {d.name: d for d in DATATYPES}
BY_CONFIG_NAME: dict[str, Datatype] = {d.config_name: d for d in DATATYPES}
BY_ONNX_NUMBER: dict[int, Datatype] = {d.onnx_number: d for d in DATATYPES}
BY_ORT_NAME: dict[str, Datatype] = {d.ort_name: d for d in DATATYPES}

BOOL = BY_NAME["BOOL"]
FP16 = BY_NAME["FP16"]
FP32 = BY_NAME["FP32"]
BF16 = BY_NAME["BF16"]
BYTES = BY_NAME["BYTES"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Spec of an input or output of a model, as clients see it.

    Attributes:
        name: name of the tensor.
        datatype: element type.
        shape: dimensions, with the batch dimension first if the model has one; -1 for any size.
        optional: True if requests may omit it (inputs only).
        labels: class names along the last dimension, empty without labels (outputs only).
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    optional: bool = False
    labels: tuple[str, ...] = ()


def fits_shape(shape: Sequence[int], declared: Sequence[int]) -> bool:
    """Return True if a shape has the declared sizes; -1 is any size."""
    if len(shape) != len(declared):
        return False
    # The lengths are equal. A loop takes half of the time of `all` with a generator.
    for size, expected in zip(shape, declared):  # noqa: B905, SIM110
        if size != expected and expected != -1:
            return False
    return True


@dataclass(frozen=True, slots=True)
class PaddedInputs:
    """Inputs that are padded, so that requests of different length share a batch.

    Attributes:
        names: names of the inputs; those of one request must have equal lengths, otherwise the request is not padded.
        axis: dimension of the length; 0 is the batch.
        multiple_of: padded lengths are multiples of this; requests with the same padded length may share a batch.
        longest: largest length of the model; 0 if any length is allowed.
    """

    names: frozenset[str]
    axis: int
    multiple_of: int
    longest: int = 0

    def padded_length(self, length: int) -> int:
        """Return the smallest multiple of `multiple_of` that is at least `length`, or the largest length of the model."""
        padded = -(-length // self.multiple_of) * self.multiple_of
        return max(self.longest, length) if padded > self.longest > 0 else padded

    def padded_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of a request's inputs with padded lengths.

        Args:
            shapes: by input name, batch dimension included; returned as they are if their lengths differ.
        """
        axis, names = self.axis, [name for name in shapes if name in self.names]
        if len({shapes[name][axis] for name in names}) != 1:
            return shapes
        length = self.padded_length(shapes[names[0]][axis])
        return {**shapes, **{name: (*shapes[name][:axis], length, *shapes[name][axis + 1 :]) for name in names}}


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ModelSpec:
    """Spec of a model version for the data plane and the codecs.

    Attributes:
        name: name of the model.
        version: version number, as text.
        platform: Triton's platform name, e.g. "onnxruntime_onnx".
        inputs: specs by name, in the order of the configuration.
        outputs: specs by name, in the order of the configuration.
        max_batch_size: most rows of one execution; 0 if the model has no batch dimension.
        parameters: parameters in the model's metadata, e.g. of the engine that serves it.
        resident_devices: numbers of the GPUs whose instances read inputs without a host copy (`ResidentRows`).
        ragged: names of the inputs whose dims may differ between the requests of a batch.
        padded: inputs whose length may differ between the requests of a batch; None for none.
        decoupled: a request has any number of responses, in `InferRequest.responses`.
        first_response_ms: upper bounds of the buckets of Triton's histogram, in milliseconds; () for its own.
    """

    name: str
    version: str
    platform: str
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    max_batch_size: int
    parameters: Mapping[str, str | float | bool] = field(default_factory=dict)
    resident_devices: frozenset[int] = frozenset()
    ragged: frozenset[str] = frozenset()
    padded: PaddedInputs | None = None
    decoupled: bool = False
    first_response_ms: tuple[float, ...] = ()


# `device` of pinned host memory, which every GPU reads, and of rows that no GPU can read, since they are not aligned.
PINNED = -1
NOWHERE = -2

# Copies a range (address, size_bytes) of the owner's memory into new host memory: uint8[size_bytes].
HostCopy = Callable[[int, int], Array]


@dataclass(slots=True, eq=False)
class ResidentRows:
    """A C-contiguous tensor in memory that a GPU reads, by its address. Immutable; slices and reshapes share the memory.

    Memory at `PINNED` addresses may be a client's file, which the client may truncate: only kernels may read it. A read by the
    host would raise SIGBUS, and the driver's copies are partly done by the host (`headrace.runtimes.cuda.shared_memory`).

    Attributes:
        address: CUdeviceptr of the first element, for kernels; aligned to the dtype except for `NOWHERE`.
        device: number of the GPU with the memory, or `PINNED`, or `NOWHERE`.
        dtype: dtype of the elements; not object.
        shape: shape of the tensor, (rows, ...).
        owner: object that keeps the memory alive; referenced by these rows and their slices.
        host_copy: makes a host copy of a range of the owner's memory; any thread may call it.
    """

    address: int
    device: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    owner: object
    host_copy: HostCopy

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> ResidentRows:
        """Return a slice of consecutive rows.

        Raises:
            TypeError: the index is no slice, or its step is not 1.
        """
        if not isinstance(rows, slice):
            raise TypeError(f"resident rows take a slice, not {rows!r}: make a host copy by np.asarray first")
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise TypeError(f"resident rows take slices of step 1, not {step}: make a host copy by np.asarray first")
        inner = self.shape[1:]
        address = self.address + start * math.prod(inner) * self.dtype.itemsize
        shape = (max(stop - start, 0), *inner)
        return ResidentRows(address, self.device, self.dtype, shape, self.owner, self.host_copy)

    def as_tensor(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> ResidentRows:
        """Return the same bytes as another tensor; it can only be copied if it is not aligned to the dtype.

        Args:
            dtype: dtype of the result.
            shape: shape of the result, with the same number of bytes.
        """
        device = NOWHERE if self.address % dtype.alignment else self.device
        return ResidentRows(self.address, device, dtype, shape, self.owner, self.host_copy)

    def reshape(self, *shape: SupportsIndex | tuple[int, ...]) -> ResidentRows:
        """Return the same elements in another shape, which may have one -1.

        Raises:
            ValueError: the shape has another number of elements.
        """
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        # Applies NumPy's rules, to an array that uses no memory.
        new_shape = np.broadcast_to(np.empty((), np.bool_), self.shape).reshape(cast("tuple[int, ...]", sizes)).shape
        return ResidentRows(self.address, self.device, self.dtype, new_shape, self.owner, self.host_copy)

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> Array:
        """Return a host copy.

        Raises:
            ValueError: `copy` is False.
            HeadraceError: the memory is no longer readable.
        """
        if copy is False:
            raise ValueError("resident rows are not in host memory and can only be copied: allow a copy")
        array: Array = self.host_copy(self.address, self.nbytes).view(self.dtype).reshape(self.shape)
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        where = {PINNED: "pinned", NOWHERE: "unaligned"}.get(self.device, f"GPU {self.device}")
        return f"ResidentRows({self.dtype}, {list(self.shape)}, {where})"


def as_input(rows: ResidentRows) -> Array:
    """Cast resident rows to the type of `InferRequest.inputs`, which nearly always holds NumPy arrays."""
    return cast(Array, rows)


def is_resident(array: object) -> TypeGuard[ResidentRows]:
    """Return True for an input whose rows a GPU reads without a host copy."""
    return type(array) is ResidentRows


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class IpcMemory:
    """Memory of a GPU that other processes can open. The `ipc` of an owner of `ResidentRows`, and referenced by it alone.

    Attributes:
        handle: cudaIpcMemHandle_t, 64 raw bytes.
        device: number of the GPU.
        address: CUdeviceptr of the first byte in this process.
        number: unique in this process.
    """

    handle: bytes
    device: int
    address: int
    number: int = field(init=False, default_factory=itertools.count(1).__next__)


def ipc_memory(array: object) -> IpcMemory | None:
    """Return the memory with the rows of an input, for another process; None if they are not aligned rows in such memory."""
    if not is_resident(array) or array.device < 0:
        return None
    memory: IpcMemory | None = getattr(array.owner, "ipc", None)
    return memory


class Region(Protocol):
    """Shared memory that a client has registered. Offsets are relative to the region.

    Attributes:
        gpu: number of the GPU whose memory it is; None for memory of the host.
    """

    gpu: int | None

    def check(self, offset: int, size_bytes: int) -> None:
        """Check the bounds of a range.

        Raises:
            BadRequest: the range exceeds the region.
        """

    def locate(self, offset: int, size_bytes: int, devices: frozenset[int]) -> ResidentRows | None:
        """Return a range without a copy, for models on these GPUs.

        Returns:
            The range as uint8[size_bytes], or None if it must be copied with `read`.

        Raises:
            BadRequest: the range exceeds the region.
        """

    def read(self, offset: int, size_bytes: int) -> Array:
        """Copy a range, as uint8[size_bytes]; raises BadRequest if it exceeds the region or the memory no longer exists."""

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write data; raises BadRequest if they exceed the region or the memory no longer exists."""


class GpuRegion(Region, Protocol):
    """A region in memory of a GPU."""

    def write_rows(self, offset: int, rows: ResidentRows) -> None:
        """Write rows on the region's own GPU, as `write`."""


def is_gpu_region(region: Region) -> TypeGuard[GpuRegion]:
    """Return True for a region in memory of a GPU."""
    return region.gpu is not None


def check_range(offset: int, size_bytes: int, region_bytes: int) -> None:
    """Check that a range lies in a shared memory region.

    Raises:
        BadRequest: the range is not in the region.
    """
    if offset < 0 or size_bytes < 0 or offset + size_bytes > region_bytes:
        raise BadRequest(
            f"shared memory offset {offset} and size {size_bytes} do not lie in the region of {region_bytes} bytes"
        )


# Most classes of one output in a response, over all rows: each is formatted in Python.
MAX_CLASSES = 65_536
# A step of a codec thread: formatting so many classes, or sorting so many scores, takes about a millisecond.
_PAUSE_CLASSES = 2048
_SORTED_SCORES = 16_384


def bf16_values(array: Array) -> Array:
    """Return the values of BF16 elements as float32 of the same shape.

    Args:
        array: uint16 bit patterns.
    """
    values: Array = (array.astype(np.uint32) << 16).view(np.float32)
    return values


def classify(array: Array, spec: TensorSpec, count: int, batched: bool) -> Array:
    """Return the `count` highest scores of every row, best first (Triton's classification extension).

    Args:
        array: numeric scores, of shape (rows, classes...) if batched, else (classes...); BF16 as bit patterns.
        spec: spec of the output, with its labels.
        count: number of classes; at most those of a row are returned.
        batched: True if the first dimension is the batch.

    Returns:
        Object array of `bytes` "score:index:label", of shape (rows, count) or (count,).

    Raises:
        BadRequest: the output is not numeric, or the classes of all rows are more than `MAX_CLASSES`.
    """
    if array.dtype.hasobject or array.dtype.kind == "b":
        raise BadRequest(f"output '{spec.name}' is {spec.datatype}, classification needs numbers")
    if spec.datatype is BF16:
        array = bf16_values(array)
    scores = array.reshape(array.shape[0], -1) if batched else array.reshape(1, -1)
    count = min(count, scores.shape[1])
    if count * len(scores) > MAX_CLASSES:
        raise BadRequest(
            f"output '{spec.name}': classification of {count} classes in {len(scores)} rows, at most {MAX_CLASSES} classes are "
            "allowed in one response: request fewer classes, or the scores as binary data"
        )
    texts = np.empty((len(scores), count), dtype=object)
    labels, written = spec.labels, 0
    rows_at_once = max(1, _SORTED_SCORES // max(1, scores.shape[1]))
    for start in range(0, len(scores), rows_at_once):
        block = scores[start : start + rows_at_once]
        order = _best(block, count)
        best = np.take_along_axis(block, order, axis=1)
        for row, (indices, values) in enumerate(zip(order.tolist(), best.tolist(), strict=True), start):
            for first in range(0, count, _PAUSE_CLASSES):
                if written >= _PAUSE_CLASSES:
                    written = 0
                    pause()
                last = min(first + _PAUSE_CLASSES, count)
                pairs = zip(values[first:last], indices[first:last], strict=True)
                texts[row, first:last] = [_line(value, index, labels) for value, index in pairs]
                written += last - first
    return texts if batched else texts[0]


def _best(scores: Array, count: int) -> npt.NDArray[np.intp]:
    """Return the indices of the highest scores of each row, best first; of equal scores the lower index comes first, NaN is last.

    Args:
        scores: numbers, of shape (rows, classes).
        count: number of indices for each row, at most the classes.
    """
    # In ascending order of the keys. A negated unsigned integer would overflow; a negated NaN stays last.
    keys: Array = np.negative(scores) if scores.dtype.kind == "f" else np.invert(scores)
    if len(keys) > 1 or count >= keys.shape[1] >> 1:
        return np.argsort(keys, axis=1, kind="stable")[:, :count]
    keys = keys[0]  # a long row: sorting all of it takes ten times longer than to select its best
    limit = np.partition(keys, count)[count]
    is_nan = keys.dtype.kind == "f" and np.isnan(limit)
    below = np.flatnonzero(~np.isnan(keys) if is_nan else keys < limit)
    equal = np.flatnonzero(np.isnan(keys) if is_nan else keys == limit)
    selected = np.concatenate((below, equal[: count - len(below)]))
    return selected[np.argsort(keys[selected], kind="stable")].reshape(1, -1)


def _line(value: float, index: int, labels: tuple[str, ...]) -> bytes:
    label = f":{labels[index]}" if index < len(labels) else ""
    score = f"{value:f}" if isinstance(value, float) else str(value)
    return f"{score}:{index}{label}".encode()
