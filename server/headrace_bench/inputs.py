"""Inputs of the prepared requests: random within the datatypes of the model's metadata, from an .npz file, or pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from headrace.core.errors import BadRequest, ModelFailed
from headrace.core.tensor import BF16, BOOL, BY_NAME, BYTES, Datatype

from headrace_bench.answers import join_bytes

AnyArray = npt.NDArray[Any]

# Memory of all prepared requests of a process.
_MAX_PREPARED_BYTES = 256 << 20
_TEXT_BYTES = 16
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
# Wider integers are often indices, e.g. of tokens: values above the model's vocabulary would fail.
_MAX_RANDOM_INDEX = 100
PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True, slots=True)
class InputSpec:
    """An input of the model in its metadata.

    Attributes:
        name: name of the tensor.
        datatype: of its elements.
        shape: with the batch dimension first if the model has one; -1 for any size.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True for a shape with as many sizes, and other sizes only where the input has -1."""
        return len(shape) == len(self.shape) and all(b in (-1, a) for a, b in zip(shape, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class RequestTensor:
    """An input of a prepared request.

    Attributes:
        name: name of the tensor.
        datatype: of its elements.
        shape: of the tensor.
        raw: elements as the protocol's binary form has them.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    raw: bytes


@dataclass(frozen=True, slots=True)
class InputOptions:
    """Sources and sizes of the inputs.

    Attributes:
        batch: rows of a request; 0 if it was not given, which is one row.
        shapes: shape by input name, with or without the batch dimension.
        ranges: lowest and highest random value by input name.
        distinct: number of different random requests.
        npz: file with arrays by input name; None for none.
        pictures: folder or file with pictures; None for none.
        seed: of the random values.
        described: inputs of the model, for servers whose metadata have none; they replace those of the metadata.
    """

    batch: int = 0
    shapes: Mapping[str, tuple[int, ...]] | None = None
    ranges: Mapping[str, tuple[float, float]] | None = None
    distinct: int = 16
    npz: Path | None = None
    pictures: Path | None = None
    seed: int = 0
    described: Sequence[InputSpec] = ()


Request = tuple[RequestTensor, ...]


def read_specs(metadata: Mapping[str, Any]) -> list[InputSpec]:
    """Read the inputs of a model from its metadata.

    Raises:
        ModelFailed: the metadata lack a field, or name an unknown datatype.
    """
    try:
        return [
            InputSpec(each["name"], BY_NAME[each["datatype"]], tuple(int(size) for size in each["shape"]))
            for each in metadata.get("inputs") or ()
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFailed(
            f"the server's metadata of the model lack inputs with name, datatype and shape ({type(error).__name__} {error}): "
            "check that the URL is that of a V2 inference server"
        ) from None


def make_requests(
    metadata: Mapping[str, Any], config: Mapping[str, Any], options: InputOptions
) -> tuple[list[Request], int]:
    """Make the inputs of all different requests.

    Args:
        metadata: of the model.
        config: of the model; may be empty.
        options: sources and sizes.

    Returns:
        The requests and the rows of each; 1 row for a model without a batch dimension.

    Raises:
        BadRequest: the inputs do not fit the model.
        ModelFailed: the metadata are wrong.
    """
    specs = list(options.described) or read_specs(metadata)
    if not specs and options.npz is not None:
        specs = _described_by(options.npz)
    if not specs:
        raise BadRequest(
            "the server's metadata name no inputs of the model: describe each with --input NAME:DATATYPE:SIZE,..., e.g. "
            "--input x:FP32:1,16, or send arrays with --npz FILE"
        )
    names = {spec.name for spec in specs}
    for option, given in (("--shape", options.shapes or {}), ("--range", options.ranges or {})):
        if unknown := sorted(set(given) - names):
            raise BadRequest(
                f"{option} names {unknown[0]!r}: the model has the inputs {', '.join(sorted(names))}; name one"
            )
    if options.npz is not None:
        arrays, rows = _from_npz(specs, options)
    elif options.pictures is not None:
        arrays, rows = _from_pictures(specs, metadata, config, options)
    else:
        arrays, rows = _random(specs, options)
    return [tuple(_tensor(spec, each[spec.name]) for spec in specs if spec.name in each) for each in arrays], rows


def _tensor(spec: InputSpec, array: AnyArray) -> RequestTensor:
    if spec.datatype is BYTES:
        elements = [each if isinstance(each, bytes) else str(each).encode() for each in array.ravel().tolist()]
        return RequestTensor(spec.name, spec.datatype, array.shape, join_bytes(elements))
    raw = np.ascontiguousarray(array, spec.datatype.dtype).tobytes()
    return RequestTensor(spec.name, spec.datatype, array.shape, raw)


# --- Random ------------------------------------------------------------------------------------------------------------


def full_shape(spec: InputSpec, options: InputOptions) -> tuple[int, ...]:
    """Return the shape of an input in a request.

    Raises:
        BadRequest: the rows or the given shape do not fit the model, or a size is missing.
    """
    rows, given = options.batch or 1, (options.shapes or {}).get(spec.name)
    has_rows = spec.shape[:1] == (-1,)
    if given is None:
        shape = (rows, *spec.shape[1:]) if has_rows else spec.shape
        if options.batch > 1 and not has_rows and shape[:1] != (options.batch,):
            raise BadRequest(
                f"--batch {options.batch}: the input '{spec.name}' of shape {list(spec.shape)} has no free batch dimension; "
                "leave --batch out"
            )
        if -1 in shape:
            example = ",".join(str(size) if size >= 0 else "N" for size in shape)
            raise BadRequest(
                f"the input '{spec.name}' has the shape {list(spec.shape)}, whose sizes -1 the model leaves open: "
                f"give them with --shape {spec.name}:{example}"
            )
        return shape
    if has_rows and len(given) == len(spec.shape) - 1:
        given = (rows, *given)
    if not spec.fits(given):
        raise BadRequest(
            f"--shape {spec.name}:{','.join(map(str, given))} does not fit the model's shape {list(spec.shape)}: "
            "give as many sizes, and another size only where the model has -1"
        )
    if has_rows and options.batch and given[0] != options.batch:
        raise BadRequest(
            f"--shape {spec.name}:{','.join(map(str, given))} has {given[0]} rows and --batch {options.batch}: "
            "give the rows in one of them"
        )
    return given


def _random(specs: Sequence[InputSpec], options: InputOptions) -> tuple[list[dict[str, AnyArray]], int]:
    shapes = {spec.name: full_shape(spec, options) for spec in specs}
    sizes = (math.prod(shapes[spec.name]) * (spec.datatype.size_bytes or _TEXT_BYTES + 4) for spec in specs)
    request_bytes = max(1, sum(sizes))
    count = max(1, min(options.distinct, _MAX_PREPARED_BYTES // request_bytes))
    random = np.random.default_rng(options.seed)
    ranges = options.ranges or {}
    requests = [
        {spec.name: random_array(spec.datatype, shapes[spec.name], random, ranges.get(spec.name)) for spec in specs}
        for _ in range(count)
    ]
    return requests, _rows(specs, requests[0])


def random_array(
    datatype: Datatype, shape: tuple[int, ...], random: np.random.Generator, bounds: tuple[float, float] | None = None
) -> AnyArray:
    """Draw random elements.

    Args:
        datatype: of the elements.
        shape: of the array.
        random: source of randomness.
        bounds: lowest and highest value. Without them floats are from 0 to 1, integers of 8 bits any, wider integers from 0 to
            100, and texts have 16 letters.

    Raises:
        BadRequest: the datatype has no numbers, or does not hold the bounds.
    """
    if datatype is BYTES:
        if bounds is not None:
            raise BadRequest("--range is given for an input of BYTES, which has texts and no numbers: leave it out")
        letters = random.choice(_LETTERS, (math.prod(shape), _TEXT_BYTES))
        flat = np.empty(len(letters), object)
        flat[:] = [row.tobytes() for row in letters]
        return flat.reshape(shape)
    if datatype is BOOL:
        return random.integers(0, 2, shape).astype(np.bool_)
    if datatype is BF16:
        low, high = bounds or (0.0, 1.0)
        values = random.uniform(low, high, shape).astype(np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    if datatype.dtype.kind == "f":
        low, high = bounds or (0.0, 1.0)
        return random.uniform(low, high, shape).astype(datatype.dtype)
    limits = np.iinfo(datatype.dtype.name)
    if bounds is None:
        bounds = (limits.min, limits.max) if datatype.size_bytes == 1 else (0, _MAX_RANDOM_INDEX)
    if bounds[0] < limits.min or bounds[1] > limits.max:
        raise BadRequest(
            f"--range {bounds[0]:g},{bounds[1]:g} is outside {datatype}: use numbers from {limits.min} to {limits.max}"
        )
    return random.integers(int(bounds[0]), int(bounds[1]), shape, dtype=datatype.dtype.name, endpoint=True)


def _rows(specs: Sequence[InputSpec], arrays: Mapping[str, AnyArray]) -> int:
    """Return the rows of a request: the first size of an input whose first dimension is free."""
    return next((len(arrays[s.name]) for s in specs if s.shape[:1] == (-1,) and s.name in arrays), 1)


# --- Files -------------------------------------------------------------------------------------------------------------


def _from_npz(specs: Sequence[InputSpec], options: InputOptions) -> tuple[list[dict[str, AnyArray]], int]:
    """Read the arrays of a file, and cut them into requests of `batch` rows."""
    from headrace.server.commands.infer_client import read_npz  # takes 0.3 s to import

    assert options.npz is not None
    arrays = read_npz(options.npz)
    by_name = {spec.name: spec for spec in specs}
    if unknown := sorted(set(arrays) - set(by_name)):
        raise BadRequest(
            f"{options.npz}: holds the array {unknown[0]!r}: the model has the inputs {', '.join(by_name)}; name the arrays so"
        )
    for name, array in arrays.items():
        arrays[name] = _converted(array, by_name[name], str(options.npz))
    if not options.batch:
        return [arrays], _rows(specs, arrays)
    lengths = {len(array) for array in arrays.values() if array.ndim}
    fixed = [spec.name for spec in specs if spec.name in arrays and spec.shape[:1] != (-1,)]
    if fixed or len(lengths) != 1 or min(lengths) < options.batch:
        reason = (
            f"the input '{fixed[0]}' has no batch dimension" if fixed else f"its arrays have {sorted(lengths)} rows"
        )
        raise BadRequest(
            f"{options.npz}: cannot be cut into requests of {options.batch} rows: {reason}; leave --batch out to send the "
            "file as one request"
        )
    rows = options.batch
    starts = range(0, min(lengths) - rows + 1, rows)
    return [{name: array[start : start + rows] for name, array in arrays.items()} for start in starts], rows


def _described_by(file: Path) -> list[InputSpec]:
    """Return inputs of the datatypes and shapes of a file's arrays, with any number of rows."""
    from headrace.server.commands.infer_client import datatype_of, read_npz  # takes 0.3 s to import

    arrays = read_npz(file)
    return [
        InputSpec(name, BY_NAME[datatype_of(array, name)], (-1, *array.shape[1:])[: array.ndim])
        for name, array in arrays.items()
    ]


def _converted(array: AnyArray, spec: InputSpec, file: str) -> AnyArray:
    """Check an array against its input: datatype and shape."""
    is_text = array.dtype.kind in "SUO"
    matches = is_text if spec.datatype is BYTES else array.dtype == spec.datatype.dtype
    if not matches:
        raise BadRequest(
            f"{file}: the array '{spec.name}' has the type {array.dtype}, the model's input is {spec.datatype}: convert it with "
            "astype() before saving"
        )
    if not spec.fits(array.shape):
        raise BadRequest(
            f"{file}: the array '{spec.name}' has the shape {list(array.shape)}, the model's input {list(spec.shape)}: "
            "reshape it before saving (-1 takes any size)"
        )
    return array


def picture_files(path: Path) -> list[Path]:
    """Return the pictures of a folder by name, or the file itself.

    Raises:
        BadRequest: there are none.
    """
    files = [path] if path.is_file() else []
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in PICTURE_SUFFIXES)
    if not files:
        raise BadRequest(f"--pictures {path}: holds no picture: name a folder with {', '.join(PICTURE_SUFFIXES)} files")
    return files


def _from_pictures(
    specs: Sequence[InputSpec], metadata: Mapping[str, Any], config: Mapping[str, Any], options: InputOptions
) -> tuple[list[dict[str, AnyArray]], int]:
    """Read pictures: their bytes for BYTES, pixels for UINT8, tensors by the model's `preprocess` section otherwise."""
    assert options.pictures is not None
    files = picture_files(options.pictures)
    if len(specs) != 1:
        raise BadRequest(
            f"--pictures: the model has the inputs {', '.join(spec.name for spec in specs)}, pictures go to a model with one: "
            "send arrays with --npz FILE"
        )
    (spec,) = specs
    rows = options.batch or 1
    tensors = _picture_tensors(files, spec, metadata, config)
    is_flat = spec.shape[:1] != (-1,)
    if is_flat and rows > 1:
        raise BadRequest(f"--batch {rows}: the input '{spec.name}' has no batch dimension: leave --batch out")
    held: list[dict[str, AnyArray]] = []
    group: list[AnyArray] = []
    total = 0
    for tensor in tensors:
        group.append(tensor)
        if len(group) == rows:
            batch = group[0] if is_flat else np.stack(group)
            group = []
            total += batch.nbytes
            if held and total > _MAX_PREPARED_BYTES:
                break
            held.append({spec.name: batch})
    if not held:  # fewer pictures than rows: they repeat
        repeated = [group[number % len(group)] for number in range(rows)]
        held.append({spec.name: np.stack(repeated)})
    return held, rows


def _picture_tensors(
    files: Sequence[Path], spec: InputSpec, metadata: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[AnyArray]:
    """Yield one tensor for each picture, without the batch dimension."""
    row_shape = spec.shape[1:] if spec.shape[:1] == (-1,) else spec.shape
    if spec.datatype is BYTES:
        for file in files:
            element = np.empty(math.prod(row_shape) if row_shape and -1 not in row_shape else 1, object)
            element[:] = [_read(file)] * len(element)
            yield element.reshape(row_shape if -1 not in row_shape else (1,) * len(row_shape))
        return
    has_recipe = any(name.startswith("headrace.preprocess.") for name in config.get("parameters") or {})
    if spec.datatype.name == "UINT8" and not has_recipe:
        for file in files:
            yield _pixels(file, row_shape, spec)
        return
    from headrace.server.commands.infer import PictureTask, picture_tensor

    task = PictureTask.of(config, metadata)
    for file in files:
        yield picture_tensor(str(file), task)[0]


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise BadRequest(f"{file}: cannot be read: {error.strerror or error}: name readable pictures") from None


def _pixels(file: Path, shape: Sequence[int], spec: InputSpec) -> AnyArray:
    """Decode a picture and resize it to the model's input, uint8[height, width, 3] or uint8[3, height, width]."""
    from PIL import Image, UnidentifiedImageError

    channels_last = len(shape) == 3 and shape[2] == 3
    if len(shape) != 3 or 3 not in (shape[0], shape[2]):
        raise BadRequest(
            f"--pictures: the input '{spec.name}' has the shape {list(spec.shape)}, pictures fill [height, width, 3] or "
            "[3, height, width]: send arrays with --npz FILE"
        )
    height, width = shape[:2] if channels_last else shape[1:]
    try:
        with Image.open(file) as image:
            size = (width if width > 0 else image.width, height if height > 0 else image.height)
            pixels = np.asarray(image.convert("RGB").resize(size), np.uint8)
    except (OSError, UnidentifiedImageError) as error:
        raise BadRequest(f"{file}: is no readable picture ({error}): remove it from the folder") from None
    return pixels if channels_last else np.ascontiguousarray(pixels.transpose(2, 0, 1))
