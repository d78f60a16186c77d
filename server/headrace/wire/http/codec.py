"""Codec for HTTP bodies of the Open Inference Protocol V2, with the binary tensor data and classification extensions.

It is independent of the web framework: bytes to `InferRequest`, `InferResponse` to bytes. Each model version has its own
`ModelCodec`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import orjson

from headrace.core.errors import BadRequest
from headrace.core.limits import ClientLimits
from headrace.core.request import InferResponse, ParameterValue
from headrace.core.tensor import BYTES, Array, ModelSpec, TensorSpec, classify
from headrace.wire.http.json_text import (
    MAX_WHOLE_BYTES,
    Outline,
    check_json,
    check_unique,
    needs_outline,
    outline,
    parse_non_finite,
    read_array,
)
from headrace.wire.requests import tensor_codec
from headrace.wire.requests.codec_threads import LARGE_BYTES
from headrace.wire.requests.request_options import flag, integer, request_parameters, tensor_parameters
from headrace.wire.requests.request_template import (
    MAX_SHARED_BYTES,
    Codec,
    RawInput,
    ReadContent,
    RequestTemplate,
    TemplateBuilder,
    TemplateCache,
)
from headrace.wire.requests.services import Regions
from headrace.wire.requests.tensor_codec import BodyBytes

# --- Requests and responses --------------------------------------------------------------------------------------------

Body = list[bytes | memoryview]


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    data: Any = None
    parameters: dict[str, Any] | None = None


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = None


class _Request(msgspec.Struct):
    inputs: list[_Input]
    outputs: list[_Output] | None = None
    id: str = ""
    parameters: dict[str, Any] = {}


_decoder = msgspec.json.Decoder(_Request)
# Characters of a parser's message in an error: the message may repeat the client's JSON.
_MAX_MESSAGE_CHARS = 200
# Stands for a large output. No client can guess it, and so write it into a request id.
_LARGE_ARRAY = b'"%s"' % secrets.token_hex(16).encode()
_MAX_HEADERS = 256  # Cached JSON headers of responses for a model version.

# Copying this much takes about a millisecond.
_LARGE_IMAGE_BYTES = 8_000_000

IMAGE_BODY = -1
"""Layout of a request whose whole body is one image file (`Content-Type: image/...`)."""


class ModelCodec(Codec[bytes | BodyBytes, int | None, tuple[int | None, Body]]):
    """Codec of HTTP bodies: JSON, followed by the binary tensors as little-endian bytes.

    The layout of a body is the size of its JSON in bytes: None if the whole body is JSON, 0 for a raw binary request,
    `IMAGE_BODY` for an image file. An encoded response is the size of its JSON if binary tensors follow it, else None; and the
    parts of the body in order.

    Args:
        spec, regions, max_shared_bytes: see `Codec`.
        client_limits: limits on JSON.
    """

    def __init__(
        self,
        spec: ModelSpec,
        regions: Regions | None = None,
        max_shared_bytes: int = MAX_SHARED_BYTES,
        client_limits: ClientLimits | None = None,
    ) -> None:
        super().__init__(spec, regions, max_shared_bytes)
        self._headers: dict[tuple[object, ...], bytes] = {}
        self._raw_templates = TemplateCache()
        self._has_text = any(tensor.datatype is BYTES for tensor in spec.inputs.values())
        self._client_limits = client_limits or ClientLimits()
        self._tensors = len(spec.inputs) + len(spec.outputs)

    def is_large_request(self, body: bytes | BodyBytes, header_size: int | None) -> bool:
        """Return True if `read` takes longer than the event loop can wait. JSON and texts are read one by one, other tensors
        are views of the body.
        """
        if header_size == IMAGE_BODY:  # one text, which is copied as a whole
            return len(body) > _LARGE_IMAGE_BYTES
        return len(body) > LARGE_BYTES and (self._has_text or header_size is None or header_size > LARGE_BYTES)

    def read(self, body: bytes | BodyBytes, header_size: int | None) -> ReadContent:
        """Return the template of a request, its inputs outside shared memory and its id; raises BadRequest."""
        size = len(body) if header_size is None else header_size
        if size > len(body):
            raise BadRequest(f"Inference-Header-Content-Length is {size}, the body has only {len(body)} bytes")
        if size > LARGE_BYTES:
            check_json_bytes(size, self._client_limits)
        if size > MAX_WHOLE_BYTES:
            template, position = self._parse_template(memoryview(body)[:size]), size  # type: ignore[arg-type]
        elif size > 0 or header_size is None:
            header = bytes(body[:size])  # no copy if the whole body is JSON
            template = self._templates.find(header) or self._parse_template(header)
            position = size
        elif size == IMAGE_BODY:
            template, position = self._image_template(body), len(body)
        else:
            template, position = self._raw_template(body)
        if template.views and position + template.raw_bytes == len(body):
            inputs = {}
            for name, view, offset, _ in template.views:
                inputs[name] = view(body, position + offset)
            return template, inputs, template.request_id
        inputs = dict(template.literals)
        for entry in template.raw:
            inputs[entry.spec.name] = tensor_codec.from_binary(
                entry.spec, entry.shape, entry.elements, body, position, entry.size_bytes
            )
            position += entry.size_bytes
        if position != len(body):
            raise BadRequest(
                f"{len(body) - position} bytes are left over after the tensors: the inputs' binary_data_size add up to "
                f"{position - size}, {len(body) - size} bytes came"
            )
        return template, inputs, template.request_id

    def encode(
        self,
        response: InferResponse,
        template: RequestTemplate,
        request_id: str = "",
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> tuple[int | None, Body]:
        """Encode a response."""
        all_binary = self._factory.all_binary
        request_id = request_id or template.request_id
        if response.parameters:
            parameters = {**response.parameters, **(parameters or {})}
        if parameters or request_id or template.outputs is not all_binary or not all_binary:
            return self._encode(response, template, request_id, parameters)
        # All outputs in binary: the JSON header repeats with their shapes and sizes, and is cached by those.
        body: Body = [b""]
        sizes: list[object] = []
        for spec in self.spec.outputs.values():
            array = response.outputs[spec.name]
            data = tensor_codec.to_binary(array, spec.datatype)
            body.append(data)
            sizes += (array.shape, len(data))
        key = tuple(sizes)
        header = self._headers.get(key)
        if header is None:
            descriptions: list[dict[str, object]] = [
                {
                    "name": spec.name,
                    "datatype": spec.datatype.name,
                    "shape": response.outputs[spec.name].shape,
                    "parameters": {"binary_data_size": len(data)},
                }
                for spec, data in zip(self.spec.outputs.values(), body[1:], strict=True)
            ]
            header = self._header(descriptions)
            if len(self._headers) >= _MAX_HEADERS:
                self._headers.clear()
            self._headers[key] = header
        body[0] = header
        return len(header), body

    def _encode(
        self,
        response: InferResponse,
        template: RequestTemplate,
        request_id: str,
        parameters: Mapping[str, ParameterValue] | None,
    ) -> tuple[int | None, Body]:
        outputs: list[dict[str, object]] = []
        body: Body = []
        large: list[list[bytes]] = []  # JSON of large outputs, in parts
        binary = False
        for output in template.outputs:
            spec = output.spec
            array, datatype = response.outputs[spec.name], spec.datatype
            if output.classes:
                array, datatype = classify(array, spec, output.classes, self.spec.max_batch_size > 0), BYTES
            description: dict[str, object] = {"name": spec.name, "datatype": datatype.name, "shape": array.shape}
            if output.shared is not None:
                # No parameters: Triton's C++ client expects binary data after the header if an output has any.
                template.write_output(output, array, datatype)
            elif output.binary:
                data = tensor_codec.to_binary(array, datatype)
                description["parameters"] = {"binary_data_size": len(data)}
                body.append(data)
                binary = True
            elif not tensor_codec.is_large(array, datatype):
                description["data"] = tensor_codec.to_json(array, datatype)
            else:
                description["data"] = orjson.Fragment(_LARGE_ARRAY)
                large.append(list(tensor_codec.json_chunks(array, datatype)))
            outputs.append(description)
        header = self._header(outputs, request_id, parameters)
        if not large:
            return (len(header) if binary else None), [header, *body]
        json = _insert(header, large)
        return (sum(map(len, json)) if binary else None), [*json, *body]

    def _header(
        self,
        outputs: list[dict[str, object]],
        request_id: str = "",
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> bytes:
        """Return the JSON of a response with the descriptions of its outputs."""
        header: dict[str, object] = {
            "model_name": self.spec.name,
            "model_version": self.spec.version,
            "outputs": outputs,
        }
        if parameters:
            header["parameters"] = parameters
        if request_id:
            header = {"id": request_id, **header}
        return orjson.dumps(header, option=orjson.OPT_SERIALIZE_NUMPY)

    def _raw_template(self, body: bytes | BodyBytes) -> tuple[RequestTemplate, int]:
        """Return the template of a raw binary request, and the position in the body at which raw inputs begin.

        The request has one row; the size of the body determines its shape; all outputs are binary.
        """
        key = b"%d" % len(body)
        template = self._raw_templates.find(key)
        if template is not None:
            return template, 0
        spec, shape = _raw_tensor(self.spec, len(body))
        builder = TemplateBuilder(self._factory)
        entry = builder.declare(spec.name, spec.datatype.name, shape)
        if spec.datatype is BYTES:
            text = np.empty(shape, dtype=object)
            text.reshape(-1)[0] = bytes(body)
            builder.add_literal(entry, text)
        else:
            builder.add_raw(entry, len(body))
        template = builder.finish((), True, {}, "")
        self._raw_templates.add(key, template)
        return template, 0 if template.raw else len(body)

    def _image_template(self, body: bytes | BodyBytes) -> RequestTemplate:
        """Return the template of an image file: the one element of the model's only required input; all outputs are JSON."""
        spec, shape = _image_tensor(self.spec)
        builder = TemplateBuilder(self._factory)
        text = np.empty(shape, dtype=object)
        text.reshape(-1)[0] = bytes(body)
        builder.add_literal(builder.declare(spec.name, spec.datatype.name, shape), text)
        return builder.finish((), False, {}, "")

    def _parse_template(self, header: bytes | memoryview) -> RequestTemplate:
        """Parse the JSON of a request, a view if it is larger than `MAX_WHOLE_BYTES`."""
        large = None
        if isinstance(header, memoryview) or needs_outline(header):
            large = outline(header, self._client_limits, self._tensors)
        if large is None:
            text = bytes(header)
            keys = check_json(text, self._client_limits, self._tensors)
        else:
            text, keys = large.text, large.keys
        message = _parse(text, keys)
        parameters = message.parameters
        request_parameters(parameters)
        builder = TemplateBuilder(self._factory)
        for tensor in message.inputs:
            entry = builder.declare(tensor.name, tensor.datatype, tensor.shape)
            shared = tensor_parameters(tensor.parameters, "input", tensor.name) if tensor.parameters else None
            size_bytes = binary_size(tensor, shared is not None)
            if shared is not None:
                builder.add_shared(entry, shared)
            elif size_bytes is None:
                builder.add_literal(entry, self._literal(entry, tensor.data, header, large))
            else:
                builder.add_raw(entry, size_bytes)
        if large is not None and len(large.arrays) != sum(
            large.array(each.data) is not None for each in message.inputs
        ):
            raise BadRequest("the JSON has a large array that is not the data of an input: leave it out")
        template = builder.finish(
            ((output.name, output.parameters or {}) for output in message.outputs or ()),
            flag(parameters, "binary_data_output"),
            parameters,
            message.id,
        )
        if large is None:
            self._templates.add(text, template)
        return template

    def _literal(self, entry: RawInput, data: object, header: bytes | memoryview, large: Outline | None) -> Array:
        """Return the tensor of an input in JSON; raises BadRequest."""
        span = None if large is None else large.array(data)
        if span is None:
            return tensor_codec.from_json(entry.spec, entry.shape, entry.elements, data)
        return read_array(entry.spec, entry.shape, entry.elements, header, span)


def check_json_bytes(size_bytes: int, client_limits: ClientLimits) -> None:
    """Check the size of the JSON of a request, without its binary data.

    Raises:
        TooLarge: the JSON exceeds `max_json_bytes`.
    """
    limit = client_limits.limits.max_json_bytes
    if size_bytes > limit:
        text = f"the request's JSON has {size_bytes} bytes, at most {limit} are allowed (--max-json-bytes)"
        raise client_limits.too_large("max_json_bytes", f"{text}: send the tensors as binary data")


def _insert(header: bytes, arrays: list[list[bytes]]) -> list[bytes]:
    """Return the parts of a response's JSON, with large arrays in place of `_LARGE_ARRAY`."""
    first, *rest = header.split(_LARGE_ARRAY)
    parts = [first]
    for array, text in zip(arrays, rest, strict=True):
        parts += (b"[", *array, b"]" + text)
    return parts


def _image_tensor(model: ModelSpec) -> tuple[TensorSpec, list[int]]:
    """Return the input and shape of a request that is an image file.

    Raises:
        BadRequest: the model does not have exactly one required input, or that is not one element of BYTES.
    """
    inputs = [spec for spec in model.inputs.values() if not spec.optional]
    cure = "send its tensors, or call a pipeline that decodes images"
    if len(inputs) != 1:
        raise BadRequest(
            f"an image file as the body is the data of one input, model '{model.name}' has {list(model.inputs)}: {cure}"
        )
    (spec,) = inputs
    shape = [1, *spec.shape[1:]] if model.max_batch_size else list(spec.shape)
    shape = [1 if size == -1 else size for size in shape]
    if spec.datatype is not BYTES or math.prod(shape) != 1:
        raise BadRequest(
            f"model '{model.name}' does not decode image files: its input '{spec.name}' is {spec.datatype}, shape "
            f"{list(spec.shape)}: {cure}"
        )
    return spec, shape


def _raw_tensor(model: ModelSpec, size_bytes: int) -> tuple[TensorSpec, list[int]]:
    """Return the input and shape of a raw binary request: one row, at most one dynamic dimension.

    Args:
        model: input and output tensor specs.
        size_bytes: of the body.

    Raises:
        BadRequest: the model has several inputs, or the size does not determine the shape.
    """
    subject = "a raw binary request (Inference-Header-Content-Length: 0)"
    if len(model.inputs) != 1:
        raise BadRequest(
            f"{subject} is the data of one input, model '{model.name}' has {list(model.inputs)}: name them in a JSON header"
        )
    (spec,) = model.inputs.values()
    shape = list(spec.shape)
    if model.max_batch_size:
        shape[0] = 1
    free = [index for index, size in enumerate(shape) if size == -1]
    fixed_elements = math.prod(size for size in shape if size != -1)
    if spec.datatype is BYTES:
        if free or fixed_elements != 1:
            raise BadRequest(
                f"{subject} is one element of BYTES, input '{spec.name}' has shape {list(spec.shape)}: send it in a JSON header"
            )
        return spec, shape
    if len(free) > 1:
        raise BadRequest(
            f"{subject} does not determine the shape of input '{spec.name}', {list(spec.shape)}: write it in a JSON header"
        )
    if free:
        row_bytes = fixed_elements * spec.datatype.size_bytes
        if size_bytes % row_bytes:
            raise BadRequest(
                f"{subject} of {size_bytes} bytes does not fill shape {list(spec.shape)} of {spec.datatype}: send a multiple of "
                f"{row_bytes} bytes"
            )
        shape[free[0]] = size_bytes // row_bytes
    return spec, shape


def _parse(header: bytes, keys: int) -> _Request:
    """Parse the JSON of a request.

    Args:
        header: JSON text in UTF-8.
        keys: number of keys in it, from `check_json`.

    Raises:
        BadRequest: the text is not JSON or not an inference request, or an object has a key twice.
    """
    try:
        message = _decoder.decode(header)
    except msgspec.ValidationError as error:
        raise _not_a_request(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if b"NaN" not in header and b"Inf" not in header:
            raise _not_json(error) from error
        return _parse_non_finite(header)
    if keys != _keys(message):  # a duplicate key, or an unknown one
        check_unique(header)
    return message


def _parse_non_finite(header: bytes) -> _Request:
    try:
        return msgspec.convert(parse_non_finite(header), _Request)
    except msgspec.ValidationError as error:
        raise _not_a_request(error) from error
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from error


def _not_a_request(error: Exception) -> BadRequest:
    cure = ": write datatype in small letters" if "`datatype`" in str(error) else ""
    return BadRequest(f"the request's JSON is not an inference request: {error}{cure}")


def _not_json(error: Exception) -> BadRequest:
    text = str(error)[:_MAX_MESSAGE_CHARS]
    cure = ": write names and texts in double quotes" * ("object keys must be strings" in text)
    return BadRequest(f"the request is not valid JSON: {text}{cure}")


def _keys(message: _Request) -> int:
    """Return the minimum number of keys in the JSON of a message; the exact number if no key is unknown, empty or nested."""
    keys = 1 + bool(message.id) + bool(message.parameters) + len(message.parameters)
    for tensor in message.inputs:
        keys += 3 + (tensor.data is not None) + (1 + len(tensor.parameters) if tensor.parameters else 0)
    if message.outputs is not None:
        keys += 1
        for output in message.outputs:
            keys += 1 + (1 + len(output.parameters) if output.parameters else 0)
    return keys


def binary_size(tensor: _Input, shared: bool) -> int | None:
    """Return the declared bytes of binary data of an input; None if its data are in the JSON or in shared memory.

    Args:
        tensor: input of the request.
        shared: True if its parameters name shared memory.

    Raises:
        BadRequest: the data are in two places or in none, or their size is invalid.
    """
    parameters = tensor.parameters or {}
    if shared:
        if tensor.data is not None or "binary_data_size" in parameters:
            raise BadRequest(f"input '{tensor.name}' is in shared memory, it takes neither data nor binary_data_size")
        return None
    if "binary_data_size" not in parameters:
        if tensor.data is None:
            raise BadRequest(f"input '{tensor.name}' has neither data nor the parameter binary_data_size")
        return None
    if tensor.data is not None:
        raise BadRequest(f"input '{tensor.name}' has both data and the parameter binary_data_size")
    size_bytes = integer(parameters, "binary_data_size")
    if size_bytes < 0:
        raise BadRequest(f"input '{tensor.name}': binary_data_size is {size_bytes}")
    return size_bytes
