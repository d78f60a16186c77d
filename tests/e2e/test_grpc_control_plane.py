"""Every control RPC with Triton's client, health and reflection with standard clients."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.utils.shared_memory as shm
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from tests.e2e.conftest import BROKEN
from tests.support.grpc_requests import tensor
from tests.support.serving import Server

SERVICE = "inference.GRPCInferenceService"


def refusal(call: Any, *args: Any, **more: Any) -> tuple[str, str]:
    """Code and text of the error that a call must raise."""
    with pytest.raises(InferenceServerException) as caught:
        call(*args, **more)
    return str(caught.value.status()).removeprefix("StatusCode."), str(caught.value.message())


def test_every_rpc_is_tested(grpc_channel: grpc.Channel) -> None:
    for method in service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        if method.name == "ModelStreamInfer":  # answers every message; has tests of its own
            continue
        with pytest.raises(grpc.RpcError) as caught:
            grpc_channel.unary_unary(f"/{SERVICE}/{method.name}")(b"\xff")  # no protobuf message
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method.name


def test_unknown_method(grpc_channel: grpc.Channel) -> None:
    for path in (f"/{SERVICE}/Nothing", "/nothing.Here/ModelInfer", f"/{SERVICE.lower()}/ServerLive"):
        with pytest.raises(grpc.RpcError) as caught:
            grpc_channel.unary_unary(path)(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_health(grpc_client: triton.InferenceServerClient) -> None:
    assert grpc_client.is_server_live() is True
    assert grpc_client.is_server_ready() is True
    assert grpc_client.is_model_ready("affine") is True
    assert grpc_client.is_model_ready("versioned", "3") is True
    for name, version in ((BROKEN[0], ""), (BROKEN[1], ""), ("nothing", ""), ("versioned", "2"), ("affine", "x")):
        assert grpc_client.is_model_ready(name, version) is False


def test_metadata(grpc_server: Server, grpc_client: triton.InferenceServerClient) -> None:
    metadata = grpc_client.get_server_metadata()
    _, _, body = grpc_server.request("GET", "/v2")
    assert metadata.name == "headrace"
    assert metadata.version.encode() in body
    assert all(f'"{extension}"'.encode() in body for extension in metadata.extensions)
    assert {"system_shared_memory", "classification", "model_repository"} <= set(metadata.extensions)
    model = grpc_client.get_model_metadata("sum_difference")
    assert (model.name, list(model.versions), model.platform) == ("sum_difference", ["1"], "onnxruntime_onnx")
    assert [(t.name, t.datatype, list(t.shape)) for t in model.inputs] == [
        ("A", "INT32", [-1, 4]),
        ("B", "FP32", [-1, 4]),
    ]
    assert [t.name for t in model.outputs] == ["SUM", "DIFFERENCE"]
    assert list(grpc_client.get_model_metadata("versioned", "3").versions) == ["1", "3", "20"]
    assert refusal(grpc_client.get_model_metadata, "nothing")[0] == "NOT_FOUND"
    assert refusal(grpc_client.get_model_metadata, BROKEN[0])[0] == "UNAVAILABLE"


def test_config(grpc_client: triton.InferenceServerClient) -> None:
    config = grpc_client.get_model_config("affine").config
    assert (config.name, config.max_batch_size) == ("affine", 8)
    assert config.dynamic_batching.max_queue_delay_microseconds == 5000
    assert [(t.name, list(t.dims)) for t in config.input] == [("X", [16])]
    assert list(grpc_client.get_model_config("reshaped").config.input[0].reshape.shape) == [2, 3]
    for row in grpc_client.get_model_repository_index().models:
        if row.state == "READY":
            assert grpc_client.get_model_config(row.name, row.version).config.name == row.name
    assert refusal(grpc_client.get_model_config, "nothing")[0] == "NOT_FOUND"


def test_statistics_count_exactly(grpc_client: triton.InferenceServerClient) -> None:
    def of(name: str) -> Any:
        (stats,) = grpc_client.get_inference_statistics(name).model_stats
        return stats

    before = of("counted")
    for count in (1, 3, 3):
        grpc_client.infer("counted", [tensor("X", np.zeros((count, 16), np.float32))])
    after = of("counted")
    assert (after.name, after.version) == ("counted", "1")
    assert after.inference_count - before.inference_count == 7
    assert after.execution_count - before.execution_count == 3
    assert after.inference_stats.success.count - before.inference_stats.success.count == 3
    assert {size.batch_size for size in after.batch_stats} >= {1, 3}
    assert after.inference_stats.success.ns > before.inference_stats.success.ns
    assert len({stats.name for stats in grpc_client.get_inference_statistics().model_stats}) > 10
    assert len(grpc_client.get_inference_statistics("versioned").model_stats) == 3
    assert refusal(grpc_client.get_inference_statistics, "nothing")[0] == "NOT_FOUND"


def test_index(grpc_client: triton.InferenceServerClient) -> None:
    rows = {(row.name, row.version): row for row in grpc_client.get_model_repository_index().models}
    assert rows["affine", "1"].state == "READY"
    broken = [row for (name, _), row in rows.items() if name in BROKEN]
    assert {row.state for row in broken} == {"UNAVAILABLE"}
    assert all(row.reason for row in broken)


def test_ready_index(grpc_channel: grpc.Channel) -> None:
    call = grpc_channel.unary_unary(
        f"/{SERVICE}/RepositoryIndex",
        service_pb2.RepositoryIndexRequest.SerializeToString,
        service_pb2.RepositoryIndexResponse.FromString,
    )
    assert {row.state for row in call(service_pb2.RepositoryIndexRequest(ready=True)).models} == {"READY"}
    with pytest.raises(grpc.RpcError, match="repository_name") as caught:
        call(service_pb2.RepositoryIndexRequest(repository_name="x"))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_unload_and_load(grpc_client: triton.InferenceServerClient) -> None:
    x = tensor("X", np.zeros((1, 6), np.float32))
    grpc_client.unload_model("reshaped")
    assert grpc_client.is_model_ready("reshaped") is False
    assert refusal(grpc_client.infer, "reshaped", [x])[0] == "UNAVAILABLE"
    grpc_client.load_model("reshaped")
    assert grpc_client.is_model_ready("reshaped") is True
    grpc_client.infer("reshaped", [x])
    assert refusal(grpc_client.load_model, "nothing")[0] == "NOT_FOUND"
    assert refusal(grpc_client.load_model, BROKEN[0])[0] in ("INVALID_ARGUMENT", "UNAVAILABLE")
    assert refusal(grpc_client.load_model, "reshaped", config="{")[0] == "INVALID_ARGUMENT"


def test_disabled_rpcs_are_refused(server: Server) -> None:
    """On a server whose operator has switched nothing on."""
    with triton.InferenceServerClient(server.grpc_address) as client:
        code, text = refusal(client.load_model, "affine")
        assert (code, "--model-control" in text) == ("PERMISSION_DENIED", True)
        assert refusal(client.unload_model, "affine")[0] == "PERMISSION_DENIED"
        code, text = refusal(client.register_system_shared_memory, "r", "/r", 8)
        assert (code, "--allow-client-shm" in text) == ("PERMISSION_DENIED", True)
        assert refusal(client.register_cuda_shared_memory, "r", b"AAAA", 0, 8)[0] == "PERMISSION_DENIED"
        assert "system_shared_memory" not in client.get_server_metadata().extensions


def test_system_shared_memory_both_ways(grpc_server: Server, grpc_client: triton.InferenceServerClient) -> None:
    x = np.arange(300, dtype=np.float32).reshape(3, 100)
    name = f"grpc_{grpc_server.grpc_port}"
    region = shm.create_shared_memory_region(name, f"/{name}", 2 * x.nbytes)
    try:
        shm.set_shared_memory_region(region, [x])
        grpc_client.register_system_shared_memory(name, f"/{name}", 2 * x.nbytes)
        status = grpc_client.get_system_shared_memory_status().regions[name]
        assert (status.name, status.byte_size, status.offset) == (name, 2 * x.nbytes, 0)
        assert refusal(grpc_client.register_system_shared_memory, name, f"/{name}", 8)[0] == "ALREADY_EXISTS"
        request_input = triton.InferInput("X", [3, 100], "FP32")
        request_input.set_shared_memory(name, x.nbytes)
        output = triton.InferRequestedOutput("DOUBLE")
        output.set_shared_memory(name, x.nbytes, offset=x.nbytes)
        result = grpc_client.infer("row_sums", [request_input], outputs=[output])
        assert result.get_output("DOUBLE").parameters["shared_memory_region"].string_param == name
        assert shm.get_contents_as_numpy(region, np.float32, [6, 100])[3:].tolist() == (2 * x).tolist()
        grpc_client.unregister_system_shared_memory(name)
        assert refusal(grpc_client.get_system_shared_memory_status, name)[0] == "NOT_FOUND"
    finally:
        shm.destroy_shared_memory_region(region)


def test_cuda_shared_memory_where_there_is_no_gpu(grpc_client: triton.InferenceServerClient) -> None:
    assert len(grpc_client.get_cuda_shared_memory_status().regions) == 0
    assert refusal(grpc_client.register_cuda_shared_memory, "c", b"QUJD", 0, 8)[0] in (
        "UNIMPLEMENTED",
        "INVALID_ARGUMENT",
    )
    grpc_client.unregister_cuda_shared_memory()


def test_trace_settings(grpc_client: triton.InferenceServerClient) -> None:
    before = grpc_client.get_trace_settings().settings
    assert list(before["trace_level"].value) == ["OFF"]
    levels = refusal(grpc_client.update_trace_settings, settings={"trace_level": ["TENSORS"]})
    assert (levels[0], "'TENSORS' is not recorded" in levels[1]) == ("INVALID_ARGUMENT", True)
    levels = refusal(grpc_client.update_trace_settings, settings={"trace_level": ["TIMESTAMPS", "TENSORS"]})
    assert (levels[0], "--trace-file" in levels[1]) == ("PERMISSION_DENIED", True), "as for TIMESTAMPS alone"
    try:
        changed = grpc_client.update_trace_settings(settings={"trace_rate": "7"}).settings
        assert list(changed["trace_rate"].value) == ["7"]
        assert list(grpc_client.get_trace_settings("affine").settings["trace_rate"].value) == ["7"]
    finally:
        after = grpc_client.update_trace_settings(settings={"trace_rate": None}).settings
    assert list(after["trace_rate"].value) == list(before["trace_rate"].value)
    assert refusal(grpc_client.update_trace_settings, settings={"nonsense": "1"})[0] == "INVALID_ARGUMENT"
    assert refusal(grpc_client.update_trace_settings, settings={"trace_rate": ["1", "2"]})[0] == "INVALID_ARGUMENT"
    assert refusal(grpc_client.update_trace_settings, settings={"trace_file": "/x"})[0] == "PERMISSION_DENIED"


def test_log_settings(grpc_client: triton.InferenceServerClient) -> None:
    settings = grpc_client.get_log_settings().settings
    assert settings["log_info"].bool_param is True
    level = settings["log_verbose_level"].uint32_param
    try:
        changed = grpc_client.update_log_settings({"log_verbose_level": level + 1, "log_info": False}).settings
        assert (changed["log_verbose_level"].uint32_param, changed["log_info"].bool_param) == (level + 1, False)
    finally:
        grpc_client.update_log_settings({"log_verbose_level": level, "log_info": True})
    assert refusal(grpc_client.update_log_settings, {"nonsense": True})[0] == "INVALID_ARGUMENT"
    assert refusal(grpc_client.update_log_settings, {"log_file": "/x"})[0] == "PERMISSION_DENIED"


def test_standard_health_check(grpc_channel: grpc.Channel) -> None:
    stub, kind = health_pb2_grpc.HealthStub(grpc_channel), health_pb2.HealthCheckResponse
    for service, status in {
        "": kind.SERVING,
        SERVICE: kind.SERVING,
        "affine": kind.SERVING,
        BROKEN[0]: kind.NOT_SERVING,
    }.items():
        assert stub.Check(health_pb2.HealthCheckRequest(service=service)).status == status
    with pytest.raises(grpc.RpcError, match="'nothing' is not found") as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="nothing"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_standard_health_watch(grpc_client: triton.InferenceServerClient, grpc_channel: grpc.Channel) -> None:
    stub, kind = health_pb2_grpc.HealthStub(grpc_channel), health_pb2.HealthCheckResponse
    unknown = stub.Watch(health_pb2.HealthCheckRequest(service="nothing"), timeout=20)
    assert next(unknown).status == kind.SERVICE_UNKNOWN
    unknown.cancel()
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="optional_bias"), timeout=20)
    assert next(watch).status == kind.SERVING
    grpc_client.unload_model("optional_bias")
    assert next(watch).status == kind.NOT_SERVING
    grpc_client.load_model("optional_bias")
    assert next(watch).status == kind.SERVING
    watch.cancel()


def test_reflection_as_a_descriptor_database(grpc_channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(grpc_channel)
    assert set(database.get_services()) == {
        SERVICE,
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "xds.service.orca.v3.OpenRcaService",
    }
    reflect = grpc_channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    (listed,) = reflect(iter([reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()]))
    assert SERVICE.encode() in listed, "the newer version of the service answers, too"
    pool = DescriptorPool(database)
    for service in database.get_services():
        descriptor = pool.FindServiceByName(service)
        assert all(method.input_type.full_name for method in descriptor.methods)
    infer = pool.FindMessageTypeByName("inference.ModelInferRequest").fields_by_name
    assert infer["raw_input_contents"].number == 7
    assert pool.FindMessageTypeByName("inference.ModelConfig").full_name == "inference.ModelConfig"


async def test_the_whole_asyncio_client(grpc_server: Server) -> None:
    async with triton_aio.InferenceServerClient(grpc_server.grpc_address) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("affine")
        assert not await client.is_model_ready("broken_file")
        assert (await client.get_server_metadata()).name == "headrace"
        assert list((await client.get_model_metadata("versioned", "3")).versions) == ["1", "3", "20"]
        assert (await client.get_model_config("scores")).config.max_batch_size == 4
        assert len((await client.get_model_repository_index()).models) > 10
        assert len((await client.get_inference_statistics("versioned", "3")).model_stats) == 1
        await client.unregister_system_shared_memory()
        assert (await client.get_log_settings()).settings["log_info"].bool_param
        assert "trace_rate" in (await client.get_trace_settings()).settings
        x = np.ones((1, 4), np.float32)
        result = await client.infer("row_sums", [tensor("X", x)], request_id="1", compression_algorithm="gzip")
        assert (result.as_numpy("SUM").tolist(), result.get_response().id) == ([[4]], "1")
        with pytest.raises(InferenceServerException, match="'nothing' is not found") as caught:
            await client.infer("nothing", [tensor("X", x)])
        assert caught.value.status() == "StatusCode.NOT_FOUND"
