"""Tensors on the data stream: arrays to tensor blocks and data, and back to views of a received frame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from headrace.core.errors import BadRequest
from headrace.core.tensor import BYTES, Array, Datatype, TensorSpec
from headrace.server.front_ends.frames import (
    INLINE,
    OUTPUT,
    REGION,
    ROOM,
    SLOT,
    SLOT_BYTES,
    Buffer,
    FrameError,
    TensorPlace,
    datatype_number,
    padding,
    parse_tensor_block,
    slot_fields,
    tensor_block,
)
from headrace.wire.requests import tensor_codec

# Tensor blocks with a cached form, for each version and direction.
_MAX_BLOCKS = 2048
# Blocks of many different shapes or of BYTES do not repeat.
_MAX_BLOCK_BYTES = 1024

_SHAPE = attrgetter("shape")


class _View(NamedTuple):
    """Arguments with which a tensor of a block is read: by NumPy's constructor, or element by element for BYTES."""

    spec: TensorSpec
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    elements: int


class BlockLayout(NamedTuple):
    """Parsed block, checked against the specs of a version.

    Attributes:
        text: of the block.
        views: one for each tensor in the frame.
        slots: tensors in the arena, with their specs.
        room: slot for the outputs, None for none.
        regions: tensors in shared memory of clients, with their specs.
        ranges: ranges for outputs in shared memory of clients, with the number of the output.
        data_bytes: size of the data.
        key: equal for blocks that differ in the place of their only tensor at most; b"" for a block that is not cached.
    """

    text: str
    views: tuple[_View, ...]
    slots: tuple[tuple[TensorSpec, TensorPlace], ...]
    room: TensorPlace | None
    regions: tuple[tuple[TensorSpec, TensorPlace], ...]
    ranges: tuple[tuple[int, TensorPlace], ...]
    data_bytes: int
    key: bytes = b""


class TensorReader:
    """Reads the tensors of one version in one direction. Ownership: the event loop.

    Args:
        specs: inputs or outputs of the version, in order.
    """

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self._specs = tuple(specs.values())
        self._layouts: dict[bytes, BlockLayout] = {}
        self._slot_layouts: dict[
            bytes, BlockLayout
        ] = {}  # of blocks with one tensor, in a slot, by all that is before its place

    def layout(self, block: bytes, is_scattered: bool = False) -> BlockLayout:
        """Parse a block, or return its cached form.

        Args:
            block: bytes of the block.
            is_scattered: the block is of a scattered group: it repeats although its tensors are in slots.

        Raises:
            FrameError: the block is invalid, or does not fit the specs.
        """
        layout = self._layouts.get(block)
        if layout is not None:
            return layout
        # The place of a tensor in a slot is at the end of a block. Everything before it is equal in further requests.
        prefix = block[:-SLOT_BYTES]
        layout = None if is_scattered else self._slot_layouts.get(prefix)
        if layout is not None:
            ((spec, tensor),) = layout.slots
            slot, generation, offset = slot_fields(block)
            place = TensorPlace(
                tensor.number, tensor.datatype, tensor.shape, tensor.size_bytes, SLOT, offset, slot, generation
            )
            return layout._replace(slots=((spec, place),))
        layout = self._parse(block)
        if len(block) <= _MAX_BLOCK_BYTES:
            if (is_scattered or not layout.slots) and layout.room is None:
                return _add(self._layouts, block, layout)
            if len(layout.slots) == 1 and not (layout.views or layout.room or layout.regions or layout.ranges):
                return _add(self._slot_layouts, prefix, layout)
        return layout

    def read(self, layout: BlockLayout, buffer: bytes, start: int, end: int) -> dict[str, Array]:
        """Return the INLINE tensors of a frame by name: views of its data, new arrays for BYTES.

        Args:
            layout: from `layout`.
            buffer, start, end: the data are `buffer[start:end]`.

        Raises:
            FrameError: the data are too short, or elements of BYTES exceed them.
        """
        if layout.data_bytes > end - start:
            raise FrameError(f"tensors of {layout.data_bytes} bytes exceed the {end - start} bytes of their frame")
        arrays: dict[str, Array] = {}
        for spec, dtype, shape, offset, size_bytes, elements in layout.views:
            if spec.datatype is BYTES:
                try:
                    arrays[spec.name] = tensor_codec.from_binary(
                        spec, shape, elements, buffer, start + offset, size_bytes
                    )
                except BadRequest as error:
                    raise FrameError(f"the elements of tensor '{spec.name}' exceed their frame: {error}") from None
            elif elements:
                arrays[spec.name] = np.ndarray(shape, dtype, buffer, start + offset)
            else:
                arrays[spec.name] = np.empty(shape, dtype)
        return arrays

    def _parse(self, block: bytes) -> BlockLayout:
        parsed = parse_tensor_block(block)
        views: list[_View] = []
        slots: list[tuple[TensorSpec, TensorPlace]] = []
        regions: list[tuple[TensorSpec, TensorPlace]] = []
        ranges: list[tuple[int, TensorPlace]] = []
        room: TensorPlace | None = None
        for tensor in parsed.tensors:
            if tensor.number == ROOM and tensor.place == SLOT:
                room = tensor
                continue
            if tensor.number & OUTPUT and tensor.place == REGION:
                ranges.append((tensor.number - OUTPUT, tensor))
                continue
            if tensor.number >= len(self._specs):
                raise FrameError(f"a tensor has number {tensor.number}, the version has {len(self._specs)} tensors")
            spec = self._specs[tensor.number]
            if tensor.datatype != datatype_number(spec.datatype.name):
                raise FrameError(f"tensor '{spec.name}' has datatype {tensor.datatype}, expected {spec.datatype}")
            if tensor.place == INLINE:
                elements = prod(tensor.shape)
                views.append(_View(spec, spec.datatype.dtype, tensor.shape, tensor.offset, tensor.size_bytes, elements))
            elif tensor.place == SLOT and spec.datatype is not BYTES:
                slots.append((spec, tensor))
            elif tensor.place == REGION and spec.datatype is not BYTES:
                regions.append((spec, tensor))
            else:
                raise FrameError(f"tensor '{spec.name}' of {spec.datatype} is in place {tensor.place}")
        return BlockLayout(
            parsed.text, tuple(views), tuple(slots), room, tuple(regions), tuple(ranges), parsed.data_bytes
        )


def _add(layouts: dict[bytes, BlockLayout], key: bytes, layout: BlockLayout) -> BlockLayout:
    if len(layouts) >= _MAX_BLOCKS:
        layouts.clear()
    layout = layouts[key] = layout._replace(key=key)
    return layout


class TensorWriter:
    """Writes tensors of one version in one direction. Ownership: the event loop.

    Args:
        specs: inputs or outputs of the version, in order.
    """

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self._places = {
            name: (index, datatype_number(spec.datatype.name), spec.datatype)
            for index, (name, spec) in enumerate(specs.items())
        }
        self._has_bytes = any(spec.datatype is BYTES for spec in specs.values())
        self._blocks: dict[object, bytes] = {}

    def write(
        self,
        requests: Sequence[Mapping[str, Array]],
        rows: int,
        text: str = "",
        slots: Sequence[TensorPlace] = (),
    ) -> tuple[bytes, list[Buffer], int]:
        """Encode the tensors of requests with equal names and row shapes, or of one request.

        Args:
            requests: arrays by name of each member.
            rows: of all members; ignored for one request, whose arrays may be of any shape.
            text: of the block.
            slots: further tensors, that are in the arena.

        Returns:
            Tensor block, parts of the data, and their size in bytes.
        """
        first = requests[0]
        data: list[Buffer] = []
        total_bytes = 0
        sizes: list[int] = []
        is_single = len(requests) == 1
        for name, array in first.items():
            datatype = self._places[name][2]
            if is_single:
                if type(array) is not np.ndarray or array.dtype != datatype.dtype:
                    array = _plain(array, datatype)
                part = tensor_codec.to_binary(array, datatype)
                data.append(part)
                size_bytes = len(part)
            else:
                members = [tensor_codec.to_binary(_plain(arrays[name], datatype), datatype) for arrays in requests]
                data += members
                size_bytes = sum(map(len, members))
            sizes.append(size_bytes)
            pad = -size_bytes & 7
            if pad:
                data.append(padding(size_bytes))
            total_bytes += size_bytes + pad
        shapes = list(map(_SHAPE, first.values()))
        if not is_single:
            shapes = [(rows, *shape[1:]) for shape in shapes]
        if self._has_bytes or slots:
            return self._block(first, shapes, sizes, text, slots), data, total_bytes
        key = (text, *first, *shapes)
        block = self._blocks.get(key)
        if block is None:
            if len(self._blocks) >= _MAX_BLOCKS:
                self._blocks.clear()
            block = self._blocks[key] = self._block(first, shapes, sizes, text)
        return block, data, total_bytes

    def place(self, name: str, array: Array, slot: int, generation: int, offset: int) -> TensorPlace:
        """Return the entry of a tensor in a slot; `offset` is that in the arena, bytes."""
        number, datatype, _ = self._places[name]
        return TensorPlace(number, datatype, array.shape, array.nbytes, SLOT, offset, slot, generation)

    def region_place(self, name: str, shape: tuple[int, ...], region: str, offset: int, size_bytes: int) -> TensorPlace:
        """Return the entry of a tensor in a region of a client; `offset` is that in the region, bytes."""
        number, datatype, _ = self._places[name]
        return TensorPlace(number, datatype, shape, size_bytes, REGION, offset, region=region)

    def region_block(self, inputs: Mapping[str, Array]) -> bytes:
        """Return the block of a group whose inputs are in regions, by those of one member."""
        key = (REGION, *[(name, array.shape) for name, array in inputs.items()])
        block = self._blocks.get(key)
        if block is None:
            if len(self._blocks) >= _MAX_BLOCKS:
                self._blocks.clear()
            places = [self.region_place(name, array.shape, "", 0, array.nbytes) for name, array in inputs.items()]
            block = self._blocks[key] = tensor_block(places)
        return block

    def _block(
        self,
        names: Iterable[str],
        shapes: Sequence[tuple[int, ...]],
        sizes: Sequence[int],
        text: str,
        slots: Sequence[TensorPlace] = (),
    ) -> bytes:
        inline = [
            TensorPlace(*self._places[name][:2], shape, size_bytes)
            for name, shape, size_bytes in zip(names, shapes, sizes, strict=True)
        ]
        return tensor_block([*inline, *slots], text)


def _plain(array: Array, datatype: Datatype) -> Array:
    if datatype is not BYTES and array.dtype != datatype.dtype:
        array = array.astype(datatype.dtype)
    return array if type(array) is np.ndarray else np.asarray(array)
