"""Inputs of a model in a file: arrays by name in an .npz, or the protocol's own JSON."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from server.client.binary_tensors import AnyArray, from_json, named
from server.core.errors import BadRequest


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


def datatypes(metadata: Mapping[str, Any], side: str) -> dict[str, str]:
    """The datatypes by name of a model's "inputs" or "outputs", as far as its metadata tell them."""
    return {str(tensor.get("name")): str(tensor.get("datatype")) for tensor in metadata.get(side, [])}


def bfloat16_inputs(metadata: Mapping[str, Any], inputs: Mapping[str, AnyArray]) -> dict[str, str]:
    """Which inputs are BF16 by the model's metadata and come as its bits in uint16: NumPy cannot say it."""
    wanted = datatypes(metadata, "inputs")
    return {name: "BF16" for name, array in inputs.items() if wanted.get(name) == "BF16" and array.dtype == np.uint16}


def read_json(file: Path) -> tuple[dict[str, AnyArray], dict[str, str]]:
    """The inputs of a request as the protocol writes it: {"inputs": [{"name", "shape", "datatype", "data"}]}.

    Returns:
        Arrays and datatypes by name.

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
    said: dict[str, str] = {}
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
            datatype = named(tensor["datatype"], name)
            arrays[name] = from_json(tensor["data"], datatype, tuple(shape), name)
        except BadRequest as error:
            raise BadRequest(f"{where}: {error}") from None
        said[name] = datatype.name
    return arrays, said
