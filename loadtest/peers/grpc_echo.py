"""The floor of a gRPC front end on grpcio: a `grpc.aio` server that answers messages with fixed bytes of the right size.

    python -m loadtest.peers.grpc_echo --port 8001 --answer-bytes 120

It parses no protobuf: a generic handler without serializers, on uvloop like Headrace. `/loadtest.Echo/Count` returns how many
messages it has answered, in decimal: a load client that never looks at `grpc-status` can be held against it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import grpc
import uvloop

from loadtest.grpc_protocol import ECHO_COUNT, MODEL_INFER, MODEL_STREAM_INFER
from loadtest.peers import port_parser

Context = grpc.aio.ServicerContext[bytes, bytes]


class GrpcEcho:
    """Answer every message with the same bytes and count.

    Args:
        answer: a message, without its length prefix.
    """

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._answered = 0

    async def infer(self, request: bytes, context: Context) -> bytes:
        """Answer ModelInfer with the fixed bytes, for any request."""
        self._answered += 1
        return self._answer

    async def stream_infer(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """ModelStreamInfer, an answer for each message."""
        async for _ in requests:
            self._answered += 1
            yield self._answer

    async def count(self, request: bytes, context: Context) -> bytes:
        """Return the number of messages answered so far, in decimal."""
        return b"%d" % self._answered

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """All methods, bytes in and bytes out."""
        methods: tuple[tuple[str, grpc.RpcMethodHandler[bytes, bytes]], ...] = (
            (MODEL_INFER, grpc.unary_unary_rpc_method_handler(self.infer)),
            (MODEL_STREAM_INFER, grpc.stream_stream_rpc_method_handler(self.stream_infer)),
            (ECHO_COUNT, grpc.unary_unary_rpc_method_handler(self.count)),
        )
        result = []
        for path, handler in methods:
            _, service, name = path.split("/")
            result.append(grpc.method_handlers_generic_handler(service, {name: handler}))
        return result


async def serve(answer: bytes, port: int) -> None:
    """Serve on the loopback address until SIGTERM."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(tuple(GrpcEcho(answer).handlers()))
    server.add_insecure_port(f"127.0.0.1:{port}")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await server.start()
    await stop.wait()
    await server.stop(grace=1.0)


def main() -> None:
    """Start from the command line."""
    parser = port_parser()
    parser.add_argument("--answer-bytes", type=int, required=True)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(b"o" * options.answer_bytes, options.port))


if __name__ == "__main__":
    main()
