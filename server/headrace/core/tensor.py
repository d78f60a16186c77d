"""Every datatype's names in one table, and the specification of one tensor of a model.

The names are those of the Open Inference Protocol V2 ("FP32"), of Triton's model configuration ("TYPE_FP32"), of ONNX (the
numbers of `TensorProto.DataType` and ONNX Runtime's "tensor(float)") and of NumPy. BF16 has no NumPy type of its own: it
travels as its bit pattern in `uint16`. BYTES is an object array of `bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

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
