"""Triton's example scripts, repeated with its clients on models of the same names.

The scripts are in `src/python/examples` of the repository triton-inference-server/client. Each test names those whose requests
and checks it makes. Those of the other scripts are in `test_triton_requests.py`, `test_http_infer.py`, `test_grpc_infer.py`,
`test_repository_control.py` and `test_server_images.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from onnx import TensorProto, helper
from tritonclient import utils
from tritonclient.utils import InferenceServerException, shared_memory

from loadtest.onnx_models import onnx_model
from tests.support import models
from tests.support.serving import Server, serving

SIMPLE = """
max_batch_size: 8
input [ {{ name: "INPUT0" data_type: {0} dims: [ 16 ] }}, {{ name: "INPUT1" data_type: {0} dims: [ 16 ] }} ]
output [ {{ name: "OUTPUT0" data_type: {0} dims: [ 16 ] }}, {{ name: "OUTPUT1" data_type: {0} dims: [ 16 ] }} ]
"""
IN0 = np.arange(16, dtype=np.int32).reshape(1, 16)
IN1 = np.full((1, 16), -1, np.int32)


def simple(kind: int, through: int = 0) -> Any:
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, all (batch, 16); computed as INT32 where `through` says so."""
    nodes, names = [], ["INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1"]
    inner = [f"{name}_INT32" if through else name for name in names]
    if through:
        nodes = [helper.make_node("Cast", [names[index]], [inner[index]], to=through) for index in (0, 1)]
    nodes += [helper.make_node("Add", inner[:2], inner[2:3]), helper.make_node("Sub", inner[:2], inner[3:])]
    if through:
        nodes += [helper.make_node("Cast", [inner[index]], [names[index]], to=kind) for index in (2, 3)]
    shape = ("batch", 16)
    return onnx_model(nodes, dict.fromkeys(names[:2], (kind, shape)), dict.fromkeys(names[2:], (kind, shape)))


def build(folder: Path) -> Path:
    int32, text = TensorProto.INT32, TensorProto.STRING
    models.add_model(folder, "simple", simple(int32), config=SIMPLE.format("TYPE_INT32"))
    models.add_model(folder, "simple_string", simple(text, int32), config=SIMPLE.format("TYPE_STRING"))
    return folder


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("stock")
    with serving(build(folder / "models"), folder, "--allow-client-shm") as running:
        yield running
        assert "Traceback" not in running.text


@pytest.fixture(params=["http", "grpc"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    return {"http": triton_http, "grpc": triton_grpc}[request.param]


@pytest.fixture
def client(module: ModuleType, stock: Server) -> Iterator[Any]:
    with module.InferenceServerClient(stock.address if module is triton_http else stock.grpc_address) as connected:
        yield connected


def inputs_of(module: ModuleType, arrays: Sequence[np.ndarray], datatype: str, binary: Sequence[bool]) -> list[Any]:
    inputs = []
    for index, (array, as_binary) in enumerate(zip(arrays, binary, strict=True)):
        options = {"binary_data": as_binary} if module is triton_http else {}
        tensor = module.InferInput(f"INPUT{index}", list(array.shape), datatype)
        inputs.append(tensor.set_data_from_numpy(array, **options))
    return inputs


def outputs_of(module: ModuleType, binary: Sequence[bool]) -> list[Any]:
    return [
        module.InferRequestedOutput(f"OUTPUT{index}", **({"binary_data": flag} if module is triton_http else {}))
        for index, flag in enumerate(binary)
    ]


def check(result: Any, in0: np.ndarray = IN0, in1: np.ndarray = IN1) -> None:
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), in0 + in1)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), in0 - in1)


def field(value: Any, name: str) -> Any:
    """Of a dictionary (HTTP) or a message (gRPC)."""
    return value[name] if isinstance(value, dict) else getattr(value, name)


# simple_http_infer_client.py, simple_grpc_infer_client.py


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_infer(client: Any, module: ModuleType, compression: str | None) -> None:
    inputs = inputs_of(module, [IN0, IN1], "INT32", [False, True])
    if module is triton_http:
        options: dict[str, Any] = {
            "query_params": {"test_1": 1, "test_2": 2},
            "request_compression_algorithm": compression,
            "response_compression_algorithm": compression,
        }
    else:
        options = {"compression_algorithm": compression, "client_timeout": 30}
    for outputs in (outputs_of(module, [True, False]), None):
        result = client.infer("simple", inputs, outputs=outputs, headers={"test": "1"}, **options)
        check(result)
        assert result.get_response()
    assert len(field(client.get_inference_statistics(model_name="simple"), "model_stats")) == 1
    with pytest.raises(InferenceServerException) as caught:
        client.infer("wrong_model_name", inputs)
    assert caught.value.message().startswith("Request for unknown model")


def as_text(array: np.ndarray) -> np.ndarray:
    return np.array([str(item).encode() for item in array.reshape(-1)], dtype=object).reshape(array.shape)


# simple_*_shm_string_client.py


def test_strings_through_shared_memory(client: Any, module: ModuleType) -> None:
    client.unregister_system_shared_memory()
    ones = np.ones((1, 16), np.int32)
    content = {
        "input0": as_text(IN0),
        "input1": as_text(ones),
        "output0": as_text(IN0 + ones),
        "output1": as_text(IN0 - ones),
    }
    handles, inputs, outputs = {}, [], []
    for name, array in content.items():
        serialized = utils.serialize_byte_tensor(array)
        size = utils.serialized_byte_size(serialized)
        key = f"/stock_text_{name}_{module.__name__.rpartition('.')[2]}_{os.getpid()}"
        handles[name] = shared_memory.create_shared_memory_region(name, key, size)
        client.register_system_shared_memory(name, key, size)
        if name.startswith("input"):
            shared_memory.set_shared_memory_region(handles[name], [serialized])
            inputs.append(module.InferInput(name.upper(), [1, 16], "BYTES"))
            inputs[-1].set_shared_memory(name, size)
        else:
            outputs.append(module.InferRequestedOutput(name.upper()))
            outputs[-1].set_shared_memory(name, size)
    try:
        result = client.infer("simple_string", inputs, outputs=outputs)
        for name in ("output0", "output1"):
            output = result.get_output(name.upper())
            dtype, shape = utils.triton_to_np_dtype(field(output, "datatype")), field(output, "shape")
            actual = shared_memory.get_contents_as_numpy(handles[name], dtype, shape)
            assert actual.reshape(-1).tolist() == content[name].reshape(-1).tolist()
    finally:
        client.unregister_system_shared_memory()
        for handle in handles.values():
            shared_memory.destroy_shared_memory_region(handle)


# simple_grpc_keepalive_client.py, simple_grpc_custom_args_client.py


def test_channel_options(stock: Server) -> None:
    keepalive = triton_grpc.KeepAliveOptions(
        keepalive_time_ms=2**31 - 1,
        keepalive_timeout_ms=20_000,
        keepalive_permit_without_calls=False,
        http2_max_pings_without_data=2,
    )
    options = [
        ("grpc.max_send_message_length", 1 << 20),
        ("grpc.max_receive_message_length", 1 << 20),
        ("grpc.keepalive_time_ms", 2**31 - 1),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", False),
        ("grpc.http2.max_pings_without_data", 2),
        ("grpc.dns_enable_srv_queries", 1),
    ]
    for arguments in ({"keepalive_options": keepalive}, {"channel_args": options}):
        with triton_grpc.InferenceServerClient(stock.grpc_address, **arguments) as client:
            inputs = inputs_of(triton_grpc, [IN0, IN1], "INT32", [True, True])
            check(client.infer("simple", inputs, headers={"test": "1"}))
