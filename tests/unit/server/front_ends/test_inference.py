"""Models that a front end serves, from the engine's table."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import uvloop
from headrace.core.tensor import BY_NAME, ModelSpec, TensorSpec
from headrace.server.front_ends.inference import ServedModels, StreamForwarder
from headrace.server.front_ends.remote_models import RemoteModels
from headrace.server.front_ends.version_table import VersionRow, encode_table
from headrace.wire.grpc.codec import scan

from tests.support.grpc_requests import message


def test_requests_of_decoupled_models_are_passed_on_without_an_order() -> None:
    tensors = {"X": TensorSpec("X", BY_NAME["FP32"], (-1, 4))}

    async def run() -> None:
        served, absent = ServedModels(), cast(Any, None)
        served.current = RemoteModels(asyncio.get_running_loop())
        served.current.is_attached = True
        rows = []
        for number, is_decoupled in enumerate((False, True), 1):
            spec = ModelSpec(f"m{number}", "1", "onnx", tensors, tensors, 8, decoupled=is_decoupled)
            rows.append(VersionRow(spec, number, ("", "1"), has_details=False))
        served.apply_table(encode_table(rows))
        forwarder = StreamForwarder(served, absent, "")
        x = np.ones((1, 4), np.float32)
        decided = [
            (forwarder.takes(each), forwarder.is_unordered(each))
            for each in (scan(message(name, "", x)) for name in ("m1", "m2", "m3"))
        ]
        assert decided == [(False, False), (True, True), (True, False)]
        assert not served.serves("m2", ""), "over HTTP too"

    uvloop.run(run())
