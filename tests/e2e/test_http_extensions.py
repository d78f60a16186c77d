"""Triton's HTTP extensions with Triton's own clients: shared memory, trace and log settings."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, shared_memory

from tests.support import models
from tests.support.serving import Server, serving
from tests.support.waiting import until

ALWAYS = {
    "binary_tensor_data",
    "classification",
    "generate",
    "logging",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "parameters",
    "schedule_policy",
    "statistics",
}


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own with every extension switched on."""
    folder = tmp_path_factory.mktemp("extended")
    models.add_model(folder / "models", "affine", models.affine())
    options = ["--model-control", "explicit", "--load-model", "affine", "--allow-client-shm"]
    with serving(folder / "models", folder, *options, "--trace-file", str(folder / "traces.json")) as running:
        yield running
        assert "Traceback" not in running.text


@pytest.fixture
def extras(extended: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(extended.address) as connected:
        yield connected


@contextmanager
def refused(status: int, *words: str) -> Iterator[None]:
    with pytest.raises(InferenceServerException) as caught:
        yield
    assert caught.value.status() == str(status), caught.value
    for word in words:
        assert word in str(caught.value)


def vector(seed: int = 0, rows: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).random((rows, 16), np.float32)


def request_input(array: np.ndarray) -> triton.InferInput:
    return triton.InferInput("X", list(array.shape), "FP32").set_data_from_numpy(array)


def key_of(name: str) -> str:
    return f"/extensions_{name}_{os.getpid()}"


@contextmanager
def memory(client: triton.InferenceServerClient, name: str, size_bytes: int) -> Iterator[object]:
    """Shared memory under a name of its own, registered."""
    key = key_of(name)
    region = shared_memory.create_shared_memory_region(name, key, size_bytes, create_only=True)
    try:
        client.register_system_shared_memory(name, key, size_bytes)
        yield region
    finally:
        client.unregister_system_shared_memory(name)
        shared_memory.destroy_shared_memory_region(region)


# What is there


def test_metadata_lists_enabled_extensions(extras: triton.InferenceServerClient) -> None:
    extensions = extras.get_server_metadata()["extensions"]
    assert len(extensions) == len(set(extensions))
    assert set(extensions) - {"cuda_shared_memory"} == ALWAYS | {"system_shared_memory", "trace"}


def test_metadata_lists_nothing_that_is_off(client: triton.InferenceServerClient) -> None:
    assert set(client.get_server_metadata()["extensions"]) == ALWAYS


def test_disabled_extensions_name_the_option_that_enables_them(client: triton.InferenceServerClient) -> None:
    with refused(403, "--model-control explicit"):
        client.load_model("affine")
    with refused(403, "--model-control explicit"):
        client.unload_model("affine")
    with refused(403, "--allow-client-shm"):
        client.register_system_shared_memory("r", "/r", 64)
    with refused(403, "--allow-client-shm"):
        client.register_cuda_shared_memory("r", base64.b64encode(bytes(64)), 0, 64)
    tensor = triton.InferInput("X", [1, 16], "FP32")
    tensor.set_shared_memory("r", 64)
    with refused(403, "--allow-client-shm"):
        client.infer("affine", [tensor])
    with refused(403, "--trace-file"):
        client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})
    assert client.get_system_shared_memory_status() == client.get_cuda_shared_memory_status() == []
    assert client.is_model_ready("affine")


# Shared memory


def test_a_round_trip_through_shared_memory(extras: triton.InferenceServerClient) -> None:
    array = vector(3, rows=2)
    expected = extras.infer("affine", [request_input(array)]).as_numpy("Y")
    with memory(extras, "in_out", array.nbytes + expected.nbytes) as region:
        shared_memory.set_shared_memory_region(region, [array])
        tensor = triton.InferInput("X", [2, 16], "FP32")
        tensor.set_shared_memory("in_out", array.nbytes)
        output = triton.InferRequestedOutput("Y")
        output.set_shared_memory("in_out", expected.nbytes, offset=array.nbytes)
        answer = extras.infer("affine", [tensor], outputs=[output])
        assert answer.get_output("Y") == {"name": "Y", "datatype": "FP32", "shape": [2, 4]}
        assert "data" not in answer.get_output("Y"), "the tensor came in the answer too"
        written = shared_memory.get_contents_as_numpy(region, np.float32, [2, 4], offset=array.nbytes)
        assert np.array_equal(written, expected)
        # The same request reads the memory anew.
        shared_memory.set_shared_memory_region(region, [array * 2])
        extras.infer("affine", [tensor], outputs=[output])
        doubled = extras.infer("affine", [request_input(array * 2)]).as_numpy("Y")
        assert np.array_equal(
            shared_memory.get_contents_as_numpy(region, np.float32, [2, 4], offset=array.nbytes), doubled
        )


def test_regions_come_and_go(extras: triton.InferenceServerClient) -> None:
    with memory(extras, "first", 256), memory(extras, "second", 512):
        expected = {"name": "first", "key": key_of("first"), "offset": 0, "byte_size": 256}
        assert extras.get_system_shared_memory_status("first") == [expected]
        assert {row["name"] for row in extras.get_system_shared_memory_status()} == {"first", "second"}
        assert extras.get_cuda_shared_memory_status() == []
        with refused(409, "first"):
            extras.register_system_shared_memory("first", key_of("second"), 512)
        extras.unregister_system_shared_memory("first")
        with refused(404, "first"):
            extras.get_system_shared_memory_status("first")
        extras.unregister_system_shared_memory("first")  # no error, as in Triton
        extras.register_system_shared_memory("first", key_of("second"), 12, offset=500)
        extras.unregister_system_shared_memory()
        assert extras.get_system_shared_memory_status() == []


def test_bounds_of_regions(extras: triton.InferenceServerClient) -> None:
    with memory(extras, "small", 64):
        for offset, size_bytes in ((1, 64), (2**62, 64), (0, 65)):
            with refused(400):
                extras.register_system_shared_memory("more", key_of("small"), size_bytes, offset=offset)
        tensor = triton.InferInput("X", [1, 16], "FP32")
        tensor.set_shared_memory("small", 64, offset=1)
        with refused(400, "'X'", "offset 1", "64 bytes"):
            extras.infer("affine", [tensor])
        output = triton.InferRequestedOutput("Y")
        output.set_shared_memory("small", 16, offset=49)
        with refused(400, "'Y'", "offset 49", "64 bytes"):
            extras.infer("affine", [request_input(vector())], outputs=[output])
        output.set_shared_memory("small", 15)
        with refused(400, "Y"):
            extras.infer("affine", [request_input(vector())], outputs=[output])
        output.set_shared_memory("unknown", 16)
        with refused(404, "unknown"):
            extras.infer("affine", [request_input(vector())], outputs=[output])


@pytest.mark.parametrize(
    "key", ["/nothing_there", "/../etc/passwd", "/", "//etc/passwd", "/a\0b", "/triton_python_backend", "/headrace"]
)
def test_keys_that_are_not_the_clients(extras: triton.InferenceServerClient, key: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        extras.register_system_shared_memory("stolen", key, 64)
    assert caught.value.status() in ("400", "403")
    assert "/dev" not in str(caught.value)
    assert extras.get_system_shared_memory_status() == []


def test_cuda_memory_without_a_gpu_is_refused_clearly(extras: triton.InferenceServerClient) -> None:
    if "cuda_shared_memory" in extras.get_server_metadata()["extensions"]:
        pytest.skip("this machine has a GPU")
    with refused(400, "no CUDA device"):
        extras.register_cuda_shared_memory("gpu", base64.b64encode(bytes(64)), 0, 64)
    assert extras.get_cuda_shared_memory_status() == []
    extras.unregister_cuda_shared_memory()
    extras.unregister_cuda_shared_memory("gpu")


# Settings


def test_trace_settings(extras: triton.InferenceServerClient, extended: Server) -> None:
    before = extras.get_trace_settings()
    assert before["trace_level"] == ["OFF"]
    assert before["trace_file"] == "traces.json", "the folder is none of the client's business"
    changed = extras.update_trace_settings(
        model_name="affine", settings={"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "2"}
    )
    assert (changed["trace_level"], changed["trace_rate"]) == (["TIMESTAMPS"], "1")
    assert extras.get_trace_settings() == before
    both = extras.update_trace_settings("affine", settings={"trace_level": ["TIMESTAMPS", "TENSORS"]})
    assert both["trace_level"] == ["TIMESTAMPS"], "the level that is not recorded is not listed"
    until(lambda: "trace_level TENSORS is not recorded" in extended.text)  # a thread writes the log
    with refused(400, "trace_level 'TENSORS' is not recorded"):
        extras.update_trace_settings("affine", settings={"trace_level": ["TENSORS"]})
    for seed in range(4):
        extras.infer("affine", [request_input(vector(seed))], request_id=f"traced {seed}")
    assert extras.get_trace_settings("affine")["trace_count"] == "0"
    extras.update_trace_settings(
        "affine", settings={"trace_level": None, "trace_rate": None, "trace_count": None, "log_frequency": None}
    )
    assert extras.get_trace_settings("affine") == before
    with refused(404, "nothing"):
        extras.update_trace_settings("nothing", settings={"trace_rate": "5"})
    with refused(403, "trace_file"):
        extras.update_trace_settings(settings={"trace_file": "/tmp/elsewhere"})
    with refused(400, "trace_rate"):
        extras.update_trace_settings(settings={"trace_rate": "often"})
    with refused(400, "trace_depth"):
        extras.update_trace_settings(settings={"trace_depth": "9"})
    assert extras.get_trace_settings() == before
    written = extended.log.with_name("traces.json")
    assert [word for seed in range(4) if (word := f"traced {seed}") in traces(written)] == ["traced 0", "traced 1"]


def traces(path: Path) -> str:
    """All trace files, read again until they have the last trace."""
    for _ in range(200):
        text = "".join(file.read_text() for file in path.parent.glob(f"{path.name}*"))
        if "traced 1" in text and "REQUEST_END" in text:
            break
        asyncio.run(asyncio.sleep(0.02))
    return text


def test_log_settings(extras: triton.InferenceServerClient, extended: Server) -> None:
    before = extras.get_log_settings()
    assert before["log_verbose_level"] == 0
    changed = extras.update_log_settings({"log_verbose_level": 1, "log_info": False})
    try:
        assert changed == {**before, "log_verbose_level": 1, "log_info": False} == extras.get_log_settings()
        with refused(403, "log_file"):
            extras.update_log_settings({"log_file": "/tmp/elsewhere"})
        with refused(400, "log_info"):
            extras.update_log_settings({"log_info": "no"})
        with refused(400, "log_colour"):
            extras.update_log_settings({"log_colour": "red"})
    finally:
        assert extras.update_log_settings({"log_verbose_level": 0, "log_info": True}) == before
