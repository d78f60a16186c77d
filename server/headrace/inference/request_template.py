"""What a request says of itself, held against the model; the same for every protocol.

A codec reads its own wire format into names, shapes and parameters and hands them to a `Draft`; out comes a `Plan`, which can
be kept for every request that says the same. Triton's shared memory extension is here too: a plan knows where in which region a
tensor lies, the region itself is looked up anew for every request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from headrace.core.clock import NS_PER_US
from headrace.core.errors import BadRequest, Forbidden, TooLarge
from headrace.core.tensor import BYTES, Array, ModelSpec, TensorSpec, as_input
from headrace.inference import tensor_codec
from headrace.inference.models import Region, Regions
from headrace.inference.request_options import MAX_TIMEOUT_NS, earlier
from headrace.inference.request_parameters import (
    DEADLINE_PARAMETER,
    TIMING_PARAMETER,
    UNORDERED_PARAMETER,
    SharedRange,
    flag,
    integer,
    tensor_parameters,
)

_MAX_PRIORITY = 2**31
# Requests repeat what they say of themselves; this many plans are kept for a model version.
MAX_PLANS = 256
MAX_PLAN_BYTES = 4096
# Of one request, read out of shared memory: a few bytes can name gigabytes of it.
MAX_SHARED_BYTES = 128 << 20


class WantedOutput(msgspec.Struct, frozen=True, eq=False):
    """How one output goes back.

    Attributes:
        spec: of the output.
        binary: behind the JSON header instead of in it (HTTP; gRPC has nothing else).
        classes: the number of best classes to send instead of the tensor, 0 for the tensor.
        shared: where to write it instead of sending it, None to send it.
    """

    spec: TensorSpec
    binary: bool
    classes: int
    shared: SharedRange | None = None


class RawInput(msgspec.Struct, frozen=True, eq=False):
    """An input in the binary form: everything about it is checked but its data.

    Attributes:
        spec: of the input.
        shape: as declared.
        elements: product of the shape.
        size_bytes: as declared (HTTP, shared memory); 0 where the data come with their own size (gRPC).
        shared: where the data lie if not in the message.
    """

    spec: TensorSpec
    shape: tuple[int, ...]
    elements: int
    size_bytes: int = 0
    shared: SharedRange | None = None


class Plan(msgspec.Struct, frozen=True, eq=False):
    """What a request says of itself, checked; reusable for every request that says the same.

    Attributes:
        raw: binary inputs in the order of their data in the message.
        given: inputs whose data came with what the request says (JSON, typed contents).
        shared: inputs whose data lie in shared memory.
        rows, shape_key: as in `InferRequest`.
        wanted: the outputs to send.
        needs_regions: True if inputs or outputs are in shared memory: `attach` comes before the request is queued.
        targets: the regions to write outputs to, by output; empty until `attach`, and in every plan that is kept.
        request_id, priority: as the request says.
        queue_timeout_ns: Triton's parameter `timeout`; see `InferRequest`.
        deadline_us: the request's own deadline, microseconds after its arrival, 0 for none.
        timing: the answer is to tell where its time has gone.
        unordered: in a stream, the answer may overtake those of earlier requests.
    """

    raw: tuple[RawInput, ...]
    given: dict[str, Array]
    shared: tuple[RawInput, ...]
    rows: int
    shape_key: object
    wanted: tuple[WantedOutput, ...]
    needs_regions: bool
    request_id: str
    priority: int
    queue_timeout_ns: int = 0
    deadline_us: int = 0
    timing: bool = False
    unordered: bool = False
    targets: dict[str, Region] = {}

    def deadline_ns(self, received_ns: int, transport_ns: int = 0) -> int:
        """The earlier of the request's own deadline and the transport's, monotonic; 0 for none."""
        return earlier(received_ns + self.deadline_us * NS_PER_US if self.deadline_us else 0, transport_ns)

    def attach(self, regions: Regions | None, inputs: dict[str, Array], devices: frozenset[int]) -> tuple[Plan, int]:
        """Look up the shared memory of one request: read or locate its inputs, find and check where its outputs will go.

        Args:
            regions: all there are; None if shared memory is off.
            inputs: receives the inputs that lie in shared memory; as `ResidentRows` where a GPU can read them.
            devices: numbers of the GPUs that do (`ModelSpec.resident_devices`).

        Returns:
            The plan for this one request, and how many bytes were read.

        Raises:
            Forbidden: shared memory is off.
            NotFound: no such region.
            BadRequest: a range does not lie in its region, or its bytes are not the tensor.
        """
        if regions is None:
            raise Forbidden("shared memory is off: start the server with --allow-client-shm")
        targets: dict[str, Region] = {}
        for wanted in self.wanted:
            if wanted.shared is not None:
                name = wanted.spec.name
                targets[name] = regions.find(wanted.shared.region)
                with _named(f"output '{name}'"):
                    targets[name].check(wanted.shared.offset, wanted.shared.size_bytes)
        size_bytes = 0
        for piece in self.shared:
            assert piece.shared is not None
            region = regions.find(piece.shared.region)
            with _named(f"input '{piece.spec.name}'"):
                size_bytes += _take(piece, region, piece.shared.offset, devices, inputs)
        return msgspec.structs.replace(self, targets=targets), size_bytes

    def write(self, wanted: WantedOutput, data: bytes | memoryview) -> dict[str, str | int]:
        """Write an output to the shared memory that it is wanted in; what the answer says instead of the data.

        Args:
            wanted: one of `self.wanted` with a `shared`.
            data: the tensor's bytes.

        Raises:
            BadRequest: the data are larger than the range, or the memory is gone.
        """
        where, name = wanted.shared, wanted.spec.name
        assert where is not None
        if len(data) > where.size_bytes:
            raise BadRequest(
                f"output '{name}' has {len(data)} bytes, its shared_memory_byte_size is only {where.size_bytes}"
            )
        with _named(f"output '{name}'"):
            self.targets[name].write(where.offset, data)
        return {
            "shared_memory_region": where.region,
            "shared_memory_offset": where.offset,
            "shared_memory_byte_size": len(data),
        }


class PlanMaker:
    """Makes the plans for one model version.

    Args:
        spec: of the version.
        max_shared_bytes: of the inputs of one request in shared memory.
    """

    def __init__(self, spec: ModelSpec, max_shared_bytes: int) -> None:
        self.spec = spec
        self.max_shared_bytes = max_shared_bytes
        self.one_shape = all(
            not tensor.optional and -1 not in tensor.shape[1 if spec.max_batch_size else 0 :]
            for tensor in spec.inputs.values()
        )
        self.all_binary = tuple(WantedOutput(tensor, True, 0) for tensor in spec.outputs.values())
        self.all_json = tuple(WantedOutput(tensor, False, 0) for tensor in spec.outputs.values())

    def wanted(self, outputs: Iterable[tuple[str, Mapping[str, Any]]], binary: bool) -> tuple[WantedOutput, ...]:
        """The outputs to send, or to write to shared memory.

        Args:
            outputs: names and parameters as asked for; none for all outputs.
            binary: the form where an output does not say.

        Raises:
            BadRequest: an unknown or repeated output, or parameters it does not take.
        """
        wanted: dict[str, WantedOutput] = {}
        for name, parameters in outputs:
            spec = self.spec.outputs.get(name)
            if spec is None:
                raise BadRequest(
                    f"model '{self.spec.name}' has no output {name[:128]!r}; its outputs are {list(self.spec.outputs)}"
                )
            if name in wanted:
                raise BadRequest(f"output '{name}' is asked for twice")
            shared = tensor_parameters(parameters, "output", name) if parameters else None
            classes = integer(parameters, "classification")
            if classes < 0:
                raise BadRequest(f"output '{name}': classification must be at least 1, not {classes}")
            if shared is not None and classes:
                raise BadRequest(f"output '{name}': classification cannot go to shared memory, leave one of them out")
            wanted[name] = WantedOutput(spec, flag(parameters, "binary_data", binary), classes, shared)
        if not wanted:
            return self.all_binary if binary else self.all_json
        return tuple(wanted.values())


class Draft:
    """A plan in the making: the inputs of one request one after the other, then the rest."""

    __slots__ = ("_given", "_maker", "_raw", "_shapes", "_shared", "_shared_bytes")

    def __init__(self, maker: PlanMaker) -> None:
        self._maker = maker
        self._raw: list[RawInput] = []
        self._given: dict[str, Array] = {}
        self._shared: list[RawInput] = []
        self._shared_bytes = 0
        self._shapes: dict[str, tuple[int, ...]] = {}

    def declare(self, name: str, datatype: str, shape: Sequence[int]) -> RawInput:
        """Hold an input's name, datatype and shape against the model; to be followed by one of the `add_` methods.

        Raises:
            BadRequest: says what came and what was expected.
        """
        model = self._maker.spec
        spec = model.inputs.get(name)
        if spec is None:
            raise BadRequest(f"model '{model.name}' has no input {name[:128]!r}; its inputs are {list(model.inputs)}")
        if name in self._shapes:
            raise BadRequest(f"input '{name}' is there twice")
        if datatype != spec.datatype.name:
            raise BadRequest(f"input '{name}' has datatype {datatype[:32]!r}, expected {spec.datatype}")
        elements = tensor_codec.check_shape(spec, shape, model)
        checked = self._shapes[name] = tuple(shape)
        return RawInput(spec, checked, elements)

    def add_raw(self, piece: RawInput, size_bytes: int) -> None:
        """Its data will come in the message; `size_bytes` as in `RawInput`."""
        self._raw.append(RawInput(piece.spec, piece.shape, piece.elements, size_bytes))

    def add_given(self, piece: RawInput, array: Array) -> None:
        """Its data are here."""
        self._given[piece.spec.name] = array

    def add_shared(self, piece: RawInput, where: SharedRange) -> None:
        """Its data lie in shared memory.

        Raises:
            BadRequest: the range has another size than the tensor.
            TooLarge: the request's inputs in shared memory are too many bytes.
        """
        tensor_codec.check_size(piece.spec, piece.shape, piece.elements, where.size_bytes)
        self._shared_bytes += where.size_bytes
        limit = self._maker.max_shared_bytes
        if self._shared_bytes > limit:
            raise TooLarge(f"the inputs in shared memory have {self._shared_bytes} bytes, at most {limit} are read")
        self._shared.append(RawInput(piece.spec, piece.shape, piece.elements, where.size_bytes, where))

    def finish(
        self,
        outputs: Iterable[tuple[str, Mapping[str, Any]]],
        binary: bool,
        parameters: Mapping[str, Any],
        request_id: str,
    ) -> Plan:
        """The plan, once all inputs are in.

        Args:
            outputs, binary: as in `PlanMaker.wanted`.
            parameters: of the request.
            request_id: the caller's own; "" where it is not part of the plan.

        Raises:
            BadRequest: inputs are missing or differ in rows, or what `PlanMaker.wanted` raises, or a parameter has a value
                it does not take.
        """
        rows = self._rows()
        wanted = self._maker.wanted(outputs, binary)
        return Plan(
            raw=tuple(self._raw),
            given=self._given,
            shared=tuple(self._shared),
            rows=rows,
            shape_key=None if self._maker.one_shape else self._shape_key(),
            wanted=wanted,
            needs_regions=bool(self._shared) or any(output.shared for output in wanted),
            request_id=request_id,
            priority=min(max(integer(parameters, "priority"), 0), _MAX_PRIORITY),
            queue_timeout_ns=_clamped_us(integer(parameters, "timeout")) * NS_PER_US,
            deadline_us=_clamped_us(integer(parameters, DEADLINE_PARAMETER)),
            timing=flag(parameters, TIMING_PARAMETER),
            unordered=flag(parameters, UNORDERED_PARAMETER),
        )

    def _rows(self) -> int:
        """The number of rows, the same for all inputs; 1 for a model without a batch dimension.

        Raises:
            BadRequest: inputs are missing, or differ in rows.
        """
        model, shapes = self._maker.spec, self._shapes
        missing = [name for name, spec in model.inputs.items() if name not in shapes and not spec.optional]
        if missing:
            raise BadRequest(f"model '{model.name}' needs the inputs {missing}, which are not there")
        if not model.max_batch_size:
            return 1
        rows = {shape[0] for shape in shapes.values()}
        if len(rows) != 1:
            sizes = {name: shape[0] for name, shape in shapes.items()}
            raise BadRequest(f"the inputs must have the same number of rows (first dimension), they have {sizes}")
        return rows.pop()

    def _shape_key(self) -> object:
        model, shapes = self._maker.spec, self._shapes
        start = 1 if model.max_batch_size else 0
        return tuple((name, shapes[name][start:]) for name in model.inputs if name in shapes)


class PlanCache:
    """Plans by what was said, byte for byte; bounded, and emptied when it is full."""

    __slots__ = ("_plans", "find")

    def __init__(self) -> None:
        self._plans: dict[bytes, Plan] = {}
        self.find = self._plans.get

    def __len__(self) -> int:
        return len(self._plans)

    def keep(self, header: bytes, plan: Plan) -> None:
        """Keep a plan, unless it holds data or the caller's id, or its header is long: such do not come again."""
        if plan.given or plan.request_id or len(header) > MAX_PLAN_BYTES:
            return
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[header] = plan


def _take(piece: RawInput, region: Region, offset: int, devices: frozenset[int], inputs: dict[str, Array]) -> int:
    """Put an input that lies in shared memory into `inputs`; how many bytes were read."""
    spec, size_bytes = piece.spec, piece.size_bytes
    if not size_bytes:
        region.check(offset, 0)
        inputs[spec.name] = np.empty(piece.shape, spec.datatype.dtype)
        return 0
    # Text is taken apart here, and what has no dimensions has no rows.
    if spec.datatype is not BYTES and piece.shape:
        rows = region.locate(offset, size_bytes, devices)
        if rows is not None:
            inputs[spec.name] = as_input(rows.as_tensor(spec.datatype.dtype, piece.shape))
            return 0
    data = region.read(offset, size_bytes)
    inputs[spec.name] = tensor_codec.from_binary(spec, piece.shape, piece.elements, data.view(np.uint8), 0, size_bytes)
    return size_bytes


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say which tensor it is that shared memory refuses."""
    try:
        yield
    except BadRequest as error:
        raise type(error)(f"{what}: {error}") from error


def _clamped_us(duration_us: int) -> int:
    return duration_us if 0 < duration_us <= MAX_TIMEOUT_NS // NS_PER_US else 0
