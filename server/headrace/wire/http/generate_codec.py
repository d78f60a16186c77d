"""Codec of the generate extension: fields of a JSON object to tensors and parameters, outputs to fields of a JSON object.

A field with the name of an input is that input. `id` is the id of the request, the members of `parameters` are treated as
fields too, and every other field is a parameter of the request. See docs/generate.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import orjson

from headrace.core.errors import BadRequest
from headrace.core.limits import ClientLimits
from headrace.core.request import InferResponse, ParameterValue
from headrace.core.tensor import BYTES, Array, ModelSpec, TensorSpec
from headrace.wire.http.codec import check_json_bytes
from headrace.wire.http.json_text import check_json, check_size_without_strings, parse_json, parse_non_finite
from headrace.wire.requests import tensor_codec
from headrace.wire.requests.codec_threads import LARGE_BYTES
from headrace.wire.requests.request_options import request_parameters
from headrace.wire.requests.request_template import Codec, ReadContent, RequestTemplate, TemplateBuilder
from headrace.wire.requests.tensor_codec import BodyBytes

# Longer texts are parsed without the literals NaN and Infinity, for which `parse_non_finite` needs too long.
_MAX_NON_FINITE_BYTES = 1 << 20
# Characters of a parser's message, or of a name, in an error: both may repeat the client's JSON.
_MAX_MESSAGE_CHARS = 200
_MAX_NAME_CHARS = 64
_MIN_INTEGER, _MAX_INTEGER = -(2**63), 2**64 - 1
_WORDS = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}


class GenerateCodec(Codec[bytes | BodyBytes, None, bytes]):
    """Codec of JSON bodies of the generate extension. The layout is None, an encoded response is one JSON object.

    Args:
        spec: input and output tensor specs of the version.
        client_limits: limits on JSON.
    """

    def __init__(self, spec: ModelSpec, client_limits: ClientLimits | None = None) -> None:
        super().__init__(spec)
        self._client_limits = client_limits or ClientLimits()

    def is_large_request(self, content: bytes | BodyBytes, layout: None) -> bool:
        """Return True if `read` takes longer than the event loop can wait."""
        return len(content) > LARGE_BYTES

    def read(self, content: bytes | BodyBytes, layout: None) -> ReadContent:
        """Return the template of a request, its inputs outside shared memory and its id; raises BadRequest."""
        document = self._parse(bytes(content))
        builder = TemplateBuilder(self._factory)
        parameters: dict[str, Any] = {}
        request_id = ""
        for name, value in document.items():
            if name in self.spec.inputs:
                self._add_input(builder, name, value)
            elif name == "id":
                request_id = _request_id(value)
            elif name == "parameters":
                self._add_members(builder, value, parameters)
            else:
                self._add_parameter(parameters, name, value)
        request_parameters(parameters)
        template = builder.finish((), False, parameters, request_id)
        return template, dict(template.literals), request_id

    def encode(
        self,
        response: InferResponse,
        template: RequestTemplate,
        request_id: str = "",
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> bytes:
        """Encode one response of a model: names and values of its outputs.

        An output with one element is a value, any other an array of its elements in row-major order. Parameters that the code of
        the model gives the response are fields too, unless an output has the name. `parameters`, of the server, are in headers.
        """
        document: dict[str, object] = {"model_name": self.spec.name, "model_version": self.spec.version}
        if request_id:
            document["id"] = request_id
        document.update(response.parameters or {})
        for spec in self.spec.outputs.values():
            array = response.outputs.get(spec.name)
            if array is not None:
                document[spec.name] = _value(spec, array)
        return orjson.dumps(document)

    def _parse(self, text: bytes) -> dict[str, Any]:
        """Parse the JSON of a request; raises BadRequest, TooLarge for a text over a limit."""
        check_json_bytes(len(text), self._client_limits)
        if len(text) > LARGE_BYTES:
            check_size_without_strings(text)
        check_json(text, self._client_limits, len(self.spec.inputs))
        try:
            document = parse_non_finite(text) if len(text) <= _MAX_NON_FINITE_BYTES else parse_json(text)
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError too
            raise BadRequest(f"the request is not valid JSON: {str(error)[:_MAX_MESSAGE_CHARS]}") from None
        if not isinstance(document, dict):
            raise BadRequest(
                f"the request is {_word(document)}: a generate request is a JSON object whose fields are inputs of model "
                f"'{self.spec.name}' and parameters; its inputs are {list(self.spec.inputs)}"
            )
        return document

    def _add_members(self, builder: TemplateBuilder, members: object, parameters: dict[str, Any]) -> None:
        """Add the members of the field `parameters`: inputs of the model, and parameters."""
        if not isinstance(members, dict):
            raise BadRequest(
                f"the field 'parameters' is {_word(members)}: it must be an object, write "
                '"parameters": {"name": value}'
            )
        for name, value in members.items():
            if name in self.spec.inputs:
                self._add_input(builder, name, value)
            else:
                self._add_parameter(parameters, name, value)

    def _add_parameter(self, parameters: dict[str, Any], name: str, value: object) -> None:
        """Add a parameter of the request; raises BadRequest for one that occurs twice or is no scalar."""
        short = name[:_MAX_NAME_CHARS]
        if name in parameters:
            raise BadRequest(f"parameter {short!r} is a field of the request and of 'parameters': send it once")
        if type(value) not in (str, int, float, bool):
            raise BadRequest(
                f"field {short!r} is {_word(value)}: model '{self.spec.name}' has no such input, its inputs are "
                f"{list(self.spec.inputs)}, and a parameter must be a string, a number or a boolean"
            )
        if isinstance(value, int) and not _MIN_INTEGER <= value <= _MAX_INTEGER:
            raise BadRequest(f"parameter {short!r} is {str(value)[:40]}, integers have 64 bits: send a smaller one")
        if isinstance(value, float) and not math.isfinite(value):
            raise BadRequest(f"parameter {short!r} is {value}, parameters are finite numbers: send one, or a string")
        parameters[name] = value

    def _add_input(self, builder: TemplateBuilder, name: str, value: object) -> None:
        spec = self.spec.inputs[name]
        sizes = _nesting(name, value)
        shape = _shape(self.spec, spec, sizes)
        entry = builder.declare(name, spec.datatype.name, shape)
        data = value if sizes else [value]
        if len(sizes) > 1 and len(sizes) == len(shape) - 1:  # one row
            data = [value]
        builder.add_literal(entry, tensor_codec.from_json(spec, entry.shape, entry.elements, data))


def _nesting(name: str, value: object) -> tuple[int, ...]:
    """Return the sizes of nested arrays; () for a value that is no array. Raises BadRequest if rows differ."""
    sizes: list[int] = []
    rows: list[Any] = [value]
    while list in map(type, rows):
        lengths = {len(row) if type(row) is list else -1 for row in rows}
        if len(lengths) > 1:
            raise BadRequest(f"input '{name}': data is not a regular array: rows differ in length or depth")
        sizes.append(lengths.pop())
        rows = [*chain.from_iterable(rows)]
    return tuple(sizes)


def _shape(model: ModelSpec, spec: TensorSpec, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of an input from the nesting of its value.

    Nested arrays are the tensor, or one row of it if the model has a batch dimension. A value, or a flat array, fills the fixed
    dimensions of the input; the last free dimension gets the rest, and every other one is 1, as in Triton.

    Args:
        model: of the input.
        spec: tensor spec of the input; -1 allows any size.
        sizes: from `_nesting`.

    Raises:
        BadRequest: the value does not fit the input.
    """
    expected, rank = spec.shape, len(spec.shape)
    if len(sizes) == rank:
        return tuple(sizes)
    if len(sizes) > 1:
        if model.max_batch_size and len(sizes) == rank - 1:
            return (1, *sizes)
        raise BadRequest(
            f"input '{spec.name}' has shape {list(expected)}, its value is nested {len(sizes)} deep: nest it "
            f"{rank} deep, or send a flat array of its elements"
        )
    elements = rest = math.prod(sizes)
    shape = list(expected)
    for size in expected:
        if size > 0:
            if rest % size:
                raise _unfit(spec, elements)
            rest //= size
    for axis in reversed(range(rank)):
        if shape[axis] == -1:
            shape[axis], rest = rest, 1
    if rest != 1:
        raise _unfit(spec, elements)
    return tuple(shape)


def _unfit(spec: TensorSpec, elements: int) -> BadRequest:
    count = math.prod(size for size in spec.shape if size > 0)
    multiple = "a multiple of " if -1 in spec.shape and count > 1 else ""
    return BadRequest(
        f"input '{spec.name}' has shape {list(spec.shape)}, {elements} values came: send {multiple}{count} values"
    )


def _request_id(value: object) -> str:
    if not isinstance(value, str):
        raise BadRequest(f'the field \'id\' is {_word(value)}: the id of a request is a string, write "id": "42"')
    return value


def _value(spec: TensorSpec, array: Array) -> orjson.Fragment:
    """Return an output as JSON: a value for one element, else a flat array; raises BadRequest if it is not UTF-8 text."""
    try:
        if tensor_codec.is_large(array, spec.datatype):
            text = b"".join(tensor_codec.json_chunks(array, spec.datatype))
        else:
            data = tensor_codec.to_json(array, spec.datatype)
            text = orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
    except BadRequest:
        if spec.datatype is not BYTES:
            raise
        raise BadRequest(
            f"output '{spec.name}' is not UTF-8 text, which JSON requires: send the request to /infer, with binary_data: true"
        ) from None
    return orjson.Fragment(text if array.size == 1 else b"[%b]" % text)


def _word(value: object) -> str:
    return _WORDS.get(type(value), "a number")
