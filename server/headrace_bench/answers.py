"""Comparison of answers with the first answer to the same request (`--check`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from headrace.core.tensor import BF16, BY_NAME, BYTES, bf16_values

from headrace_bench.pool import Answer

AnyArray = npt.NDArray[Any]

# Results of a row may differ in their last bits between batches of different size.
_RELATIVE, _ABSOLUTE = 1e-2, 1e-3


class AnswerCheck:
    """Compares answers with expected ones: their bytes, and where these differ their values.

    Args:
        protocol: "http" or "grpc".
        expected: answer to each prepared request.
    """

    def __init__(self, protocol: str, expected: Sequence[Answer]) -> None:
        self._decode = decode_http if protocol == "http" else decode_grpc
        self._expected = expected
        self._outputs: dict[int, Mapping[str, AnyArray]] = {}

    def matches(self, index: int, answer: Answer) -> bool:
        """Return True for an answer with the outputs of the expected one.

        Args:
            index: number of the request.
            answer: to that request.
        """
        expected = self._expected[index]
        if answer.body == expected.body:
            return True
        if index not in self._outputs:
            self._outputs[index] = self._decode(expected)
        try:
            return equal_outputs(self._decode(answer), self._outputs[index])
        except (ValueError, KeyError, TypeError):
            return False


def equal_outputs(first: Mapping[str, AnyArray], second: Mapping[str, AnyArray]) -> bool:
    """Return True for the same names, shapes and values; floats may differ by 1 % or 0.001."""
    if first.keys() != second.keys():
        return False
    for name, array in first.items():
        other = second[name]
        if array.shape != other.shape or array.dtype != other.dtype:
            return False
        if array.dtype.kind == "f":
            if not np.allclose(array, other, _RELATIVE, _ABSOLUTE, equal_nan=True):
                return False
        elif not np.array_equal(array, other):
            return False
    return True


def decode_http(answer: Answer) -> dict[str, AnyArray]:
    """Decode the outputs of an HTTP response, JSON or binary, by name.

    Raises:
        ValueError: the body is not such a response.
    """
    body = answer.body
    head = body if answer.json_bytes < 0 else body[: answer.json_bytes]
    document = orjson.loads(head)
    position = len(head)
    outputs: dict[str, AnyArray] = {}
    for output in document["outputs"]:
        size = (output.get("parameters") or {}).get("binary_data_size")
        if size is None:
            outputs[output["name"]] = _from_json(output)
        else:
            outputs[output["name"]] = _from_bytes(body[position : position + size], output["datatype"], output["shape"])
            position += size
    return outputs


def decode_grpc(answer: Answer) -> dict[str, AnyArray]:
    """Decode the outputs of a ModelInferResponse, raw or typed, by name.

    Raises:
        ValueError: the message is not such a response.
    """
    from google.protobuf.message import DecodeError
    from tritonclient.grpc import service_pb2  # takes 0.3 s to import; only answers whose bytes differ need it

    try:
        response = service_pb2.ModelInferResponse.FromString(answer.body)
    except DecodeError as error:
        raise ValueError(str(error)) from None
    outputs: dict[str, AnyArray] = {}
    for number, output in enumerate(response.outputs):
        if number < len(response.raw_output_contents):
            raw = response.raw_output_contents[number]
            outputs[output.name] = _from_bytes(raw, output.datatype, list(output.shape))
        else:
            values = [value for _, field in output.contents.ListFields() for value in field]
            outputs[output.name] = np.array(values).reshape(list(output.shape))
    return outputs


def _from_json(output: Mapping[str, Any]) -> AnyArray:
    datatype = BY_NAME[output["datatype"]]
    flat = np.array(output["data"], dtype=object).ravel()
    array: AnyArray = flat if datatype is BYTES else flat.astype(np.float64)
    return array.reshape(output["shape"])


def _from_bytes(raw: bytes, name: str, shape: Sequence[int]) -> AnyArray:
    datatype = BY_NAME[name]
    if datatype is BYTES:
        return np.array(split_bytes(raw), dtype=object).reshape(shape)
    array: AnyArray = np.frombuffer(raw, datatype.dtype)
    if array.size != math.prod(shape):
        raise ValueError(f"{array.size} elements, the shape {list(shape)} has {math.prod(shape)}")
    if datatype is BF16:
        array = bf16_values(array)
    return array.reshape(shape)


def split_bytes(raw: bytes) -> list[bytes]:
    """Split the elements of a BYTES tensor, each behind its length in 4 bytes, little-endian.

    Raises:
        ValueError: an element ends behind the tensor.
    """
    elements, position = [], 0
    while position < len(raw):
        end = position + 4 + int.from_bytes(raw[position : position + 4], "little")
        if end > len(raw):
            raise ValueError("an element ends behind the tensor")
        elements.append(raw[position + 4 : end])
        position = end
    return elements


def join_bytes(elements: Sequence[bytes]) -> bytes:
    """Encode the elements of a BYTES tensor."""
    return b"".join(part for element in elements for part in (len(element).to_bytes(4, "little"), element))
