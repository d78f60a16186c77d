"""Codec of gRPC inference: serialized ModelInferRequest to `InferRequest`, `InferResponse` to serialized ModelInferResponse.

Tensors travel as `raw_input_contents` and `raw_output_contents`; clients repeat all other fields in each call. So `scan` walks
the top-level fields (format: protobuf's "Encoding" page), the other fields are looked up by their bytes, and protobuf parses
them only the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from headrace.config.triton_messages import service_pb2
from headrace.core.errors import BadRequest
from headrace.core.request import InferResponse, ParameterValue
from headrace.core.tensor import BYTES, Array, Datatype, ModelSpec, TensorSpec, classify
from headrace.wire.grpc import large_contents
from headrace.wire.grpc.large_contents import MAX_VARINT_BYTES, read_varint, varint
from headrace.wire.grpc.methods import Message, RequestMessage
from headrace.wire.requests import tensor_codec
from headrace.wire.requests.codec_threads import LARGE_BYTES
from headrace.wire.requests.request_options import EMPTY_FINAL_PARAMETER, request_parameters, tensor_parameters
from headrace.wire.requests.request_template import (
    MAX_SHARED_BYTES,
    MAX_TEMPLATE_BYTES,
    MAX_TEMPLATES,
    Codec,
    ReadContent,
    RequestTemplate,
    TemplateBuilder,
)
from headrace.wire.requests.services import Regions

# --- Typed contents: inputs of clients that send numbers in the message instead of raw bytes ---------------------------

# For each datatype: field of InferTensorContents and dtype of its elements there. FP16 and BF16 have no field.
_FIELDS: dict[str, tuple[str, str]] = {
    "BOOL": ("bool_contents", "?"),
    "INT8": ("int_contents", "<i4"),
    "INT16": ("int_contents", "<i4"),
    "INT32": ("int_contents", "<i4"),
    "INT64": ("int64_contents", "<i8"),
    "UINT8": ("uint_contents", "<u4"),
    "UINT16": ("uint_contents", "<u4"),
    "UINT32": ("uint_contents", "<u4"),
    "UINT64": ("uint64_contents", "<u8"),
    "FP32": ("fp32_contents", "<f4"),
    "FP64": ("fp64_contents", "<f8"),
    "BYTES": ("bytes_contents", "O"),
}


def from_contents(spec: TensorSpec, shape: tuple[int, ...], elements: int, contents: Any) -> Array:
    """Decode a tensor from an InferTensorContents message.

    Args:
        spec: tensor spec of the input.
        shape: declared and checked shape.
        elements: product of the shape.
        contents: InferTensorContents message.

    Raises:
        BadRequest: the field does not fit the datatype, the number of elements differs, or a value is out of range.
    """
    if spec.datatype.name not in _FIELDS:
        raise _no_contents(spec)
    field, wire = _FIELDS[spec.datatype.name]
    for other, _ in contents.ListFields():
        if other.name != field:
            raise BadRequest(f"input '{spec.name}' is {spec.datatype}: its contents go into {field}, not {other.name}")
    values = getattr(contents, field)
    if len(values) != elements:
        raise BadRequest(
            f"input '{spec.name}': {len(values)} elements came in {field} for shape {list(shape)}, expected {elements}"
        )
    if spec.datatype is BYTES:
        texts = np.empty(elements, dtype=object)
        texts[:] = values[:]
        return texts.reshape(shape)
    return _narrow(spec, np.fromiter(values, np.dtype(wire), elements)).reshape(shape)


def from_large_contents(spec: TensorSpec, shape: tuple[int, ...], elements: int, contents: memoryview) -> Array:
    """Decode a tensor from serialized InferTensorContents on a codec thread; see `from_contents`."""
    if spec.datatype.name not in _FIELDS:
        raise _no_contents(spec)
    field, _ = _FIELDS[spec.datatype.name]
    if spec.datatype is BYTES:
        return large_contents.decode_texts(spec.name, elements, contents).reshape(shape)
    return _narrow(spec, large_contents.decode_numbers(spec.name, field, elements, contents)).reshape(shape)


def _no_contents(spec: TensorSpec) -> BadRequest:
    return BadRequest(f"input '{spec.name}' is {spec.datatype}, which has no contents: send it as raw_input_contents")


def _narrow(spec: TensorSpec, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert 32-bit elements to the datatype of the input; raises BadRequest for a value out of range."""
    dtype = spec.datatype.dtype
    if array.dtype != dtype:  # 8 and 16 bits travel as 32
        info = np.iinfo(dtype)  # type: ignore[type-var]
        outside = (array < info.min) | (array > info.max)
        if outside.any():
            raise BadRequest(
                f"input '{spec.name}' is {spec.datatype}: contents must be from {info.min} to {info.max}, "
                f"{array[outside][0]} is not"
            )
        array = array.astype(dtype)
    return array


# --- Requests and responses --------------------------------------------------------------------------------------------

# Tags of one byte: field number << 3 | wire type 2 (a length and as many bytes follow).
_MODEL_NAME, _MODEL_VERSION, _ID, _RAW_INPUT, _MAX_KNOWN_TAG = 0x0A, 0x12, 0x1A, 0x3A, 0x3F
_RESPONSE_ID, _RAW_OUTPUT = b"\x1a", b"\x32"
_LENGTH_DELIMITED = 2
_FIXED_BYTES = {1: 8, 5: 4}
# Maximum bytes of a tag or a length, which have 32 bits.
_MAX_LENGTH_BYTES = 5
# A field of 2 bytes becomes an object of 100 bytes. No request has this many inputs, outputs and parameters.
_MAX_FIELDS = 4096
# Of a message that `scan` compares with the next ones.
_MAX_REPEATED_SPANS = 16
_MAX_PARAMETERS = 1024
# Limit on cached descriptions of outputs.
_MAX_DESCRIPTIONS = 1024


class Envelope(msgspec.Struct, frozen=True, eq=False):
    """Top-level fields of a request, parsed without its model.

    Attributes:
        model_name, model_version, id: of the request, "" for an absent field.
        header: bytes of all top-level fields except id and raw contents.
        spans: position of each of the raw contents in the message: (start, size) in bytes.
    """

    model_name: str
    model_version: str
    id: str
    header: bytes
    spans: list[tuple[int, int]]


def scan(message: RequestMessage) -> Envelope:
    """Scan the top-level fields of a serialized ModelInferRequest.

    Args:
        message: untrusted bytes; only the header is copied.

    Raises:
        BadRequest: the bytes are not a ModelInferRequest.
    """
    repeated = _repeated.get(len(message))
    if repeated is not None:
        for place, part in repeated[0]:
            if message[place] != part:
                break
        else:
            return repeated[1]
    envelope = _read_fields(message)
    is_short = len(envelope.header) <= MAX_TEMPLATE_BYTES and len(envelope.spans) <= _MAX_REPEATED_SPANS
    if is_short and not envelope.id:
        _remember(message, envelope)
    return envelope


def _read_fields(message: RequestMessage) -> Envelope:
    name = version = request_id = ""
    spans: list[tuple[int, int]] = []
    header: list[RequestMessage] = []
    copied_until = 0  # position up to which the message is copied to `header` or left out
    position, end = 0, len(message)
    try:
        for _ in range(_MAX_FIELDS):
            if position >= end:
                break
            start, tag, size = position, message[position], message[position + 1]
            if tag & 7 != _LENGTH_DELIMITED or tag > _MAX_KNOWN_TAG or tag < _MODEL_NAME:
                position = _skip(message, position)
                continue
            position += 2
            if size > 0x7F:
                size, position = read_varint(message, position - 1, _MAX_LENGTH_BYTES)
            stop = position + size
            if stop > end:
                raise _truncated()
            if tag == _RAW_INPUT:
                spans.append((position, size))
            elif tag == _MODEL_NAME:
                name = bytes(message[position:stop]).decode()
            elif tag == _MODEL_VERSION:
                version = bytes(message[position:stop]).decode()
            elif tag == _ID:
                request_id = bytes(message[position:stop]).decode()
            position = stop
            if tag in (_RAW_INPUT, _ID):
                if start > copied_until:
                    header.append(message[copied_until:start])
                copied_until = stop
        else:
            if position < end:
                raise BadRequest(f"the request has more than {_MAX_FIELDS} fields")
    except IndexError:
        raise _truncated() from None
    except UnicodeDecodeError:
        raise BadRequest("the request's model_name, model_version and id must be UTF-8 text") from None
    if copied_until < end:
        header.append(message[copied_until:end])
    return Envelope(name, version, request_id, bytes(header[0]) if len(header) == 1 else b"".join(header), spans)


# By the size of a message: its parts outside raw contents, each with its position, and its envelope.
_repeated: dict[int, tuple[list[tuple[slice, bytes]], Envelope]] = {}


def _remember(message: RequestMessage, envelope: Envelope) -> None:
    """Let `scan` compare the next message of this size instead of reading its fields."""
    if len(_repeated) >= MAX_TEMPLATES:
        _repeated.clear()
    parts: list[tuple[slice, bytes]] = []
    end = 0
    for start, size_bytes in [*envelope.spans, (len(message), 0)]:
        if start > end:
            parts.append((slice(end, start), bytes(message[end:start])))
        end = start + size_bytes
    _repeated[len(message)] = parts, envelope


class GrpcCodec(Codec[RequestMessage, Envelope, Message]):
    """Codec of serialized ModelInferRequest and ModelInferResponse messages; the layout of a message comes from `scan`.

    Args:
        spec, regions, max_shared_bytes: see `Codec`.
    """

    def __init__(
        self, spec: ModelSpec, regions: Regions | None = None, max_shared_bytes: int = MAX_SHARED_BYTES
    ) -> None:
        super().__init__(spec, regions, max_shared_bytes)
        self._head = _response(model_name=spec.name, model_version=spec.version)
        self._descriptions: dict[tuple[str, str, tuple[int, ...]], bytes] = {}
        # Template and views of the messages whose envelope `scan` returns again.
        self._repeated: dict[Envelope, tuple[RequestTemplate, list[tuple[str, Callable[[Any, int], Array], int]]]] = {}
        self._has_text = any(tensor.datatype is BYTES for tensor in spec.inputs.values())

    def is_large_request(self, message: RequestMessage, envelope: Envelope) -> bool:
        """Return True if `read` takes longer than the event loop can wait. Typed contents and texts are read one by one, other
        tensors are views of the message.
        """
        return len(message) > LARGE_BYTES and (self._has_text or len(envelope.header) > LARGE_BYTES)

    def read(self, message: RequestMessage, envelope: Envelope) -> ReadContent:
        """Return the template of a request, its inputs outside shared memory and its id; raises BadRequest."""
        repeated = self._repeated.get(envelope)
        if repeated is not None:
            inputs = {}
            for name, view, start in repeated[1]:
                inputs[name] = view(message, start)
            return repeated[0], inputs, envelope.id
        header, spans = envelope.header, envelope.spans
        template = self._templates.find(header) if len(header) <= MAX_TEMPLATE_BYTES else None
        if template is None:
            template = self._parse_template(header, len(spans))
            self._templates.add(header, template)
        if template.views and len(template.views) == len(spans):
            pairs = list(zip(template.views, spans, strict=True))
            if not envelope.id and all(view[3] == span[1] for view, span in pairs):
                if len(self._repeated) >= MAX_TEMPLATES:
                    self._repeated.clear()
                self._repeated[envelope] = template, [(view[0], view[1], span[0]) for view, span in pairs]
        if len(template.raw) != len(spans):
            # Inputs without elements may have raw contents or none: one header has two templates.
            template = self._parse_template(header, len(spans))
        if len(template.raw) != len(spans):
            raise BadRequest(
                f"{len(spans)} raw_input_contents came, expected {len(template.raw)}: one for each input that has no "
                "contents and is not in shared memory, in their order"
            )
        inputs = dict(template.literals)
        for entry, (start, size_bytes) in zip(template.raw, spans, strict=True):
            inputs[entry.spec.name] = tensor_codec.from_binary(
                entry.spec, entry.shape, entry.elements, message, start, size_bytes
            )
        return template, inputs, envelope.id

    def encode(
        self,
        response: InferResponse,
        template: RequestTemplate,
        request_id: str = "",
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> Message:
        """Encode a response as the parts of a message, with raw outputs as Triton sends them; see `Codec.encode`.

        An output in shared memory (`RequestedOutput.shared`) has empty raw contents, so that the others keep their positions.
        """
        head = [self._head]
        data: Message = [b""]
        for output in template.outputs:
            spec = output.spec
            array, datatype = response.outputs[spec.name], spec.datatype
            if output.classes:
                array, datatype = classify(array, spec, output.classes, self.spec.max_batch_size > 0), BYTES
            if output.shared is not None:
                head.append(_description(spec, datatype, array, template.write_output(output, array, datatype)))
                data.append(_RAW_OUTPUT + varint(0))
                continue
            content = tensor_codec.to_binary(array, datatype)
            key = (spec.name, datatype.name, array.shape)
            head.append(self._descriptions.get(key) or self._describe(key, spec, datatype, array))
            data += (_RAW_OUTPUT + varint(len(content)), content)
        if response.parameters:
            parameters = {**response.parameters, **(parameters or {})}
        if parameters:
            head.append(_response_parameters(parameters))
        if request_id:
            text = request_id.encode()
            head.append(_RESPONSE_ID + varint(len(text)) + text)
        data[0] = b"".join(head)
        return data

    def _describe(
        self, key: tuple[str, str, tuple[int, ...]], spec: TensorSpec, datatype: Datatype, array: Array
    ) -> bytes:
        if len(self._descriptions) >= _MAX_DESCRIPTIONS:
            self._descriptions.clear()
        description = self._descriptions[key] = _description(spec, datatype, array, {})
        return description

    def _parse_template(self, header: bytes, contents: int) -> RequestTemplate:
        """Parse the template of a header.

        Args:
            header: of an envelope.
            contents: number of raw contents in the message.
        """
        large: list[memoryview | None] = []
        if len(header) > LARGE_BYTES:
            header, large = large_contents.cut_contents(header)
        try:
            message = service_pb2.ModelInferRequest.FromString(header)
        except DecodeError:
            raise BadRequest("the request is not a ModelInferRequest: its fields do not parse") from None
        parameters = _parameters(message.parameters)
        request_parameters({name: value for name, value in parameters.items() if name != EMPTY_FINAL_PARAMETER})
        builder = TemplateBuilder(self._factory)
        for index, tensor in enumerate(message.inputs):
            entry = builder.declare(tensor.name, tensor.datatype, tensor.shape)
            shared = tensor_parameters(_parameters(tensor.parameters), "input", tensor.name)
            if not tensor.HasField("contents"):
                if shared is not None:
                    builder.add_shared(entry, shared)
                elif contents or entry.elements:
                    builder.add_raw(entry, entry.elements * entry.spec.datatype.size_bytes)
                else:  # typed contents without elements are often left out
                    builder.add_literal(entry, np.empty(entry.shape, entry.spec.datatype.dtype))
            elif shared is not None:
                raise BadRequest(f"input '{tensor.name}' is in shared memory, it takes no contents")
            elif contents:
                raise BadRequest(f"input '{tensor.name}' has contents, but raw_input_contents came too: send one kind")
            elif large and (view := large[index]) is not None:
                builder.add_literal(entry, from_large_contents(entry.spec, entry.shape, entry.elements, view))
            else:
                builder.add_literal(entry, from_contents(entry.spec, entry.shape, entry.elements, tensor.contents))
        outputs: Iterable[tuple[str, dict[str, Any]]] = (
            (output.name, _parameters(output.parameters)) for output in message.outputs
        )
        return builder.finish(outputs, True, parameters, "")


def sequence_of(envelope: Envelope) -> object:
    """Return the model and the `sequence_id` of a request; None without one, and for a header that does not parse."""
    if b"sequence_id" not in envelope.header:
        return None
    try:
        parameters = service_pb2.ModelInferRequest.FromString(envelope.header).parameters
    except DecodeError:  # it is refused where it is served
        return None
    return envelope.model_name, parameters["sequence_id"].SerializeToString()


def _parameters(parameters: Any) -> dict[str, bool | int | float | str]:
    """Convert a map of InferParameter to Python values; raises BadRequest."""
    if len(parameters) > _MAX_PARAMETERS:
        raise BadRequest(f"{len(parameters)} parameters came, at most {_MAX_PARAMETERS} are allowed")
    return {name: parameter_value(name, parameter) for name, parameter in parameters.items()}


def parameter_value(name: str, parameter: Any) -> Any:
    """Return the value of a message with the oneof `parameter_choice`; raises BadRequest if it has none."""
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise BadRequest(f"parameter {name[:64]!r} has no value")
    return getattr(parameter, kind)


def _description(spec: TensorSpec, datatype: Datatype, array: Array, parameters: Mapping[str, ParameterValue]) -> bytes:
    """Encode the field of a ModelInferResponse that describes one output."""
    output = service_pb2.ModelInferResponse.InferOutputTensor(name=spec.name, datatype=datatype.name, shape=array.shape)
    _fill(output.parameters, parameters)
    return _response(outputs=[output])


def _response_parameters(parameters: Mapping[str, ParameterValue]) -> bytes:
    """Encode the parameters of a ModelInferResponse."""
    response = service_pb2.ModelInferResponse()
    _fill(response.parameters, parameters)
    serialized: bytes = response.SerializeToString()
    return serialized


def _fill(message: Any, parameters: Mapping[str, ParameterValue]) -> None:
    for name, value in parameters.items():
        if isinstance(value, str):
            message[name].string_param = value
        elif isinstance(value, bool):
            message[name].bool_param = value
        elif isinstance(value, float):
            message[name].double_param = value
        else:
            message[name].int64_param = value


def _response(**fields: object) -> bytes:
    """Encode some fields of a ModelInferResponse; concatenated encodings are one message."""
    serialized: bytes = service_pb2.ModelInferResponse(**fields).SerializeToString()
    return serialized


def _skip(message: RequestMessage, position: int) -> int:
    """Skip a field whose tag has several bytes, an unknown number or another wire type; returns the position after it.

    Raises:
        BadRequest: the bytes are no field, or a known field with a wrong wire type.
        IndexError: the message ends within the field.
    """
    tag, position = read_varint(message, position, _MAX_LENGTH_BYTES)
    number, wire_type = tag >> 3, tag & 7
    if not _MAX_KNOWN_TAG >> 3 < number < 1 << 29:
        raise BadRequest(
            f"the request is not a ModelInferRequest: field {number} is there with wire type {wire_type}, or its tag is "
            "longer than it needs to be"
        )
    if wire_type == 0:
        _, position = read_varint(message, position, MAX_VARINT_BYTES)
    elif wire_type == _LENGTH_DELIMITED:
        size, position = read_varint(message, position, _MAX_LENGTH_BYTES)
        position += size
    elif wire_type in _FIXED_BYTES:
        position += _FIXED_BYTES[wire_type]
    else:
        raise BadRequest(f"the request is not a ModelInferRequest: field {number} has wire type {wire_type}")
    if position > len(message):
        raise _truncated()
    return position


def _truncated() -> BadRequest:
    return BadRequest("the request is not a ModelInferRequest: it ends in the middle of a field")
