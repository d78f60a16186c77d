"""A request of JSON in a file, as `headrace infer` sends it: names, datatypes and shapes are those of the file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace.core.errors import BadRequest
from headrace.core.tensor import BY_NAME, Array, TensorSpec
from headrace.wire.requests.tensor_codec import from_json


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    datatype: str
    data: Any


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    inputs: list[_Tensor]


def read_json(file: Path) -> list[tuple[TensorSpec, Array]]:
    """Return the inputs of a file with a JSON request, in the shapes and datatypes that it names.

    Raises:
        BadRequest: the file cannot be read, is not `{"inputs": [...]}`, or an input's data do not fit its datatype and shape.
    """
    try:
        request = msgspec.json.decode(file.read_bytes(), type=_Request)
    except OSError as error:
        raise BadRequest(f"{file}: cannot be read: {error.strerror or error}") from None
    except msgspec.ValidationError as error:
        fields = '{"inputs": [...]} with name, shape, datatype and data of each and nothing else'
        raise BadRequest(f"{file}: expected {fields}: {error}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{file}: is not JSON: {error}") from None
    names: set[str] = set()
    inputs: list[tuple[TensorSpec, Array]] = []
    for position, tensor in enumerate(request.inputs):
        try:
            if tensor.name in names:
                raise BadRequest(f"the name {tensor.name!r} occurs twice: give each input its own name")
            inputs.append(_read(tensor))
        except BadRequest as error:
            raise BadRequest(f"{file}: inputs[{position}]: {error}") from None
        names.add(tensor.name)
    return inputs


def _read(tensor: _Tensor) -> tuple[TensorSpec, Array]:
    datatype, shape = BY_NAME.get(tensor.datatype), tuple(tensor.shape)
    if datatype is None:
        raise BadRequest(f"'{tensor.name}' has datatype {tensor.datatype!r}, expected one of {', '.join(BY_NAME)}")
    spec = TensorSpec(tensor.name, datatype, shape)
    return spec, from_json(spec, shape, math.prod(shape), tensor.data)
