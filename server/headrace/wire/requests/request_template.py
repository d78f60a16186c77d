"""Request templates: names, shapes and parameters of a request, checked against the model; and the base class of codecs.

A codec reads names, shapes and parameters from its wire format and passes them to a `TemplateBuilder`. The resulting
`RequestTemplate` can be cached and used for every request with the same header. Triton's shared memory extension is here too: a
template has the region and offset of a tensor, and the region is looked up for each request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from headrace.core.clock import NS_PER_US
from headrace.core.errors import BadRequest, Forbidden, TooLarge
from headrace.core.request import NO_PARAMETERS, NO_RANGES, InferRequest, InferResponse, ParameterValue, SequenceFields
from headrace.core.shapes import check_rows, check_shape, has_one_shape, shape_key
from headrace.core.tensor import (
    BYTES,
    Array,
    Datatype,
    ModelSpec,
    Region,
    TensorSpec,
    as_input,
    is_gpu_region,
    is_resident,
)
from headrace.wire.requests import tensor_codec
from headrace.wire.requests.codec_threads import LARGE_BYTES
from headrace.wire.requests.request_options import (
    DEADLINE_PARAMETER,
    EMPTY_FINAL_PARAMETER,
    MAX_TIMEOUT_NS,
    TIMING_PARAMETER,
    UNORDERED_PARAMETER,
    SharedRange,
    earlier,
    flag,
    integer,
    model_parameters,
    sequence_fields,
    tensor_parameters,
)
from headrace.wire.requests.services import Regions

_MAX_PRIORITY = 2**31
# Clients repeat the same request headers; each model version caches this number of templates.
MAX_TEMPLATES = 256
MAX_TEMPLATE_BYTES = 4096
# Limit on the inputs of one request in shared memory, bytes: a few bytes can name gigabytes.
MAX_SHARED_BYTES = 128 << 20
# Larger inputs that must be copied from shared memory, which takes a millisecond, are copied on a codec thread.
_LARGE_COPY_BYTES = 4 << 20

Content = TypeVar("Content", bound=Sized)
Layout = TypeVar("Layout")
Encoded = TypeVar("Encoded")


class RequestedOutput(msgspec.Struct, frozen=True, eq=False):
    """Form in which one output is returned.

    Attributes:
        spec: tensor spec of the output.
        binary: True for bytes after the JSON header, False for JSON. gRPC is always binary.
        classes: number of best classes to return instead of the tensor, 0 for the tensor.
        shared: range of shared memory that receives the tensor, None to send it in the response.
    """

    spec: TensorSpec
    binary: bool
    classes: int
    shared: SharedRange | None = None


class RawInput(msgspec.Struct, frozen=True, eq=False):
    """Input whose name, datatype and shape are checked, without its data.

    Attributes:
        spec: tensor spec of the input.
        shape: as declared.
        elements: product of the shape.
        size_bytes: size of the data: as declared (HTTP, shared memory), or that of the elements (gRPC).
        shared: range of shared memory with the data, None if they are in the message.
    """

    spec: TensorSpec
    shape: tuple[int, ...]
    elements: int
    size_bytes: int = 0
    shared: SharedRange | None = None


InputView = tuple[str, Callable[[Any, int], Array], int, int]


class RequestTemplate(msgspec.Struct, frozen=True, eq=False):
    """Checked header of a request, valid for every request with the same header.

    Attributes:
        raw: binary inputs in the order of their data in the message.
        views: of each of `raw` its name, a function that returns the tensor at a position of the message without checks, the
            distance of its data from those of the first, and their size, in bytes. () if one must be checked for each request.
        raw_bytes: size of the data of all `views`.
        literals: inputs whose data are part of the header (JSON, typed contents).
        shared: inputs whose data are in shared memory.
        rows, shape_key: as in `InferRequest`.
        outputs: outputs to return.
        needs_regions: True if inputs or outputs are in shared memory: `attach` must be called before the request is queued.
        request_id, priority: of the request.
        queue_timeout_ns: Triton's parameter `timeout`; see `InferRequest`.
        deadline_us: deadline in microseconds after the arrival of the request, 0 for none.
        timing: True to return the time of each phase.
        empty_final: True for a response without outputs after the last one of a decoupled model, over gRPC.
        unordered: True if the response may be sent before those of earlier requests on its stream.
        is_costly: True if encoding takes time in proportion to the outputs: JSON, text, classes, shared memory.
        targets: regions that receive outputs, by output; empty before `attach` and in cached templates.
        output_names, parameters: as `outputs` and `parameters` in `InferRequest`.
        resident_outputs: as in `InferRequest`: outputs in regions on the model's GPUs; empty before `attach`.
        sequence: as in `InferRequest`.
    """

    raw: tuple[RawInput, ...]
    literals: dict[str, Array]
    shared: tuple[RawInput, ...]
    rows: int
    shape_key: object
    outputs: tuple[RequestedOutput, ...]
    needs_regions: bool
    request_id: str
    priority: int
    queue_timeout_ns: int = 0
    deadline_us: int = 0
    timing: bool = False
    unordered: bool = False
    empty_final: bool = False
    is_costly: bool = False
    targets: dict[str, Region] = {}
    output_names: tuple[str, ...] = ()
    parameters: Mapping[str, ParameterValue] = NO_PARAMETERS
    resident_outputs: frozenset[str] = frozenset()
    sequence: SequenceFields | None = None
    views: tuple[InputView, ...] = ()
    raw_bytes: int = 0

    @property
    def is_brief(self) -> bool:
        """True if it has inputs in shared memory, and the event loop may copy them wherever they are."""
        texts = sum(entry.size_bytes for entry in self.shared if entry.spec.datatype is BYTES)
        largest = max((entry.size_bytes for entry in self.shared), default=0)
        return bool(self.shared) and not self.literals and texts <= LARGE_BYTES and largest <= _LARGE_COPY_BYTES

    def attach(
        self, regions: Regions | None, inputs: dict[str, Array], devices: frozenset[int]
    ) -> tuple[RequestTemplate, int]:
        """Look up the shared memory of one request: read or locate its inputs, and check the ranges of its outputs.

        Args:
            regions: registered regions; None if shared memory is disabled.
            inputs: receives the inputs in shared memory, as `ResidentRows` if the GPUs can read them there.
            devices: GPU numbers that the model runs on (`ModelSpec.resident_devices`).

        Returns:
            The template of this request, and the number of bytes that were copied.

        Raises:
            Forbidden: shared memory is disabled.
            NotFound: a region does not exist.
            BadRequest: a range exceeds its region, or its bytes do not match the tensor.
        """
        if regions is None:
            raise Forbidden("shared memory is disabled: start the server with --allow-client-shm")
        targets: dict[str, Region] = {}
        for output in self.outputs:
            if output.shared is not None:
                name = output.spec.name
                targets[name] = regions.find(output.shared.region)
                with named_tensor(f"output '{name}'"):
                    targets[name].check(output.shared.offset, output.shared.size_bytes)
        size_bytes = 0
        for entry in self.shared:
            assert entry.shared is not None
            if entry.spec.name in inputs:  # from `read_shared`
                size_bytes += entry.size_bytes
                continue
            region = regions.find(entry.shared.region)
            size_bytes += read_shared_input(entry, region, entry.shared.offset, devices, inputs)
        if not targets:
            return self, size_bytes
        resident = frozenset(
            output.spec.name
            for output in self.outputs
            if output.shared is not None and targets[output.spec.name].gpu in devices
        )
        return msgspec.structs.replace(self, targets=targets, resident_outputs=resident), size_bytes

    def large_shared(self, regions: Regions, devices: frozenset[int]) -> list[tuple[RawInput, Region]]:
        """Return the inputs in shared memory that a codec thread should read before `attach`; arguments and errors as there.

        Returns:
            The BYTES inputs if they are large, and the other inputs if they must be copied and are very large.
        """
        texts: list[tuple[RawInput, Region]] = []
        copied: list[tuple[RawInput, Region]] = []
        for entry in self.shared:
            shared = entry.shared
            assert shared is not None
            if entry.spec.datatype is BYTES:
                texts.append((entry, regions.find(shared.region)))
            elif entry.shape and entry.size_bytes > _LARGE_COPY_BYTES:
                region = regions.find(shared.region)
                with named_tensor(f"input '{entry.spec.name}'"):
                    if region.locate(shared.offset, entry.size_bytes, devices) is None:
                        copied.append((entry, region))
        return texts + copied if copied or sum(entry.size_bytes for entry, _ in texts) > LARGE_BYTES else []

    def write_output(self, output: RequestedOutput, array: Array, datatype: Datatype) -> dict[str, str | int]:
        """Write an output to its range of shared memory; from GPU to GPU if both are on the same one.

        Args:
            output: one of `self.outputs` with a `shared`.
            array: the tensor; may be `ResidentRows`.
            datatype: datatype in the response.

        Returns:
            Parameters of the output in the response, which stand for its data.

        Raises:
            BadRequest: the data are larger than the range, or the memory no longer exists.
        """
        shared_range, name = output.shared, output.spec.name
        assert shared_range is not None
        size_bytes = write_shared_output(name, self.targets[name], shared_range, array, datatype)
        return {
            "shared_memory_region": shared_range.region,
            "shared_memory_offset": shared_range.offset,
            "shared_memory_byte_size": size_bytes,
        }


def write_shared_output(name: str, region: Region, shared_range: SharedRange, array: Array, datatype: Datatype) -> int:
    """Write an output to a range of shared memory; returns its size in bytes. See `RequestTemplate.write_output`."""
    write: Callable[[int], None]
    if is_resident(array) and is_gpu_region(region) and (array.device, array.dtype) == (region.gpu, datatype.dtype):
        size_bytes, write = array.nbytes, partial(region.write_rows, rows=array)
    else:
        data = tensor_codec.to_binary(np.asarray(array), datatype)
        size_bytes, write = len(data), partial(region.write, data=data)
    if size_bytes > shared_range.size_bytes:
        raise BadRequest(
            f"output '{name}' has {size_bytes} bytes, its shared_memory_byte_size is only {shared_range.size_bytes}"
        )
    with named_tensor(f"output '{name}'"):
        write(shared_range.offset)
    return size_bytes


def read_shared(large: list[tuple[RawInput, Region]], inputs: dict[str, Array]) -> None:
    """Copy inputs from shared memory, on a codec thread.

    Args:
        large: from `RequestTemplate.large_shared`.
        inputs: receives them.

    Raises:
        HeadraceError: as `RequestTemplate.attach`.
    """
    for entry, region in large:
        assert entry.shared is not None
        read_shared_input(entry, region, entry.shared.offset, frozenset(), inputs)


def may_have_shared_inputs(content: bytes) -> bool:
    """Return True if a request may have inputs in shared memory. Their size is not known before it is parsed."""
    return b"shared_memory_region" in content or b"\\u" in content  # JSON may write letters as \uXXXX


ReadContent = tuple[RequestTemplate, dict[str, Array], str]
"""Template of a request, its inputs outside shared memory, and its id."""


class TemplateFactory:
    """Common data of all templates of one model version.

    Args:
        spec: input and output tensor specs of the version.
        max_shared_bytes: limit on the inputs of one request in shared memory, bytes.

    Attributes:
        one_shape: True if every row has the same shapes, so that requests need no `shape_key`.
        all_binary, all_json: all outputs in one form.
    """

    def __init__(self, spec: ModelSpec, max_shared_bytes: int) -> None:
        self.spec = spec
        self.max_shared_bytes = max_shared_bytes
        self.one_shape = has_one_shape(spec)
        self.all_binary = tuple(RequestedOutput(tensor, True, 0) for tensor in spec.outputs.values())
        self.all_json = tuple(RequestedOutput(tensor, False, 0) for tensor in spec.outputs.values())

    def select_outputs(
        self, outputs: Iterable[tuple[str, Mapping[str, Any]]], binary: bool
    ) -> tuple[RequestedOutput, ...]:
        """Select the outputs to return.

        Args:
            outputs: requested names with their parameters; empty for all outputs.
            binary: form of outputs without the parameter `binary_data`.

        Raises:
            BadRequest: an output is unknown, or has invalid parameters.
        """
        selected: dict[str, RequestedOutput] = {}
        for name, parameters in outputs:
            spec = self.spec.outputs.get(name)
            if spec is None:
                raise BadRequest(
                    f"model '{self.spec.name}' has no output {name[:128]!r}; its outputs are {list(self.spec.outputs)}"
                )
            if name in selected:  # as in Triton, its first form counts
                continue
            shared = tensor_parameters(parameters, "output", name) if parameters else None
            classes = integer(parameters, "classification")
            if classes < 0:
                raise BadRequest(f"output '{name}': classification must be at least 1, not {classes}")
            if shared is not None and classes:
                raise BadRequest(f"output '{name}': classification cannot go to shared memory, leave one of them out")
            selected[name] = RequestedOutput(spec, flag(parameters, "binary_data", binary), classes, shared)
        if not selected:
            return self.all_binary if binary else self.all_json
        return tuple(selected.values())


class TemplateBuilder:
    """Builds the template of one request: first its inputs, each with `declare` and an `add_` method, then `finish`."""

    __slots__ = ("_factory", "_literals", "_raw", "_shapes", "_shared", "_shared_bytes")

    def __init__(self, factory: TemplateFactory) -> None:
        self._factory = factory
        self._raw: list[RawInput] = []
        self._literals: dict[str, Array] = {}
        self._shared: list[RawInput] = []
        self._shared_bytes = 0
        self._shapes: dict[str, tuple[int, ...]] = {}

    def declare(self, name: str, datatype: str, shape: Sequence[int]) -> RawInput:
        """Check name, datatype and shape of an input; the caller then calls one of the `add_` methods.

        Raises:
            BadRequest: the input does not match the model.
        """
        model = self._factory.spec
        spec = model.inputs.get(name)
        if spec is None:
            raise BadRequest(f"model '{model.name}' has no input {name[:128]!r}; its inputs are {list(model.inputs)}")
        if name in self._shapes:
            raise BadRequest(f"input '{name}' occurs twice: send it once")
        if datatype != spec.datatype.name:
            raise BadRequest(f"input '{name}' has datatype {datatype[:32]!r}, expected {spec.datatype}")
        elements = check_shape(spec, shape, model)
        checked = self._shapes[name] = tuple(shape)
        return RawInput(spec, checked, elements)

    def add_raw(self, entry: RawInput, size_bytes: int) -> None:
        """Add an input whose data follow in the message; `size_bytes` as in `RawInput`."""
        self._raw.append(RawInput(entry.spec, entry.shape, entry.elements, size_bytes))

    def add_literal(self, entry: RawInput, array: Array) -> None:
        """Add an input with its data."""
        self._literals[entry.spec.name] = array

    def add_shared(self, entry: RawInput, shared_range: SharedRange) -> None:
        """Add an input whose data are in shared memory.

        Raises:
            BadRequest: the range and the tensor have different sizes.
            TooLarge: the inputs of the request in shared memory exceed the limit.
        """
        tensor_codec.check_size(entry.spec, entry.shape, entry.elements, shared_range.size_bytes)
        self._shared_bytes += shared_range.size_bytes
        limit = self._factory.max_shared_bytes
        if self._shared_bytes > limit:
            raise TooLarge(f"the inputs in shared memory have {self._shared_bytes} bytes, at most {limit} are read")
        self._shared.append(RawInput(entry.spec, entry.shape, entry.elements, shared_range.size_bytes, shared_range))

    def finish(
        self,
        outputs: Iterable[tuple[str, Mapping[str, Any]]],
        binary: bool,
        parameters: Mapping[str, Any],
        request_id: str,
    ) -> RequestTemplate:
        """Return the template, after all inputs are added.

        Args:
            outputs, binary: as in `TemplateFactory.select_outputs`.
            parameters: of the request.
            request_id: of the caller; "" if it is not part of the template.

        Raises:
            BadRequest: inputs are missing or differ in rows, a parameter has an invalid value, or `select_outputs` raised it.
        """
        model = self._factory.spec
        rows = check_rows(model, self._shapes)
        selected = self._factory.select_outputs(outputs, binary)
        views = () if self._literals else _views(self._raw)
        return RequestTemplate(
            raw=tuple(self._raw),
            literals=self._literals,
            shared=tuple(self._shared),
            rows=rows,
            shape_key=None if self._factory.one_shape else shape_key(model, self._shapes),
            outputs=selected,
            needs_regions=bool(self._shared) or any(output.shared for output in selected),
            request_id=request_id,
            priority=min(max(integer(parameters, "priority"), 0), _MAX_PRIORITY),
            queue_timeout_ns=_clamped_us(integer(parameters, "timeout")) * NS_PER_US,
            deadline_us=_clamped_us(integer(parameters, DEADLINE_PARAMETER)),
            timing=flag(parameters, TIMING_PARAMETER),
            unordered=flag(parameters, UNORDERED_PARAMETER),
            empty_final=flag(parameters, EMPTY_FINAL_PARAMETER),
            is_costly=any(_is_costly(output) for output in selected),
            output_names=() if len(selected) == len(self._factory.all_json) else tuple(o.spec.name for o in selected),
            parameters=model_parameters(parameters) if parameters else NO_PARAMETERS,
            sequence=sequence_fields(parameters) if parameters else None,
            views=views,
            raw_bytes=sum([size_bytes for _, _, _, size_bytes in views]),
        )


def _views(raw: Sequence[RawInput]) -> tuple[InputView, ...]:
    """Return `RequestTemplate.views`: inputs whose elements have a size, if the declared sizes of their data are right."""
    views: list[InputView] = []
    position = 0
    for entry in raw:
        datatype = entry.spec.datatype
        size_bytes = entry.elements * datatype.size_bytes
        if datatype is BYTES or not size_bytes or entry.size_bytes != size_bytes:
            return ()
        view: Callable[[Any, int], Array] = partial(np.ndarray, entry.shape, datatype.dtype)  # type: ignore[arg-type]
        views.append((entry.spec.name, view, position, size_bytes))
        position += size_bytes
    return tuple(views)


def _is_costly(output: RequestedOutput) -> bool:
    return not output.binary or output.spec.datatype is BYTES or bool(output.classes) or output.shared is not None


# Size of a tensor that takes as long to encode as one class: score, index and label.
_CLASS_BYTES = 32


def is_large_response(response: InferResponse, template: RequestTemplate, compressed: bool) -> bool:
    """Return True if encoding a response takes longer than the event loop can wait.

    Args:
        response: every output of the model.
        template: of the request.
        compressed: True if the response may be compressed.
    """
    size_bytes = 0
    for output in template.outputs:
        array = response.outputs.get(output.spec.name)
        if array is None:  # a response of a decoupled model may have some outputs only
            continue
        size_bytes += max(array.nbytes, array.size * tensor_codec.NUMBER_BYTES)
        if output.classes:
            size_bytes += min(output.classes * template.rows, array.size) * _CLASS_BYTES
        elif output.spec.datatype is BYTES:
            size_bytes += array.size * tensor_codec.TEXT_BYTES
            if size_bytes <= LARGE_BYTES:
                size_bytes += sum(map(len, array.reshape(-1).tolist()))
    return size_bytes > LARGE_BYTES and (template.is_costly or compressed)


class TemplateCache:
    """Cache of templates by the bytes of the header; it is bounded and cleared when it is full."""

    __slots__ = ("_templates", "find")

    def __init__(self) -> None:
        self._templates: dict[bytes, RequestTemplate] = {}
        self.find = self._templates.get

    def __len__(self) -> int:
        return len(self._templates)

    def add(self, header: bytes, template: RequestTemplate) -> None:
        """Add a template. Headers with data or a request id, and long ones, do not repeat and are not added."""
        if template.literals or template.request_id or len(header) > MAX_TEMPLATE_BYTES:
            return
        if len(self._templates) >= MAX_TEMPLATES:
            self._templates.clear()
        self._templates[header] = template


class Codec(ABC, Generic[Content, Layout, Encoded]):
    """Reads and writes the bytes of one wire format for one model version.

    Ownership: the event loop. Codec threads call `read` and `encode` too: both change caches in single steps of the interpreter.

    Args:
        spec: input and output tensor specs of the version.
        regions: shared memory of clients; None if it is disabled.
        max_shared_bytes: limit on the inputs of one request in shared memory, bytes.
    """

    def __init__(
        self, spec: ModelSpec, regions: Regions | None = None, max_shared_bytes: int = MAX_SHARED_BYTES
    ) -> None:
        self.spec = spec
        self._regions = regions
        self._factory = TemplateFactory(spec, max_shared_bytes)
        self._templates = TemplateCache()

    def decode(
        self,
        content: Content,
        layout: Layout,
        received_ns: int,
        deadline_ns: int = 0,
        client: str = "",
        parts: ReadContent | None = None,
    ) -> tuple[InferRequest, RequestTemplate]:
        """Decode a request.

        Args:
            content: the body or message; inputs are views of it.
            layout: positions of its parts, e.g. the size of the JSON header.
            received_ns, deadline_ns: arrival of the content and deadline of the transport, monotonic; deadline 0 for none.
            client: as in `InferRequest`.
            parts: result of `read`, None to read the content here.

        Returns:
            The request, and its template for `encode`.

        Raises:
            BadRequest: the request is invalid.
            NotFound, Forbidden: shared memory that does not exist or is disabled.
        """
        template, inputs, request_id = self.read(content, layout) if parts is None else parts
        if template.deadline_us:
            deadline_ns = earlier(received_ns + template.deadline_us * NS_PER_US, deadline_ns)
        shared_bytes = 0
        ranges = NO_RANGES
        if template.needs_regions:
            template, shared_bytes = template.attach(self._regions, inputs, self.spec.resident_devices)
            if template.targets:
                ranges = {
                    output.spec.name: (output.shared.region, output.shared.offset, output.shared.size_bytes)
                    for output in template.outputs
                    if output.shared is not None
                }
        request = InferRequest(
            inputs=inputs,
            rows=template.rows,
            shape_key=template.shape_key,
            received_ns=received_ns,
            id=request_id,
            priority=template.priority,
            deadline_ns=deadline_ns,
            queue_timeout_ns=template.queue_timeout_ns,
            size_bytes=len(content) + shared_bytes,
            client=client,
            outputs=template.output_names,
            parameters=template.parameters,
            resident_outputs=template.resident_outputs,
            output_ranges=ranges,
            sequence=template.sequence,
        )
        return request, template

    @abstractmethod
    def read(self, content: Content, layout: Layout) -> ReadContent:
        """Return the template of a request, its inputs outside shared memory and its id; raises BadRequest."""

    @abstractmethod
    def is_large_request(self, content: Content, layout: Layout) -> bool:
        """Return True if `read` takes longer than the event loop can wait."""

    @abstractmethod
    def encode(
        self,
        response: InferResponse,
        template: RequestTemplate,
        request_id: str = "",
        parameters: Mapping[str, int | str] | None = None,
    ) -> Encoded:
        """Encode a response.

        Args:
            response: every output of the model.
            template: of the request, from `decode`.
            request_id: of the caller, "" for none.
            parameters: of the response.

        Raises:
            BadRequest: an output cannot be encoded in the requested form, or is larger than its shared memory.
        """


def read_shared_input(
    entry: RawInput, region: Region, offset: int, devices: frozenset[int], inputs: dict[str, Array]
) -> int:
    """Add an input in shared memory to `inputs`; returns the number of bytes copied.

    Args:
        entry: the input.
        region: with its data.
        offset: of the data in the region, bytes.
        devices: numbers of the GPUs that read rows without a copy.
        inputs: receives the input, as `ResidentRows` if those GPUs can read it there.

    Raises:
        BadRequest: the range exceeds the region, or its bytes do not match the tensor.
    """
    spec, size_bytes = entry.spec, entry.size_bytes
    try:  # `named_tensor` takes 1.4 us
        if not size_bytes:
            region.check(offset, 0)
            inputs[spec.name] = np.empty(entry.shape, spec.datatype.dtype)
            return 0
        # BYTES elements must be split here, and a tensor without dimensions has no rows.
        if spec.datatype is not BYTES and entry.shape:
            rows = region.locate(offset, size_bytes, devices)
            if rows is not None:
                inputs[spec.name] = as_input(rows.as_tensor(spec.datatype.dtype, entry.shape))
                return 0
        data = region.read(offset, size_bytes)
        inputs[spec.name] = tensor_codec.from_binary(
            spec, entry.shape, entry.elements, data.view(np.uint8), 0, size_bytes
        )
    except BadRequest as error:
        raise type(error)(f"input '{spec.name}': {error}") from error
    return size_bytes


@contextmanager
def named_tensor(tensor: str) -> Iterator[None]:
    """Prefix errors of shared memory with the name of the tensor."""
    try:
        yield
    except BadRequest as error:
        raise type(error)(f"{tensor}: {error}") from error


def _clamped_us(duration_us: int) -> int:
    return duration_us if 0 < duration_us <= MAX_TIMEOUT_NS // NS_PER_US else 0
