"""Tensors, datatypes and errors of `triton_python_backend_utils`."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from headrace_model import device, protocol

TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    **{
        "TYPE_" + name: np.bool_ if name == "BOOL" else dtype.type
        for name, dtype in protocol.DATATYPES.values()
        if name not in ("BYTES", "BF16")
    },
    "TYPE_STRING": np.object_,
}
_DTYPE_OF_CODE = {
    code: np.object_ if name == "BYTES" else dtype.type
    for code, (name, dtype) in protocol.DATATYPES.items()
    if name != "BF16"
}
_CPU_DEVICE = (1, 0)  # DLPack's kDLCPU, device 0


class TritonModelException(Exception):
    """An error of the model whose text the client receives."""

    def message(self) -> str:
        """Return the text."""
        return str(self)


class TritonError:
    """Error of one response.

    Args:
        message: text for the client.
        code: one of the codes of this class; it decides the HTTP status and the gRPC code.
    """

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    __slots__ = ("_code", "_message")

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if type(code) is not int or not self.UNKNOWN <= code <= self.CANCELLED:
            raise TritonModelException(f"the code of a TritonError is one of its constants, not {code!r}")
        self._message = str(protocol.text(message))
        self._code = code + protocol.UNKNOWN  # of the protocol, where 0 is no error

    def code(self) -> int:
        """Return the code."""
        return self._code - protocol.UNKNOWN

    def message(self) -> str:
        """Return the text."""
        return self._message

    def __str__(self) -> str:
        return self._message


class Tensor:
    """A named array.

    Args:
        name: name of the input or output.
        array: its values. Text is an array of the dtype object with `bytes` or `str`.
    """

    __slots__ = ("_array", "_name")

    def __init__(self, name: str, array: Any) -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"Tensor {name!r} needs a numpy.ndarray, not {type(array).__name__}")
        self._name = name if type(name) is str else protocol.text(name)
        self._array = array

    def name(self) -> str:
        """Return the name."""
        return self._name

    def as_numpy(self) -> Any:
        """Return the array. An input is a view of memory that the next batch overwrites: copy it to keep it."""
        return self._array

    def shape(self) -> list[int]:
        """Return the shape."""
        return list(self._array.shape)

    def triton_dtype(self) -> int | None:
        """Return Triton's number of the datatype."""
        return numpy_to_triton_type(self._array.dtype)

    def is_cpu(self) -> bool:
        """Return True; a tensor that `from_dlpack` takes from a GPU returns False."""
        return True

    def to_dlpack(self) -> Any:
        """Return the array as a DLPack capsule."""
        return self._array.__dlpack__()

    def __dlpack__(self, stream: Any = None, **_options: Any) -> Any:
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return _CPU_DEVICE

    @staticmethod
    def from_dlpack(name: str, source: Any) -> Tensor:
        """Return a tensor over the memory of a DLPack object or capsule, on the CPU or on a CUDA GPU.

        Raises:
            TritonModelException: the memory is on another kind of device or not contiguous, or NumPy is older than 1.23.
        """
        is_object = hasattr(source, "__dlpack__")
        try:
            kind = source.__dlpack_device__()[0] if is_object else device.read_capsule(source).device_type
            if kind in (device.CUDA, device.CUDA_MANAGED):
                return _DeviceTensor(name, device.DeviceArray(source.__dlpack__() if is_object else source))
        except device.DlpackError as error:
            raise TritonModelException(f"tensor {name!r}: {error}") from None
        if kind != device.CPU:
            raise TritonModelException(f"tensor {name!r} is on a device of the kind {kind}: move it to the CPU")
        if not hasattr(np, "from_dlpack"):
            raise TritonModelException(f"from_dlpack needs NumPy 1.23 or later, this is {np.__version__}")
        return Tensor(name, np.from_dlpack(source if is_object else _Capsule(source)))


class _DeviceTensor(Tensor):
    """A tensor in the memory of a GPU. It is copied to host memory when it leaves the process."""

    __slots__ = ("_copy", "_source")

    def __init__(self, name: str, source: device.DeviceArray | device.IpcArray) -> None:
        self._name = name
        self._source = source
        self._copy: Any = None

    @property
    def _array(self) -> Any:  # type: ignore[override]
        if self._copy is None:
            self._copy = self._source.to_host()
        return self._copy

    def as_numpy(self) -> Any:
        """Refuse, as Triton does: the tensor is not in host memory."""
        raise TritonModelException(f"tensor {self._name!r} is in the memory of a GPU: use to_dlpack")

    def shape(self) -> list[int]:
        """Return the shape."""
        return list(self._source.shape)

    def triton_dtype(self) -> int | None:
        """Return Triton's number of the datatype."""
        return numpy_to_triton_type(self._source.dtype)

    def is_cpu(self) -> bool:
        """Return False."""
        return False

    def to_dlpack(self) -> Any:
        """Return the DLPack capsule, which can be used once; a new one each time for an input."""
        return self._source.capsule

    def __dlpack__(self, stream: Any = None, **_options: Any) -> Any:
        return self._source.capsule

    def __dlpack_device__(self) -> Any:
        return self._source.device_type, self._source.device_id


def create_input(name: str, source: Any) -> Tensor:
    """Return an input tensor of a request: on the CPU for an array, on a GPU for an `IpcArray`."""
    return _DeviceTensor(name, source) if isinstance(source, device.IpcArray) else Tensor(name, source)


class _Capsule:
    """Gives a DLPack capsule the interface that NumPy reads."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> Any:
        return _CPU_DEVICE


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return NumPy's type of a datatype of the configuration, e.g. of "TYPE_FP32"."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return NumPy's type of a number of a datatype; None if there is none."""
    return _DTYPE_OF_CODE.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the number of the datatype of NumPy's type; None if there is none."""
    dtype = np.dtype(data_type)
    return protocol.BYTES if dtype.kind in "SUT" else protocol.CODE_OF_DTYPE.get(dtype)


def serialize_byte_tensor(input_tensor: Any) -> bytes | None:
    """Return the elements of a text tensor, each after its length in four bytes; None for a tensor without elements."""
    if input_tensor.size == 0 or input_tensor.dtype.kind not in "OSU":
        return None
    texts = [
        item if isinstance(item, bytes) else str(item).encode("utf-8") for item in input_tensor.reshape(-1).tolist()
    ]
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Any:
    """Return the elements that `serialize_byte_tensor` wrote, as a flat array of `bytes`."""
    texts, offset = [], 0
    while offset < len(encoded_tensor):
        (size,) = struct.unpack_from("<I", encoded_tensor, offset)
        offset += 4
        texts.append(bytes(encoded_tensor[offset : offset + size]))
        offset += size
    result = np.empty(len(texts), dtype=np.object_)
    result[:] = texts
    return result
