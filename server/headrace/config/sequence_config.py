"""Configuration of sequence batching: Triton's `sequence_batching`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from headrace.config.config_base import (
    ConfigPart,
    DataType,
    Dimension,
    Duration,
    Flag,
    Int32,
    Number,
    OneOf,
    PositiveCount,
    Problem,
    Text,
    option,
)
from headrace.config.tensor_config import ModelInput, ModelOutput, TensorName
from headrace.core.tensor import fits_shape

DEFAULT_IDLE_US = 1_000_000
"""Idle time of a sequence in microseconds, as in Triton."""
CORRID = "CONTROL_SEQUENCE_CORRID"
CORRID_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")


class SequenceControl(ConfigPart):
    """The meaning of a control input. All but the correlation id have a value for false and one for true, in this order."""

    kind: Annotated[
        Literal["CONTROL_SEQUENCE_START", "CONTROL_SEQUENCE_READY", "CONTROL_SEQUENCE_END", "CONTROL_SEQUENCE_CORRID"],
        OneOf("CONTROL_SEQUENCE_"),
    ] = option(
        "CONTROL_SEQUENCE_START",
        "START and END: first and last request of a sequence. READY: the row has a request. CORRID: the correlation id.",
    )
    int32_false_true: tuple[Int32, ...] = option((), "The two values of an INT32 input.")
    fp32_false_true: tuple[Number, ...] = option((), "The two values of an FP32 input.")
    bool_false_true: tuple[Flag, ...] = option((), "The two values of a BOOL input.")
    data_type: DataType = option("", "Element type of the correlation id.")

    @property
    def values(self) -> Mapping[str, tuple[float, ...]]:
        """The values by data type, of the fields that are set."""
        values: dict[str, tuple[float, ...]] = {
            "TYPE_INT32": self.int32_false_true,
            "TYPE_FP32": self.fp32_false_true,
            "TYPE_BOOL": self.bool_false_true,
        }
        return {data_type: pair for data_type, pair in values.items() if pair}

    @property
    def tensor_type(self) -> str:
        """Data type of the input."""
        return self.data_type if self.kind == CORRID else next(iter(self.values))

    def _problems(self) -> Iterator[Problem]:
        values = self.values
        if self.kind == CORRID:
            if values:
                yield Problem((), f"{CORRID} has values for false and true", "remove them, and write data_type")
            if self.data_type not in CORRID_TYPES:
                message = f"{CORRID} has the data type {self.data_type or 'none'}"
                yield Problem(("data_type",), message, f"write one of {', '.join(CORRID_TYPES)}")
            return
        if len(values) != 1:
            fields = "int32_false_true, fp32_false_true or bool_false_true"
            message = f"{self.kind} has {len(values) or 'no'} pairs of values, one is allowed"
            yield Problem((), message, f"write exactly one of {fields}, e.g. int32_false_true: [0, 1]")
        for pair in values.values():
            if len(pair) != 2:
                yield Problem(
                    (), f"{self.kind} has {len(pair)} values", "write two: that for false, then that for true"
                )
        if self.data_type:
            cure = "remove it: the pair of values has the type"
            yield Problem(("data_type",), f"data_type is for {CORRID}, not for {self.kind}", cure)


class ControlInput(ConfigPart):
    """An input of the model that the server fills; clients do not send it."""

    name: TensorName = Field(description="Name of the model's input, of shape [1] for each row.")
    control: tuple[SequenceControl, ...] = option((), "The meaning of the input; exactly one.")

    def _problems(self) -> Iterator[Problem]:
        if len(self.control) != 1:
            message = f'control_input "{self.name}" has {len(self.control) or "no"} controls, one is allowed'
            yield Problem(("control",), message, "write one control, and a control_input for each further one")


class InitialState(ConfigPart):
    """Value of a state at the START of a sequence."""

    name: Text = option("", "Informative only.")
    data_type: DataType = option("", "Element type; that of the state.")
    dims: tuple[Dimension, ...] = option((), "Shape without the batch dimension, without free sizes.")
    zero_data: Flag = option(False, "Use zeros, or empty texts, as without `initial_state`.")
    data_file: Text = option("", "Use the raw values of this file in the folder `initial_state/` of the model.")

    def _problems(self) -> Iterator[Problem]:
        if self.zero_data == bool(self.data_file):
            message = f"initial_state has {'two kinds of' if self.zero_data else 'no'} data"
            yield Problem((), message, "write exactly one of zero_data: true, data_file")


class SequenceState(ConfigPart):
    """A state that the server keeps for each sequence: an output of the model that is an input of the next request."""

    input_name: TensorName = Field(description="Name of the model's input.")
    output_name: TensorName = Field(description="Name of the model's output.")
    data_type: DataType = option("", "Element type of both.")
    dims: tuple[Dimension, ...] = option(
        (),
        "Shape of both without the batch dimension; -1 is any size, which may differ from request to request, and is 1 at "
        "START without `initial_state`.",
    )
    initial_state: tuple[InitialState, ...] = option((), "Value at START, at most one; zeros without it.")
    use_same_buffer_for_input_output: Flag = option(
        False, "Accepted; the state before a request is kept until the model has returned the next one, in any case."
    )
    use_growable_memory: Flag = option(
        False,
        "Accepted, with `use_same_buffer_for_input_output`; the memory of a state with free sizes grows in any case.",
    )

    @property
    def initial_dims(self) -> tuple[int, ...]:
        """Shape at START, without the batch dimension."""
        return self.initial_state[0].dims if self.initial_state else tuple(max(size, 1) for size in self.dims)

    def _problems(self) -> Iterator[Problem]:
        if not self.data_type:
            yield Problem(("data_type",), f'state "{self.input_name}" has no data_type', "write that of the model")
        if self.use_growable_memory and not self.use_same_buffer_for_input_output:
            message = f'state "{self.input_name}" has use_growable_memory without use_same_buffer_for_input_output'
            yield Problem(("use_growable_memory",), message, "write both, or none")
        if len(self.initial_state) > 1:
            message = f'state "{self.input_name}" has {len(self.initial_state)} initial states, one is allowed'
            yield Problem(("initial_state",), message, "remove the others")
        for initial in self.initial_state[:1]:
            yield from self._initial_problems(initial)

    def _initial_problems(self, initial: InitialState) -> Iterator[Problem]:
        loc: tuple[str | int, ...] = ("initial_state", 0)
        if initial.data_type != self.data_type:
            message = (
                f"initial_state is {initial.data_type or 'without data_type'}, its state is {self.data_type or 'none'}"
            )
            yield Problem((*loc, "data_type"), message, "write the data_type of the state")
        dims = initial.dims
        if -1 in dims:
            message = f"dims {list(dims)} of initial_state leave a size open"
            yield Problem((*loc, "dims"), message, "write every size")
        elif not fits_shape(dims, self.dims):
            message = f"dims {list(dims)} of initial_state do not match those of the state: {list(self.dims)}"
            yield Problem((*loc, "dims"), message, "leave out the batch dimension, and repeat every fixed size")


class DirectStrategy(ConfigPart):
    """Each sequence has a row of the batch for itself: the number of its slot. There are `max_batch_size` slots."""

    max_queue_delay_microseconds: Duration = option(
        0, "Maximum delay of a batch, in microseconds. No effect if `minimum_slot_utilization` is 0, as in Triton."
    )
    minimum_slot_utilization: Annotated[float, Field(strict=True, ge=0, le=1)] = option(
        0.0, "Share of the slots with a request, from 0 to 1, from which a batch runs without further delay."
    )


class OldestStrategy(ConfigPart):
    """Batches have the oldest requests of the sequences with a slot; a sequence has no fixed row."""

    max_candidate_sequences: PositiveCount = option(1, "Slots of each instance.")
    preferred_batch_size: tuple[PositiveCount, ...] = option((), "Batch sizes that run without further delay.")
    max_queue_delay_microseconds: Duration = option(0, "Maximum delay of the oldest request, in microseconds.")
    preserve_ordering: Flag = option(
        False, "Responses of an instance in the order of its batches, which is so in any case."
    )


class SequenceBatching(ConfigPart):
    """Requests belong to sequences. Those of a sequence run in order, on one slot of one instance."""

    max_sequence_idle_microseconds: Duration = option(
        0, "Time without a request after which a sequence ends, in microseconds. 0: 1000000, as in Triton."
    )
    control_input: tuple[ControlInput, ...] = option((), "Inputs of the model that the server fills.")
    iterative_sequence: Flag = option(
        False, "Each request is a sequence, and the code of a Python model may schedule it again, step by step."
    )
    direct: DirectStrategy | None = option(None, "The strategy direct, which is the default.")
    oldest: OldestStrategy | None = option(None, "The strategy oldest.")
    state: tuple[SequenceState, ...] = option((), "States that the server keeps between the requests of a sequence.")

    def _problems(self) -> Iterator[Problem]:
        if self.direct is not None and self.oldest is not None:
            yield Problem(("oldest",), "direct and oldest are two strategies, one is allowed", "remove one of them")
        kinds: set[str] = set()
        names: set[str] = set()
        for index, part in enumerate(self.control_input):
            kind = part.control[0].kind
            loc = ("control_input", index)
            if part.name in names:
                yield Problem((*loc, "name"), f'control_input "{part.name}" is listed twice', "remove one of them")
            if kind in kinds:
                yield Problem((*loc, "control"), f"two control inputs are {kind}, one is allowed", "remove one of them")
            kinds.add(kind)
            names.add(part.name)
        yield from self._state_problems(names)

    def _state_problems(self, names: set[str]) -> Iterator[Problem]:
        """Return the problems of states with each other, and with the control inputs `names`."""
        inputs, outputs = set(names), set[str]()
        for index, state in enumerate(self.state):
            for field, name, earlier in (
                ("input_name", state.input_name, inputs),
                ("output_name", state.output_name, outputs),
            ):
                if name in earlier:
                    message = f'{field} "{name}" of a state is the tensor of another state or control_input'
                    yield Problem(("state", index, field), message, "give each its own tensor of the model")
                earlier.add(name)


def sequence_problems(
    sequences: SequenceBatching | None,
    inputs: tuple[ModelInput, ...],
    others: Mapping[str, bool],
    max_batch: int | None,
) -> Iterator[Problem]:
    """Check `sequence_batching` against other fields.

    Args:
        sequences: None without sequences.
        inputs: of the configuration.
        others: fields that do not go with sequences, and whether the configuration has them.
        max_batch: `max_batch_size`; None if the configuration does not have it.
    """
    if sequences is None:
        return
    for field, is_set in others.items():
        if is_set:
            yield Problem((field,), f"{field} does not go with sequence_batching", "remove one of them")
    names = {tensor.name for tensor in inputs}
    loc: tuple[str | int, ...]
    for index, part in enumerate(sequences.control_input):
        if part.name in names:
            message = f'control_input "{part.name}" is an input that requests have'
            loc = ("sequence_batching", "control_input", index, "name")
            yield Problem(loc, message, "remove it from input: the server fills it")
    for index, state in enumerate(sequences.state):
        if state.input_name in names:
            message = f'state "{state.input_name}" is an input that requests have'
            loc = ("sequence_batching", "state", index, "input_name")
            yield Problem(loc, message, "remove it from input: the server fills it")
    for index, rows in enumerate(() if sequences.oldest is None else sequences.oldest.preferred_batch_size):
        if max_batch is not None and rows > max_batch:
            loc = ("sequence_batching", "oldest", "preferred_batch_size", index)
            message = f"preferred_batch_size {rows} is more than max_batch_size {max_batch}"
            yield Problem(loc, message, "raise max_batch_size, or remove the size")


def control_inputs(sequences: SequenceBatching | None) -> tuple[ModelInput, ...]:
    """Return the inputs of the model that the server fills, as inputs of shape [1]; () without sequences."""
    if sequences is None:
        return ()
    return tuple(
        ModelInput(name=part.name, data_type=part.control[0].tensor_type, dims=(1,)) for part in sequences.control_input
    )


def state_tensors(sequences: SequenceBatching | None) -> tuple[tuple[ModelInput, ...], tuple[ModelOutput, ...]]:
    """Return the inputs and the outputs of the model that are states; () each without sequences."""
    states = () if sequences is None else sequences.state
    return (
        tuple(ModelInput(name=state.input_name, data_type=state.data_type, dims=state.dims) for state in states),
        tuple(ModelOutput(name=state.output_name, data_type=state.data_type, dims=state.dims) for state in states),
    )
