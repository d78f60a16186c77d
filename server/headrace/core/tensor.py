"""Datatypes, tensor specs, rows in GPU memory, ranges of shared memory, and Triton's classification extension.

Datatype names are those of the Open Inference Protocol V2 ("FP32"), of Triton's model configuration ("TYPE_FP32"), of ONNX
(numbers of `TensorProto.DataType`, and ONNX Runtime's "tensor(float)") and of NumPy. NumPy has no BF16: its bit patterns are
held as `uint16`. BYTES is an object array of `bytes`.

An input of a request is a NumPy array or `ResidentRows`. Both have dtype, shape and slices of rows. An execution on a GPU reads
the address. All other code gets a host copy from NumPy, which calls `__array__`: `np.asarray(rows)`,
`np.concatenate([rows, ...])`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from headrace.core.errors import BadRequest

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, eq=False)
class Datatype:
    """One element type under all its names.

    Attributes:
        name: the protocol's name, e.g. "FP32".
        config_name: the name in a model configuration, e.g. "TYPE_FP32".
        onnx_number: `TensorProto.DataType` of ONNX.
        ort_name: ONNX Runtime's name, e.g. "tensor(float)".
        dtype: how NumPy holds it.
        size_bytes: bytes per element on the wire, 0 where it varies (BYTES).
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


# Everything little-endian: the protocol's wire order, and that of every machine we run on.
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
    """One input or output of a model as callers see it.

    Attributes:
        name: the tensor's name.
        datatype: its element type.
        shape: dimensions with the batch dimension in front where the model batches; -1 where any size is taken.
        optional: True if a request may leave it out (inputs only).
        labels: names of the classes along the last dimension, empty if there are none (outputs only).
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    optional: bool = False
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ModelSpec:
    """What the data plane and the codecs need to know of one version of a model.

    Attributes:
        name: the model's name.
        version: the version number, as text.
        platform: Triton's platform name, e.g. "onnxruntime_onnx".
        inputs: by name, in the order of the configuration.
        outputs: by name, in the order of the configuration.
        max_batch_size: rows in one execution; 0 if the model has no batch dimension.
        parameters: what is told with its metadata, e.g. of the engine that serves it.
        resident_devices: numbers of the GPUs whose instances read inputs where they lie (`ResidentRows`), if there are any.
    """

    name: str
    version: str
    platform: str
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    max_batch_size: int
    parameters: Mapping[str, str | float | bool] = field(default_factory=dict)
    resident_devices: frozenset[int] = frozenset()


# `device` of pinned host memory, which every GPU reads, and of rows that none may: they are not aligned to their dtype.
PINNED = -1
NOWHERE = -2

# Copies (address, size_bytes) of what the owner holds into host memory of its own: uint8[size_bytes].
HostCopy = Callable[[int, int], Array]


class ResidentRows:
    """One tensor, C-contiguous, rows first, by its address on a GPU. Immutable; slices and reshapes share the memory.

    What is at `PINNED` addresses may be a client's file, which the client may cut short: only kernels may read there. The host
    would die of SIGBUS, and the driver's copies are partly made by the host (`headrace.cuda.shared_memory`).

    Args:
        address: CUdeviceptr of the first element, aligned to the dtype but for `NOWHERE`; for kernels only.
        device: number of the GPU whose memory it is, or `PINNED`, or `NOWHERE`.
        dtype: of the elements; no objects.
        shape: of the tensor, at least one dimension.
        owner: whatever keeps the memory alive; held as long as these rows, or a slice of them, are.
        copy: makes a host copy of a range of the owner's memory; called on whatever thread asks for one.
    """

    __slots__ = ("_copy", "address", "device", "dtype", "owner", "shape")

    def __init__(
        self,
        address: int,
        device: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        owner: object,
        copy: HostCopy,
    ) -> None:
        self.address = address
        self.device = device
        self.dtype = dtype
        self.shape = shape
        self.owner = owner
        self._copy = copy

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
        """Some rows, one after the other.

        Raises:
            TypeError: anything but a slice of step 1.
        """
        if not isinstance(rows, slice):
            raise TypeError(f"resident rows take a slice, not {rows!r}: make a host copy by np.asarray first")
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise TypeError(f"resident rows take slices of step 1, not {step}: make a host copy by np.asarray first")
        inner = self.shape[1:]
        address = self.address + start * math.prod(inner) * self.dtype.itemsize
        shape = (max(stop - start, 0), *inner)
        return ResidentRows(address, self.device, self.dtype, shape, self.owner, self._copy)

    def as_tensor(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> ResidentRows:
        """The same bytes as a tensor; unless they are aligned to the dtype, it can only be copied.

        Args:
            dtype: of the tensor.
            shape: of the tensor, which has as many bytes.
        """
        device = NOWHERE if self.address % dtype.alignment else self.device
        return ResidentRows(self.address, device, dtype, shape, self.owner, self._copy)

    def reshape(self, *shape: SupportsIndex | tuple[int, ...]) -> ResidentRows:
        """The same elements in another shape, which may hold one -1.

        Raises:
            ValueError: it has another number of elements.
        """
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        # NumPy's own rules, on an array that takes no memory whatever its shape.
        made = np.broadcast_to(np.empty((), np.bool_), self.shape).reshape(cast("tuple[int, ...]", sizes)).shape
        return ResidentRows(self.address, self.device, self.dtype, made, self.owner, self._copy)

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> Array:
        """A host copy.

        Raises:
            ValueError: asked for without a copy.
            HeadraceError: the memory cannot be read any more.
        """
        if copy is False:
            raise ValueError("resident rows are not in the host's memory: they can only be copied")
        array: Array = self._copy(self.address, self.nbytes).view(self.dtype).reshape(self.shape)
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        where = {PINNED: "pinned", NOWHERE: "unaligned"}.get(self.device, f"GPU {self.device}")
        return f"ResidentRows({self.dtype}, {list(self.shape)}, {where})"


def as_input(rows: ResidentRows) -> Array:
    """Resident rows as an input of `InferRequest`, whose type names what nearly all of them are."""
    return cast(Array, rows)


def is_resident(array: object) -> TypeGuard[ResidentRows]:
    """True for an input whose rows a GPU reads by itself."""
    return type(array) is ResidentRows


def check_range(offset: int, size_bytes: int, region_bytes: int) -> None:
    """Hold a range against its region.

    Raises:
        BadRequest: it does not lie in the region.
    """
    if offset < 0 or size_bytes < 0 or offset + size_bytes > region_bytes:
        raise BadRequest(
            f"shared memory offset {offset} and size {size_bytes} do not lie in the region of {region_bytes} bytes"
        )


def classify(array: Array, spec: TensorSpec, count: int, batched: bool) -> Array:
    """The `count` highest scores of every row, best first.

    Args:
        array: numeric scores, (rows, classes...) if batched, else (classes...); BF16 as bit patterns.
        spec: of the output, with its labels.
        count: how many classes; fewer come back where the row has fewer.
        batched: True if the first dimension is the batch.

    Returns:
        Object array of `bytes`, (rows, count) or (count,).

    Raises:
        BadRequest: the output holds no numbers.
    """
    if array.dtype.hasobject or array.dtype.kind == "b":
        raise BadRequest(f"output '{spec.name}' is {spec.datatype}, classification needs numbers")
    if spec.datatype is BF16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    scores = array.reshape(array.shape[0], -1) if batched else array.reshape(1, -1)
    count = min(count, scores.shape[1])
    # Stable, so that of equal scores the lower index comes first.
    order = np.argsort(-scores.astype(np.float64), axis=1, kind="stable")[:, :count]
    best = np.take_along_axis(scores, order, axis=1)
    text = np.empty(order.shape, dtype=object)
    for row, (indices, values) in enumerate(zip(order.tolist(), best.tolist(), strict=True)):
        text[row] = [_line(value, index, spec.labels) for value, index in zip(values, indices, strict=True)]
    return text if batched else text[0]


def _line(value: float, index: int, labels: tuple[str, ...]) -> bytes:
    label = f":{labels[index]}" if index < len(labels) else ""
    score = f"{value:f}" if isinstance(value, float) else str(value)
    return f"{score}:{index}{label}".encode()
