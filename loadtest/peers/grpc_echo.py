"""The floor of a gRPC front end on grpcio: a `grpc.aio` server that answers ModelInfer with fixed bytes of the right size.

    python -m loadtest.peers.grpc_echo --port 8001 --answer-bytes 120

It parses no protobuf: a generic handler without serializers, on uvloop like Headrace.
"""

from __future__ import annotations

import asyncio
import signal

import grpc
import uvloop

from loadtest.grpc_protocol import MODEL_INFER
from loadtest.peers import port_parser


async def serve(answer: bytes, port: int) -> None:
    """Serve on the loopback address until SIGTERM."""

    async def infer(_request: bytes, _context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return answer

    _, service, name = MODEL_INFER.split("/")
    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(infer)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))
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
