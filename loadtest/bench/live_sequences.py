"""Many live sequences over few HTTP connections: every response is compared with a sum that the client keeps."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from loadtest.bench.inprocess import WrongAnswer
from loadtest.onnx_models import onnx_model
from loadtest.protocol import HttpRequest, wire_bytes
from loadtest.servers import HOST

MODEL = "sums"
REQUESTS = 5
"""Requests of each sequence, START and END among them."""
_CONFIG = """
max_batch_size: 64
input [ { name: "X" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT64 dims: [ 1 ] } ]
sequence_batching {
  max_sequence_idle_microseconds: 600000000
  oldest { max_candidate_sequences: 10000 }
  state [ { input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_INT64 dims: [ 1 ] } ]
}
"""


def write_model(repository: Path) -> Path:
    """Write an ONNX model that returns the sum of a sequence, kept by the server; return its file."""
    shape: tuple[str | int, ...] = ("batch", 1)
    int64 = TensorProto.INT64
    nodes = [
        helper.make_node("Add", ["SUM_IN", "X"], ["SUM_OUT"]),
        helper.make_node("Identity", ["SUM_OUT"], ["Y"]),
    ]
    model = onnx_model(
        nodes, {"X": (int64, shape), "SUM_IN": (int64, shape)}, {"Y": (int64, shape), "SUM_OUT": (int64, shape)}, {}
    )
    file = repository / MODEL / "1" / "model.onnx"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(model.SerializeToString())
    (repository / MODEL / "config.pbtxt").write_text(_CONFIG)
    return file


async def begin(port: int, count: int, connections: int, seed: int) -> dict[int, int]:
    """Start sequences and send all their requests but the last; return the sum of each by id.

    Raises:
        WrongAnswer: a response is not the sum of the values of its sequence.
    """
    sums: dict[int, int] = {}
    for step in range(REQUESTS - 1):
        await _step(port, count, connections, sums, random.Random(seed + step), start=step == 0)
    return sums


async def finish(port: int, connections: int, sums: dict[int, int], seed: int) -> None:
    """End sequences; raises WrongAnswer as `begin` does."""
    await _step(port, len(sums), connections, sums, random.Random(seed), end=True)


async def _step(
    port: int,
    count: int,
    connections: int,
    sums: dict[int, int],
    choose: random.Random,
    start: bool = False,
    end: bool = False,
) -> None:
    """Send one request of each sequence, in a random order, on connections that are not those of the step before."""
    ids = list(range(1, count + 1))
    choose.shuffle(ids)
    parts = [ids[number::connections] for number in range(connections)]
    values = {each: choose.randrange(1 << 40) for each in ids}
    await asyncio.gather(*(_connection(port, part, values, sums, start, end) for part in parts))


async def _connection(
    port: int, ids: list[int], values: dict[int, int], sums: dict[int, int], start: bool, end: bool
) -> None:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        for sequence_id in ids:
            value = values[sequence_id]
            expected = value + (0 if start else sums[sequence_id])
            writer.write(_request(port, sequence_id, value, start, end))
            answer = await _response(reader)
            if answer != expected:
                raise WrongAnswer(f"sequence {sequence_id} has the sum {expected}, the server returned {answer}")
            sums[sequence_id] = expected
    finally:
        writer.close()


def _request(port: int, sequence_id: int, value: int, start: bool, end: bool) -> bytes:
    tensor = {"name": "X", "shape": [1, 1], "datatype": "INT64", "data": [value]}
    parameters = {"sequence_id": sequence_id, "sequence_start": start, "sequence_end": end}
    body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    return wire_bytes(HttpRequest(f"/v2/models/{MODEL}/infer", body), port)


async def _response(reader: asyncio.StreamReader) -> int:
    """Read a response; return its only value."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    body = await reader.readexactly(length)
    if not head.startswith(b"HTTP/1.1 200"):
        raise WrongAnswer(f"the server returned {head[:15]!r} {body[:300]!r}")
    (output,) = json.loads(body)["outputs"]
    return int(np.asarray(output["data"]).reshape(-1)[0])
