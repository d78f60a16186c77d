"""HTTP bodies of the Open Inference Protocol V2, with the binary tensor data and classification extensions.

Knows no web framework: bytes in, `InferRequest` out; answers in, bytes out. One `ModelCodec` a model version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from server.core.classification import classify
from server.core.clock import NS_PER_US
from server.core.errors import BadRequest, Unsupported
from server.core.request import InferRequest, InferResponse
from server.core.tensor import BYTES, Array, ModelSpec, TensorSpec
from server.frontends import tensor_codec
from server.frontends.http_body import BodyBytes

# A deadline further away than this is none; it also keeps 2**63 microseconds from overflowing a timer.
_MAX_TIMEOUT_US = 86_400_000_000
_MAX_PRIORITY = 2**31
# Headers without an id repeat from call to call; this many plans are kept for a model version.
_MAX_PLANS = 256
_MAX_PLAN_BYTES = 4096
_RESERVED = ("triton_", "headrace.", "headrace_")

Body = list[bytes | memoryview]


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    data: Any = None
    parameters: dict[str, Any] = {}


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _Request(msgspec.Struct):
    inputs: list[_Input]
    outputs: list[_Output] | None = None
    id: str = ""
    parameters: dict[str, Any] = {}


_decoder = msgspec.json.Decoder(_Request)


@dataclass(frozen=True, slots=True)
class WantedOutput:
    """How one output goes back.

    Attributes:
        spec: of the output.
        binary: behind the JSON header instead of in it.
        classes: the number of best classes to send instead of the tensor, 0 for the tensor.
    """

    spec: TensorSpec
    binary: bool
    classes: int


@dataclass(frozen=True, slots=True)
class _Slice:
    """Where a binary input lies: everything about it is checked but that the body is long enough."""

    spec: TensorSpec
    shape: tuple[int, ...]
    elements: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request's JSON header says, checked; reusable for every request with the same header.

    Attributes:
        slices: binary inputs in the order of their data in the body.
        given: inputs whose data came in the header.
        rows, shape_key: as in `InferRequest`.
        wanted: the outputs to send.
        request_id, priority, timeout_us: as the request says.
    """

    slices: tuple[_Slice, ...]
    given: dict[str, Array]
    rows: int
    shape_key: object
    wanted: tuple[WantedOutput, ...]
    request_id: str
    priority: int
    timeout_us: int


class ModelCodec:
    """Decodes requests for one model version and encodes its answers.

    Not thread-safe: it belongs to the event loop.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._plans: dict[bytes, Plan] = {}
        self._one_shape = all(
            not tensor.optional and -1 not in tensor.shape[1 if spec.max_batch_size else 0 :]
            for tensor in spec.inputs.values()
        )
        self._all_binary = tuple(WantedOutput(tensor, True, 0) for tensor in spec.outputs.values())
        self._all_json = tuple(WantedOutput(tensor, False, 0) for tensor in spec.outputs.values())

    def decode(self, body: bytes | BodyBytes, header_size: int | None, received_ns: int) -> tuple[InferRequest, Plan]:
        """A request out of a body.

        Args:
            body: JSON, then the binary tensors; inputs are views of it.
            header_size: bytes of JSON, None if all of it is.
            received_ns: when it had arrived.

        Raises:
            BadRequest: says what came, where, and what was expected.
            Unsupported: something the protocol knows and this server does not offer.
        """
        size = len(body) if header_size is None else header_size
        if size > len(body):
            raise BadRequest(f"Inference-Header-Content-Length is {size}, the body has only {len(body)} bytes")
        header = bytes(body[:size])  # of `bytes` no copy if it is the whole
        plan = self._plans.get(header)
        if plan is None:
            plan = self._plan(header)
            if not plan.given and not plan.request_id and size <= _MAX_PLAN_BYTES:
                if len(self._plans) >= _MAX_PLANS:
                    self._plans.clear()
                self._plans[header] = plan
        inputs = dict(plan.given)
        position = size
        for piece in plan.slices:
            inputs[piece.spec.name] = tensor_codec.from_binary(
                piece.spec, piece.shape, piece.elements, body, position, piece.size_bytes
            )
            position += piece.size_bytes
        if position != len(body):
            raise BadRequest(
                f"{len(body) - position} bytes are left over behind the tensors: the inputs' binary_data_size add up to "
                f"{position - size}, {len(body) - size} bytes came"
            )
        return (
            InferRequest(
                inputs=inputs,
                rows=plan.rows,
                shape_key=plan.shape_key,
                received_ns=received_ns,
                request_id=plan.request_id,
                priority=plan.priority,
                deadline_ns=received_ns + plan.timeout_us * NS_PER_US if plan.timeout_us else 0,
                size_bytes=len(body),
            ),
            plan,
        )

    def encode(self, response: InferResponse, plan: Plan) -> tuple[int | None, Body]:
        """An answer as the parts of a body.

        Returns:
            The size of the JSON header if binary tensors follow it, else None; and the parts, in order.

        Raises:
            BadRequest: an output cannot be shown in the form that was asked for.
        """
        outputs: list[dict[str, object]] = []
        body: Body = [b""]
        binary = False
        for wanted in plan.wanted:
            spec = wanted.spec
            array, datatype = response.outputs[spec.name], spec.datatype
            if wanted.classes:
                array, datatype = classify(array, spec, wanted.classes, self.spec.max_batch_size > 0), BYTES
            shown: dict[str, object] = {"name": spec.name, "datatype": datatype.name, "shape": array.shape}
            if wanted.binary:
                data = tensor_codec.to_binary(array, datatype)
                shown["parameters"] = {"binary_data_size": len(data)}
                body.append(data)
                binary = True
            else:
                shown["data"] = tensor_codec.to_json(array, datatype)
            outputs.append(shown)
        header: dict[str, object] = {
            "model_name": self.spec.name,
            "model_version": self.spec.version,
            "outputs": outputs,
        }
        if plan.request_id:
            header = {"id": plan.request_id, **header}
        body[0] = orjson.dumps(header, option=orjson.OPT_SERIALIZE_NUMPY)
        return (len(body[0]) if binary else None), body

    def _plan(self, header: bytes) -> Plan:
        try:
            message = _decoder.decode(header)
        except msgspec.ValidationError as error:
            raise BadRequest(f"the request's JSON is not an inference request: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f"the request is not valid JSON: {error}") from error
        parameters = message.parameters
        check_parameters(parameters)
        slices: list[_Slice] = []
        given: dict[str, Array] = {}
        seen: dict[str, tuple[int, ...]] = {}
        for tensor in message.inputs:
            spec = self._input(tensor, seen)
            elements = tensor_codec.check_shape(spec, tensor.shape, self.spec)
            shape = seen[spec.name] = tuple(tensor.shape)
            size_bytes = binary_size(tensor)
            if size_bytes is None:
                given[spec.name] = tensor_codec.from_json(spec, shape, elements, tensor.data)
            else:
                slices.append(_Slice(spec, shape, elements, size_bytes))
        return Plan(
            slices=tuple(slices),
            given=given,
            rows=self._rows(seen),
            shape_key=None if self._one_shape else self._shape_key(seen),
            wanted=self._wanted(message.outputs, flag(parameters, "binary_data_output")),
            request_id=message.id,
            priority=min(max(integer(parameters, "priority"), 0), _MAX_PRIORITY),
            timeout_us=_clamped_timeout(integer(parameters, "timeout")),
        )

    def _input(self, tensor: _Input, seen: dict[str, tuple[int, ...]]) -> TensorSpec:
        spec = self.spec.inputs.get(tensor.name)
        if spec is None:
            raise BadRequest(
                f"model '{self.spec.name}' has no input {tensor.name[:128]!r}; its inputs are {list(self.spec.inputs)}"
            )
        if tensor.name in seen:
            raise BadRequest(f"input '{tensor.name}' is there twice")
        if tensor.datatype != spec.datatype.name:
            raise BadRequest(f"input '{tensor.name}' has datatype {tensor.datatype[:32]!r}, expected {spec.datatype}")
        return spec

    def _rows(self, shapes: dict[str, tuple[int, ...]]) -> int:
        missing = [name for name, spec in self.spec.inputs.items() if name not in shapes and not spec.optional]
        if missing:
            raise BadRequest(f"model '{self.spec.name}' needs the inputs {missing}, which are not there")
        if not self.spec.max_batch_size:
            return 1
        rows = {shape[0] for shape in shapes.values()}
        if len(rows) != 1:
            sizes = {name: shape[0] for name, shape in shapes.items()}
            raise BadRequest(f"the inputs must have the same number of rows (first dimension), they have {sizes}")
        return rows.pop()

    def _shape_key(self, shapes: dict[str, tuple[int, ...]]) -> object:
        start = 1 if self.spec.max_batch_size else 0
        return tuple((name, shapes[name][start:]) for name in self.spec.inputs if name in shapes)

    def _wanted(self, outputs: list[_Output] | None, binary: bool) -> tuple[WantedOutput, ...]:
        if not outputs:
            return self._all_binary if binary else self._all_json
        wanted: dict[str, WantedOutput] = {}
        for output in outputs:
            spec = self.spec.outputs.get(output.name)
            if spec is None:
                raise BadRequest(
                    f"model '{self.spec.name}' has no output {output.name[:128]!r}; its outputs are {list(self.spec.outputs)}"
                )
            if output.name in wanted:
                raise BadRequest(f"output '{output.name}' is asked for twice")
            check_parameters(output.parameters)
            classes = integer(output.parameters, "classification")
            if classes < 0:
                raise BadRequest(f"output '{output.name}': classification must be at least 1, not {classes}")
            wanted[output.name] = WantedOutput(spec, flag(output.parameters, "binary_data", binary), classes)
        return tuple(wanted.values())


def check_parameters(parameters: dict[str, Any]) -> None:
    """Refuse what is reserved or not offered.

    Raises:
        BadRequest: a reserved name.
        Unsupported: shared memory, sequences.
    """
    for name, value in parameters.items():
        if name.startswith(_RESERVED):
            raise BadRequest(f"parameter {name[:64]!r} is reserved for the server")
        if name.startswith("shared_memory_"):
            raise Unsupported("shared memory is not offered by this server")
        if name.startswith("sequence_") and value:
            raise Unsupported(f"parameter {name[:64]!r}: sequences are not offered by this server")


def integer(parameters: dict[str, Any], name: str) -> int:
    """A whole number among the parameters, 0 if it is not there.

    Raises:
        BadRequest: it is something else.
    """
    value = parameters.get(name, 0)
    if type(value) is not int:
        raise BadRequest(f"parameter '{name}' must be a whole number, not {type(value).__name__}")
    return value


def flag(parameters: dict[str, Any], name: str, default: bool = False) -> bool:
    """A boolean among the parameters.

    Raises:
        BadRequest: it is something else.
    """
    value = parameters.get(name, default)
    if type(value) is not bool:
        raise BadRequest(f"parameter '{name}' must be true or false, not {type(value).__name__}")
    return value


def binary_size(tensor: _Input) -> int | None:
    """The declared size of an input's binary data, None if its data are in the JSON.

    Raises:
        BadRequest: both, neither, or no size at all.
    """
    check_parameters(tensor.parameters)
    if "binary_data_size" not in tensor.parameters:
        if tensor.data is None:
            raise BadRequest(f"input '{tensor.name}' has neither data nor the parameter binary_data_size")
        return None
    if tensor.data is not None:
        raise BadRequest(f"input '{tensor.name}' has both data and the parameter binary_data_size")
    size_bytes = integer(tensor.parameters, "binary_data_size")
    if size_bytes < 0:
        raise BadRequest(f"input '{tensor.name}': binary_data_size is {size_bytes}")
    return size_bytes


def _clamped_timeout(timeout_us: int) -> int:
    return timeout_us if 0 < timeout_us <= _MAX_TIMEOUT_US else 0
