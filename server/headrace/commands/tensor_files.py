"""Inputs of a model in a file: arrays by name in an .npz, or the protocol's own JSON."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from headrace.core.errors import BadRequest
from headrace.core.tensor import BF16, BY_NAME, BYTES, Array, Datatype

AnyArray = npt.NDArray[Any]


def read_npz(file: Path) -> dict[str, AnyArray]:
    """The arrays of an .npz by name. Text goes to BYTES; arrays of Python objects are refused, for they need pickle.

    Raises:
        BadRequest: no such file, no .npz, or nothing in it.
    """
    cure = "write it with numpy.savez(file, input_name=array)"
    try:
        archive = np.load(file, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise BadRequest(f"{file}: one array without a name: {cure}")
        with archive:
            arrays = {name: archive[name] for name in archive.files}
    except OSError as error:
        raise BadRequest(f"{file}: cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise BadRequest(f"{file}: is no .npz of plain arrays ({error}): {cure}") from None
    if not arrays:
        raise BadRequest(f"{file}: holds no array: {cure}")
    return arrays


def bfloat16_inputs(metadata: Mapping[str, Any], inputs: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    """The inputs, those in uint16 as BF16 where the model's metadata say so: an .npz has no BF16, only its bits."""
    import ml_dtypes  # takes long to import, so only where arrays are sent

    datatypes = {tensor.get("name"): tensor.get("datatype") for tensor in metadata.get("inputs", [])}
    return {
        name: array.view(ml_dtypes.bfloat16) if datatypes.get(name) == "BF16" and array.dtype == np.uint16 else array
        for name, array in inputs.items()
    }


def read_json(file: Path) -> dict[str, AnyArray]:
    """The inputs of a request as the protocol writes it: {"inputs": [{"name", "shape", "datatype", "data"}]}.

    Returns:
        Arrays by name, each of its tensor's datatype.

    Raises:
        BadRequest: not that; says which input and what is wrong.
    """
    try:
        request = orjson.loads(file.read_bytes())
    except OSError as error:
        raise BadRequest(f"{file}: cannot be read: {error.strerror or error}") from None
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"{file}: is not JSON: {error}") from None
    if not isinstance(request, dict) or list(request) != ["inputs"] or not isinstance(request["inputs"], list):
        raise BadRequest(f'{file}: expected {{"inputs": [...]}} and nothing else')
    arrays: dict[str, AnyArray] = {}
    for position, tensor in enumerate(request["inputs"]):
        where = f"{file}: inputs[{position}]"
        if not isinstance(tensor, dict) or set(tensor) != {"name", "shape", "datatype", "data"}:
            raise BadRequest(f"{where}: expected the fields name, shape, datatype, data and no other")
        name, shape = tensor["name"], tensor["shape"]
        if not isinstance(name, str) or name in arrays:
            raise BadRequest(f"{where}: the name {name!r} is no text, or is there twice")
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise BadRequest(f"{where}: the shape {shape!r} is no list of whole numbers")
        try:
            arrays[name] = _from_json(tensor["data"], _named(tensor["datatype"], name), tuple(shape), name)
        except BadRequest as error:
            raise BadRequest(f"{where}: {error}") from None
    return arrays


def _from_json(data: Any, datatype: Datatype, shape: tuple[int, ...], name: str = "") -> Array:
    """The array of a tensor whose elements stand in JSON, flat or nested.

    Args:
        data: the elements as the JSON parser gave them.
        datatype: of the elements.
        shape: of the result.
        name: of the tensor, for the error.

    Raises:
        BadRequest: the elements do not fit the datatype or the shape; BF16, which JSON has no form for.
    """
    if datatype is BF16:
        raise BadRequest(
            f"tensor '{name}' is BF16, which JSON has no form for: give its bits as uint16 in an .npz file"
        )
    flat = _flatten(data) if isinstance(data, list) else [data]
    if len(flat) != math.prod(shape):
        raise BadRequest(f"tensor '{name}' has {len(flat)} elements, shape {list(shape)} needs {math.prod(shape)}")
    array = np.empty(len(flat), dtype=datatype.dtype)
    kinds: tuple[type, ...] = (
        (str,) if datatype is BYTES else {"b": (bool,), "f": (int, float)}.get(array.dtype.kind, (int,))
    )
    for element in flat:
        if not isinstance(element, kinds) or (isinstance(element, bool) and bool not in kinds):
            raise BadRequest(f"tensor '{name}' holds {element!r}, which is no {datatype}")
    try:
        array[:] = [element.encode() for element in flat] if datatype is BYTES else flat
    except (OverflowError, ValueError) as error:
        raise BadRequest(f"tensor '{name}' holds a value outside {datatype}: {error}") from None
    return array.reshape(shape)


def _named(datatype: Any, name: str) -> Datatype:
    """The datatype of a name such as "FP32".

    Raises:
        BadRequest: there is none.
    """
    found = BY_NAME.get(datatype) if isinstance(datatype, str) else None
    if found is None:
        raise BadRequest(f"tensor '{name}' has datatype {datatype!r}, expected one of {', '.join(BY_NAME)}")
    return found


def _flatten(nested: list[Any]) -> list[Any]:
    """Level by level, so that no depth of nesting exhausts the stack."""
    while any(isinstance(element, list) for element in nested):
        nested = [inner for element in nested for inner in (element if isinstance(element, list) else [element])]
    return nested
