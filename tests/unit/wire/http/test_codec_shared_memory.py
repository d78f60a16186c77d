"""Tensors in shared memory, over both protocols, as Triton's clients send them; the memory itself is a fake."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from headrace.core.errors import BadRequest, Forbidden, NotFound, TooLarge
from headrace.core.request import InferRequest, InferResponse
from headrace.core.tensor import BYTES, FP32, Array, ModelSpec, ResidentRows, TensorSpec
from headrace.wire.grpc.codec import GrpcCodec, scan
from headrace.wire.http.codec import ModelCodec
from headrace.wire.requests.request_template import RequestTemplate
from headrace.wire.requests.service import InferenceService
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc._utils import _get_inference_request
from tritonclient.utils import serialize_byte_tensor

from tests.support.resident_rows import resident

SPEC = ModelSpec(
    "m",
    "1",
    "test",
    {"X": TensorSpec("X", FP32, (-1, 2)), "N": TensorSpec("N", BYTES, (-1, 1), optional=True)},
    {"Y": TensorSpec("Y", FP32, (-1, 2)), "M": TensorSpec("M", BYTES, (-1, 1))},
    8,
)
X = np.array([[1, 2]], "<f4")
N = np.array([[b"n\xffme"]], object)
N_WIRE = serialize_byte_tensor(N).item()


class FakeRegion:
    gpu: int | None = None

    def __init__(self, size_bytes: int) -> None:
        self.memory = bytearray(size_bytes)
        self.reads = 0
        self.array: Array | None = None  # what lies in pinned memory

    def check(self, offset: int, size_bytes: int) -> None:
        if offset < 0 or size_bytes < 0 or offset + size_bytes > len(self.memory):
            raise BadRequest(f"{offset} and {size_bytes} do not lie in the region")

    def locate(self, offset: int, size_bytes: int, devices: frozenset[int]) -> ResidentRows | None:
        self.check(offset, size_bytes)
        return resident(self.array)[offset : offset + size_bytes] if devices and self.array is not None else None

    def read(self, offset: int, size_bytes: int) -> Array:
        self.check(offset, size_bytes)
        self.reads += 1
        return np.frombuffer(bytes(self.memory[offset : offset + size_bytes]), np.uint8)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        self.check(offset, len(data))
        self.memory[offset : offset + len(data)] = data


class FakeGpuRegion(FakeRegion):
    gpu = 0

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.copied_rows = 0

    def write_rows(self, offset: int, rows: ResidentRows) -> None:
        self.copied_rows += 1
        self.write(offset, np.asarray(rows).tobytes())


class FakeRegions:
    """Only what the codecs use."""

    def __init__(self, **regions: FakeRegion) -> None:
        self.regions = regions

    def find(self, name: str) -> FakeRegion:
        if name not in self.regions:
            raise NotFound(f"no region '{name}'")
        return self.regions[name]

    def register_system(self, name: str, key: str, offset: int, size_bytes: int) -> None:
        raise AssertionError

    def register_cuda(self, name: str, handle: bytes, device: int, size_bytes: int) -> None:
        raise AssertionError

    def unregister(self, kind: str, name: str) -> None:
        raise AssertionError

    def status(self, kind: str, name: str) -> list[dict[str, object]]:
        raise AssertionError


class Http:
    """One codec, and Triton's client before and behind it."""

    client = triton_http
    result: Any = triton_http.InferResult

    def __init__(self, regions: FakeRegions | None, spec: ModelSpec = SPEC, **options: Any) -> None:
        self.codec = ModelCodec(spec, regions, **options)

    def decode(
        self, inputs: Sequence[Any], outputs: Sequence[Any] | None = None
    ) -> tuple[InferRequest, RequestTemplate]:
        body, size = triton_http.InferenceServerClient.generate_request_body(inputs, outputs=outputs)
        self.size_bytes = len(body)
        return self.codec.decode(body, size, 1)

    def answer(self, plan: RequestTemplate, response: InferResponse) -> Any:
        size, parts = self.codec.encode(response, plan)
        return triton_http.InferResult.from_response_body(b"".join(parts), header_length=size)

    def parameters(self, result: Any, name: str) -> dict[str, object]:
        output = result.get_output(name)
        assert "data" not in output
        return dict(output.get("parameters", {}))


class Grpc:
    client = triton_grpc

    def __init__(self, regions: FakeRegions | None, spec: ModelSpec = SPEC, **options: Any) -> None:
        self.codec = GrpcCodec(spec, regions, **options)

    def decode(
        self, inputs: Sequence[Any], outputs: Sequence[Any] | None = None
    ) -> tuple[InferRequest, RequestTemplate]:
        message = _get_inference_request("m", inputs, "", "", outputs, 0, False, False, 0, None, None)
        wire = message.SerializeToString()
        self.size_bytes = len(wire)
        return self.codec.decode(wire, scan(wire), 1)

    def answer(self, plan: RequestTemplate, response: InferResponse) -> Any:
        wire = b"".join(self.codec.encode(response, plan, ""))
        message = pb.ModelInferResponse.FromString(wire)
        assert len(message.raw_output_contents) == len(message.outputs)
        return triton_grpc.InferResult(message)

    def parameters(self, result: Any, name: str) -> dict[str, object]:
        output = result.get_output(name)
        assert not output.HasField("contents")
        return {key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in output.parameters.items()}


Side = type[Http] | type[Grpc]
both = pytest.mark.parametrize("side", [Http, Grpc], ids=["http", "grpc"])


def shared_input(side: Side, name: str, region: str, size_bytes: int, offset: int = 0) -> Any:
    created = side.client.InferInput(name, [1, 2] if name == "X" else [1, 1], "FP32" if name == "X" else "BYTES")
    return created.set_shared_memory(region, size_bytes, offset)


def sent(side: Side, name: str) -> Any:
    array = X if name == "X" else N
    return side.client.InferInput(name, list(array.shape), "FP32" if name == "X" else "BYTES").set_data_from_numpy(
        array
    )


def shared_output(side: Side, name: str, region: str, size_bytes: int, offset: int = 0) -> Any:
    created = side.client.InferRequestedOutput(name)
    created.set_shared_memory(region, size_bytes, offset)
    return created


def answer() -> InferResponse:
    return InferResponse({"Y": X * 2, "M": N})


@both
def test_inputs_are_read_anew_for_every_request(side: Side) -> None:
    regions = FakeRegions(r=FakeRegion(64))
    one = side(regions)
    plans = []
    for value in (1.0, 5.0):
        array = np.array([[value, -value]], "<f4")
        regions.regions["r"].memory[16:24] = array.tobytes()
        regions.regions["r"].memory[40 : 40 + len(N_WIRE)] = N_WIRE
        request, plan = one.decode([shared_input(side, "X", "r", 8, 16), shared_input(side, "N", "r", len(N_WIRE), 40)])
        assert request.inputs["X"].tolist() == array.tolist()
        assert request.inputs["X"].dtype == "<f4"
        assert request.inputs["N"].tolist() == N.tolist()
        assert request.size_bytes == one.size_bytes + 8 + len(N_WIRE)
        plans.append(plan)
    assert len(one.codec._templates) == 1
    assert not plans[0].literals


@both
@pytest.mark.parametrize("shared", ["X", "N"])
def test_one_input_shared_and_one_sent(side: Side, shared: str) -> None:
    region = FakeRegion(64)
    wire = X.tobytes() if shared == "X" else N_WIRE
    region.memory[: len(wire)] = wire
    one = side(FakeRegions(r=region))
    inputs = [shared_input(side, name, "r", len(wire)) if name == shared else sent(side, name) for name in ("X", "N")]
    for each in (inputs, inputs[::-1]):
        request, _ = one.decode(each)
        assert request.inputs["X"].tolist() == X.tolist()
        assert request.inputs["N"].tolist() == N.tolist()


@both
def test_outputs_are_written_and_the_grpc_response_names_the_region(side: Side) -> None:
    region = FakeRegion(128)
    one = side(FakeRegions(r=region))
    requested = [shared_output(side, "Y", "r", 32, 8), shared_output(side, "M", "r", 64, 40)]
    _, plan = one.decode([sent(side, "X")], requested)
    assert [output.shared is not None for output in plan.outputs] == [True, True]
    result = one.answer(plan, answer())
    assert region.memory[8:16] == (X * 2).tobytes()
    assert region.memory[40 : 40 + len(N_WIRE)] == N_WIRE
    assert region.memory[:8] + region.memory[16:40] + region.memory[40 + len(N_WIRE) :] == bytes(128 - 8 - len(N_WIRE))
    if side is Grpc:
        assert one.parameters(result, "Y") == {
            "shared_memory_region": "r",
            "shared_memory_offset": 8,
            "shared_memory_byte_size": 8,
        }
        assert one.parameters(result, "M")["shared_memory_byte_size"] == len(N_WIRE)
    else:  # Triton's C++ client fails on parameters without a binary_data_size
        assert one.parameters(result, "Y") == one.parameters(result, "M") == {}
    shape = result.get_output("Y")
    assert list(shape["shape"] if isinstance(shape, dict) else shape.shape) == [1, 2]


@both
@pytest.mark.parametrize("order", ["YM", "MY"])
def test_one_output_shared_and_one_sent(side: Side, order: str) -> None:
    region = FakeRegion(8)
    one = side(FakeRegions(r=region))
    requested = {"Y": shared_output(side, "Y", "r", 8), "M": side.client.InferRequestedOutput("M")}
    _, plan = one.decode([sent(side, "X")], [requested[name] for name in order])
    result = one.answer(plan, answer())
    assert region.memory == (X * 2).tobytes()
    assert result.as_numpy("M").tolist() == N.tolist()


@both
def test_outputs_are_written_to_the_regions_resolved_at_decode(side: Side) -> None:
    regions = FakeRegions(r=FakeRegion(8))
    old = regions.regions["r"]
    one = side(regions)
    _, before = one.decode([sent(side, "X")], [shared_output(side, "Y", "r", 8)])
    regions.regions["r"] = new = FakeRegion(8)
    _, after = one.decode([sent(side, "X")], [shared_output(side, "Y", "r", 8)])
    del regions.regions["r"]
    one.answer(before, answer())
    assert (old.memory, new.memory) == ((X * 2).tobytes(), bytes(8))
    one.answer(after, answer())
    assert new.memory == (X * 2).tobytes()
    with pytest.raises(NotFound, match="no region 'r'"):
        one.decode([sent(side, "X")], [shared_output(side, "Y", "r", 8)])


@both
@pytest.mark.parametrize(
    ("kind", "device", "stays"), [(FakeGpuRegion, 0, True), (FakeGpuRegion, 1, False), (FakeRegion, 0, False)]
)
def test_an_output_on_a_gpu_stays_there_for_a_region_of_that_gpu_only(
    side: Side, kind: type[FakeRegion], device: int, stays: bool
) -> None:
    region = kind(16)
    one = side(FakeRegions(r=region))
    _, plan = one.decode([sent(side, "X")], [shared_output(side, "Y", "r", 8, 8)])
    one.answer(plan, InferResponse({"Y": resident(X * 2, device)}))
    assert region.memory == bytes(8) + (X * 2).tobytes()
    assert getattr(region, "copied_rows", 0) == stays


@both
def test_an_output_that_does_not_fit_is_not_written(side: Side) -> None:
    region = FakeRegion(64)
    one = side(FakeRegions(r=region))
    _, plan = one.decode([sent(side, "X")], [shared_output(side, "Y", "r", 7)])
    with pytest.raises(BadRequest, match="output 'Y' has 8 bytes, its shared_memory_byte_size is only 7"):
        one.answer(plan, answer())
    assert region.memory == bytes(64)


def both_with(*edges: int) -> Callable[[Any], Any]:
    return pytest.mark.parametrize("offset", edges)


@both
@both_with(57, 2**40, 2**63 - 1)
def test_ranges_beyond_the_region(side: Side, offset: int) -> None:
    region = FakeRegion(64)
    one = side(FakeRegions(r=region))
    with pytest.raises(BadRequest, match=f"input 'X': {offset} and 8 do not lie in the region"):
        one.decode([shared_input(side, "X", "r", 8, offset)])
    # An output's range is looked at before the inputs are copied, and long before the model runs.
    with pytest.raises(BadRequest, match=f"output 'Y': {offset} and 8 do not lie in the region"):
        one.decode([shared_input(side, "X", "r", 8)], [shared_output(side, "Y", "r", 8, offset)])
    assert region.reads == 0


@both
@pytest.mark.parametrize(("size_bytes", "offset"), [(-1, 0), (8, -1), (-(2**63), 0)])
def test_ranges_that_are_none(side: Side, size_bytes: int, offset: int) -> None:
    one = side(FakeRegions(r=FakeRegion(64)))
    words = f"byte_size and shared_memory_offset must be at least 0, they are {size_bytes} and {offset}"
    with pytest.raises(BadRequest, match=f"input 'X': shared_memory_{words}"):
        one.decode([shared_input(side, "X", "r", size_bytes, offset)])
    with pytest.raises(BadRequest, match=f"output 'Y': shared_memory_{words}"):
        one.decode([sent(side, "X")], [shared_output(side, "Y", "r", size_bytes, offset)])


@both
def test_a_range_of_another_size_than_the_tensor_is_not_read(side: Side) -> None:
    region = FakeRegion(64)
    one = side(FakeRegions(r=region))
    with pytest.raises(BadRequest, match=r"input 'X': 16 bytes came for shape \[1, 2\] of FP32, expected 8"):
        one.decode([shared_input(side, "X", "r", 16)])
    with pytest.raises(BadRequest, match="input 'N': 3 bytes cannot hold 1 BYTES elements"):
        one.decode([sent(side, "X"), shared_input(side, "N", "r", 3)])
    assert region.reads == 0
    region.memory[:4] = b"\xff" * 4
    with pytest.raises(BadRequest, match="input 'N': element 0 says 4294967295 bytes"):
        one.decode([sent(side, "X"), shared_input(side, "N", "r", 64)])


@both
def test_a_small_request_cannot_cause_a_copy_of_gigabytes(side: Side) -> None:
    region = FakeRegion(64)
    one = side(FakeRegions(r=region), max_shared_bytes=20)
    one.decode([shared_input(side, "X", "r", 8)])
    with pytest.raises(TooLarge, match="the inputs in shared memory have 38 bytes, at most 20 are read"):
        one.decode([shared_input(side, "X", "r", 8), shared_input(side, "N", "r", 30)])
    assert region.reads == 1


@both
def test_shared_memory_that_is_off(side: Side) -> None:
    one = side(None)
    for inputs, outputs in (
        ([shared_input(side, "X", "r", 8)], None),
        ([sent(side, "X")], [shared_output(side, "Y", "r", 8)]),
    ):
        with pytest.raises(Forbidden, match="start the server with --allow-client-shm"):
            one.decode(inputs, outputs)
    assert one.decode([sent(side, "X")])[0].rows == 1


@both
def test_an_unknown_region(side: Side) -> None:
    with pytest.raises(NotFound, match="no region 'q'"):
        side(FakeRegions()).decode([shared_input(side, "X", "q", 8)])


def with_parameters(side: Side, created: Any, **parameters: str | int) -> Any:
    """An input or output with parameters that the client itself would not send so."""
    for name, value in parameters.items():
        if side is Http:
            created._parameters[name] = value
        elif isinstance(value, str):
            created._get_tensor().parameters[name].string_param = value
        else:
            created._get_tensor().parameters[name].int64_param = value
    return created


@both
@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"shared_memory_region": "r"}, "needs both shared_memory_region and shared_memory_byte_size"),
        ({"shared_memory_byte_size": 8}, "needs both shared_memory_region and shared_memory_byte_size"),
        ({"shared_memory_offset": 8}, "needs both shared_memory_region and shared_memory_byte_size"),
        ({"shared_memory_region": 7, "shared_memory_byte_size": 8}, "must be the name of a region"),
        ({"shared_memory_region": "", "shared_memory_byte_size": 8}, "must be the name of a region"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": "8"}, "must be a whole number, not str"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_x": 1}, "unknown parameter"),
    ],
)
def test_parameters_that_make_no_range(side: Side, parameters: dict[str, Any], words: str) -> None:
    one = side(FakeRegions(r=FakeRegion(64)))
    with pytest.raises(BadRequest, match=words):
        one.decode([with_parameters(side, side.client.InferInput("X", [1, 2], "FP32"), **parameters)])
    with pytest.raises(BadRequest, match=words):
        one.decode([sent(side, "X")], [with_parameters(side, side.client.InferRequestedOutput("Y"), **parameters)])


@both
def test_classes_are_not_written_to_shared_memory(side: Side) -> None:
    requested = with_parameters(
        side,
        side.client.InferRequestedOutput("Y", class_count=1),
        shared_memory_region="r",
        shared_memory_byte_size=8,
    )
    with pytest.raises(BadRequest, match="output 'Y': classification cannot go to shared memory"):
        side(FakeRegions(r=FakeRegion(64))).decode([sent(side, "X")], [requested])


def test_data_in_two_places() -> None:
    regions = FakeRegions(r=FakeRegion(64))
    where: dict[str, Any] = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    with pytest.raises(BadRequest, match="input 'X' is in shared memory, it takes neither data nor binary_data_size"):
        Http(regions).decode([with_parameters(Http, sent(Http, "X"), **where)])
    with pytest.raises(BadRequest, match="1 raw_input_contents came, expected 0"):
        Grpc(regions).decode([with_parameters(Grpc, sent(Grpc, "X"), **where)])
    message = pb.ModelInferRequest(model_name="m")
    entry = message.inputs.add(name="X", datatype="FP32", shape=[1, 2])
    entry.contents.fp32_contents.extend([1, 2])
    entry.parameters["shared_memory_region"].string_param = "r"
    entry.parameters["shared_memory_byte_size"].int64_param = 8
    wire = message.SerializeToString()
    with pytest.raises(BadRequest, match="input 'X' is in shared memory, it takes no contents"):
        GrpcCodec(SPEC, regions).decode(wire, scan(wire), 1)


@pytest.mark.parametrize(("rows", "is_large"), [(4, False), (40_000, True)])
def test_large_texts_are_split_on_a_codec_thread(rows: int, is_large: bool) -> None:
    """The event loop splits small ones: a codec thread would cost more."""
    spec = ModelSpec("m", "1", "test", {"N": SPEC.inputs["N"]}, SPEC.outputs, 65_536)
    texts = np.array([[b"text %d" % row] for row in range(rows)], object)
    content = serialize_byte_tensor(texts).item()
    region = FakeRegion(len(content))
    region.memory[:] = content
    regions, functions = FakeRegions(texts=region), []

    async def run(function: Callable[..., object], *args: object, size_bytes: int) -> None:
        assert size_bytes == len(content)
        functions.append(function.__name__)
        function(*args)

    place = {"shared_memory_region": "texts", "shared_memory_byte_size": len(content)}
    body = json.dumps(
        {"inputs": [{"name": "N", "datatype": "BYTES", "shape": [rows, 1], "parameters": place}]}
    ).encode()
    codec: Any = ModelCodec(spec, regions)
    threads = SimpleNamespace(run=run)
    service: Any = SimpleNamespace(
        codec=lambda _: codec, codec_threads=threads, has_shared_memory=True, _regions=regions, _brief={}
    )
    handle: Any = SimpleNamespace(spec=spec)
    parts = asyncio.run(InferenceService.read_large(service, handle, body, None))
    assert functions == (["read_shared"] if is_large else [])
    assert InferenceService.may_read_late(service, body) is is_large, "an equal request need not be looked at again"
    request, _ = codec.decode(body, None, 0, parts=parts)
    assert np.array_equal(request.inputs["N"], texts)
    assert region.reads == 1
    assert request.size_bytes == len(body) + len(content)


@pytest.mark.parametrize(
    ("rows", "is_pinned", "is_large"), [(1000, False, False), (1 << 20, False, True), (1 << 20, True, False)]
)
def test_large_numbers_are_copied_on_a_codec_thread(rows: int, is_pinned: bool, is_large: bool) -> None:
    """Of 100 MiB the copy takes 30 ms. Memory that the GPU reads is not copied."""
    devices = frozenset({0} if is_pinned else ())
    spec = ModelSpec("m", "1", "test", {"X": SPEC.inputs["X"]}, SPEC.outputs, 2 << 20, resident_devices=devices)
    values = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
    region = FakeRegion(values.nbytes)
    region.memory[:] = values.tobytes()
    region.array = values.reshape(-1).view(np.uint8)
    regions, functions = FakeRegions(numbers=region), []

    async def run(function: Callable[..., object], *args: object, size_bytes: int) -> None:
        assert size_bytes == values.nbytes
        functions.append(function.__name__)
        function(*args)

    place = {"shared_memory_region": "numbers", "shared_memory_byte_size": values.nbytes}
    body = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [rows, 2], "parameters": place}]}).encode()
    codec: Any = ModelCodec(spec, regions)
    service: Any = SimpleNamespace(
        codec=lambda _: codec,
        codec_threads=SimpleNamespace(run=run),
        has_shared_memory=True,
        _regions=regions,
        _brief={},
    )
    handle: Any = SimpleNamespace(spec=spec)
    parts = asyncio.run(InferenceService.read_large(service, handle, body, None))
    assert functions == (["read_shared"] if is_large else [])
    assert InferenceService.may_read_late(service, body) is (rows > 1000)
    request, _ = codec.decode(body, None, 0, parts=parts)
    assert np.array_equal(np.asarray(request.inputs["X"]), values)
    assert region.reads == (0 if is_pinned else 1)
