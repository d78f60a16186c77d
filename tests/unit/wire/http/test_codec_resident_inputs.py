"""Inputs in shared memory that a GPU reads by itself: the codecs only say where they lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from headrace.core.tensor import NOWHERE, PINNED, is_resident

from tests.support.resident_rows import read
from tests.unit.wire.http.test_codec_shared_memory import (
    N_WIRE,
    SPEC,
    FakeRegion,
    FakeRegions,
    N,
    Side,
    X,
    both,
    shared_input,
)


@both
def test_inputs_that_a_gpu_reads_are_only_located(side: Side) -> None:
    region = FakeRegion(64)
    region.memory[32 : 32 + len(N_WIRE)] = N_WIRE
    region.array = np.arange(64).astype(np.uint8)
    one = side(FakeRegions(r=region), replace(SPEC, resident_devices=frozenset({0})))
    for offset, device in ((16, PINNED), (18, NOWHERE)):  # NOWHERE: what is not aligned to its datatype
        request, _ = one.decode(
            [shared_input(side, "X", "r", 8, offset), shared_input(side, "N", "r", len(N_WIRE), 32)]
        )
        rows: object = request.inputs["X"]
        assert is_resident(rows)
        assert (rows.device, rows.dtype, rows.shape) == (device, np.float32, (1, 2))
        assert read(rows).tobytes() == bytes(range(offset, offset + 8))
        # Text is taken apart here; what is only located takes no memory of ours while it waits.
        assert request.inputs["N"].tolist() == N.tolist()
        assert request.size_bytes == one.size_bytes + len(N_WIRE)
    assert region.reads == 2


@both
def test_inputs_are_copied_for_other_devices_and_unlocatable_memory(side: Side) -> None:
    region = FakeRegion(8)
    region.memory[:] = X.tobytes()
    for array, devices in ((np.zeros(8, np.uint8), frozenset[int]()), (None, frozenset({0}))):
        region.array = array
        request, _ = side(FakeRegions(r=region), replace(SPEC, resident_devices=devices)).decode(
            [shared_input(side, "X", "r", 8)]
        )
        assert request.inputs["X"].tolist() == X.tolist()
    assert region.reads == 2
