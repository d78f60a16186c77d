"""What the requests of one stream hold of the room for bodies."""

from __future__ import annotations

import asyncio

from server.core.errors import ModelFailed
from server.core.limits import Door, Limits
from server.frontends.grpc_infer import InferService
from server.frontends.grpc_stream import InferStreams
from tests.protocol.test_grpc_service import Model, Streaming, message, run, until


def test_what_a_stream_holds_is_given_back_request_by_request() -> None:
    async def test() -> None:
        size = len(message("a"))
        door = Door(Limits(max_body_bytes=size, max_total_body_bytes=2 * size))
        model, call = Model(), Streaming(door)
        service = InferService(model.services(), 1 << 20)
        serving = asyncio.ensure_future(InferStreams(service, max_bytes=1 << 20).serve(call))  # type: ignore[arg-type]
        for asked in (b"\xff", message("x", "gone"), message("a"), message("b"), message("c")):
            call.sent.put_nowait(asked)
        await until(lambda: len(call.got) == 3)
        told = {response.infer_response.id: response.error_message for response in call.got}
        assert told.keys() == {"", "x", "c"}
        assert "together" in told["c"]
        assert (door.bodies.held_bytes, door.hits["max_total_body_bytes"]) == (2 * size, 1)
        assert model.accounts.failures[-1].reason == "overloaded"
        model.answer()
        await until(lambda: len(call.got) == 4)
        assert door.bodies.held_bytes == size
        model.answer(outcome=ModelFailed("broke"))
        call.sent.put_nowait(None)
        await serving
        assert (door.bodies.held_bytes, model.leases) == (0, 0)

    run(test)
