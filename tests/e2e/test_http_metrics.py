"""The metrics page: it parses, agrees with the statistics, and has Triton's names."""

from __future__ import annotations

import queue

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from prometheus_client.samples import Sample
from tritonclient.utils import InferenceServerException

from tests.support.prometheus import read_page
from tests.support.serving import Server

MODEL = "measured"
PHASES = ("decode", "queue", "assemble", "compute", "split", "encode", "total")

TRITON_NAMES = {
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
    "nv_inference_pending_request_count",
    "nv_inference_request_summary_us",
    "nv_inference_queue_summary_us_sum",
    "nv_inference_compute_input_summary_us_count",
    "nv_inference_compute_infer_summary_us",
    "nv_inference_compute_output_summary_us",
    "nv_inference_first_response_histogram_ms_bucket",
    "nv_model_load_duration_secs",
}


def samples(server: Server, model: str = MODEL) -> list[Sample]:
    """All samples of one model's version 1."""
    status, headers, page = server.request("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=")
    families = list(read_page(page.decode()))
    names = [family.name for family in families]
    assert len(set(names)) == len(names), "a family is there twice"
    labels = {"model": model, "version": "1"}
    return [sample for family in families for sample in family.samples if labels.items() <= sample.labels.items()]


def value(all_samples: list[Sample], name: str, **labels: str) -> float:
    (sample,) = [s for s in all_samples if s.name == name and labels.items() <= s.labels.items()]
    return sample.value


@pytest.fixture(scope="module")
def counted(server: Server) -> list[Sample]:
    """The page after 4 requests of 1, 1, 5 and 8 rows, one of 20 (three batches), and two that fail."""
    with triton.InferenceServerClient(server.address) as client:
        for rows, columns in ((1, 16), (1, 16), (5, 16), (8, 16), (20, 16), (1, 15), (1, 15)):
            array = np.zeros((rows, columns), np.float32)
            request_input = triton.InferInput("X", [rows, columns], "FP32").set_data_from_numpy(array)
            try:
                client.infer(MODEL, [request_input])
            except InferenceServerException:
                assert columns == 15
    return samples(server)


def test_counts_of_requests_rows_and_batches(counted: list[Sample]) -> None:
    assert value(counted, "headrace_requests_total") == 5
    assert value(counted, "headrace_rows_total") == 35
    assert value(counted, "headrace_failures_total", reason="bad_request") == 2
    assert sum(s.value for s in counted if s.name == "headrace_batches_total") == 7
    assert value(counted, "headrace_batches_total", closed_by="single") == 7


def test_the_histogram_of_batch_sizes(counted: list[Sample]) -> None:
    buckets = {s.labels["le"]: s.value for s in counted if s.name == "headrace_batch_rows_bucket"}
    # 1, 1, 5, 8, and 20 as 8 + 8 + 4
    assert (buckets["1.0"], buckets["4.0"], buckets["8.0"], buckets["+Inf"]) == (2, 3, 7, 7)
    assert value(counted, "headrace_batch_rows_sum") == 35


@pytest.mark.parametrize("phase", PHASES)
def test_histograms_of_every_phase(counted: list[Sample], phase: str) -> None:
    name = f"headrace_{phase}_seconds"
    buckets = [s.value for s in counted if s.name == f"{name}_bucket"]
    assert buckets == sorted(buckets)
    assert buckets[-1] == value(counted, f"{name}_count")
    assert 0 < value(counted, f"{name}_sum") < 60


@pytest.mark.parametrize("phase", ["decode", "queue", "compute", "encode", "total"])
def test_histograms_count_requests(counted: list[Sample], phase: str) -> None:
    assert value(counted, f"headrace_{phase}_seconds_count") == 5


def test_decode_and_encode_phases_are_measured_over_grpc(
    grpc_server: Server, grpc_client: triton_grpc.InferenceServerClient
) -> None:
    """Calls and streams; a request that is refused has no answer to write, and counts for neither."""
    request_input = triton_grpc.InferInput("X", [1, 16], "FP32").set_data_from_numpy(np.zeros((1, 16), np.float32))
    wrong = triton_grpc.InferInput("X", [1, 15], "FP32").set_data_from_numpy(np.zeros((1, 15), np.float32))
    before = samples(grpc_server)
    for _ in range(3):
        grpc_client.infer(MODEL, [request_input])
    with pytest.raises(InferenceServerException):
        grpc_client.infer(MODEL, [wrong])
    answers: queue.Queue[InferenceServerException | None] = queue.Queue()
    grpc_client.start_stream(lambda result, error: answers.put(error))
    for inputs in (request_input, wrong, request_input):
        grpc_client.async_stream_infer(MODEL, [inputs])
    errors = [answers.get(timeout=30) for _ in range(3)]
    grpc_client.stop_stream()
    assert sum(error is None for error in errors) == 2
    after = samples(grpc_server)
    for phase in ("decode", "encode"):
        name = f"headrace_{phase}_seconds"
        assert value(after, f"{name}_count") - value(before, f"{name}_count") == 5
        assert 0 < value(after, f"{name}_sum") - value(before, f"{name}_sum") < 60


def test_the_page_agrees_with_the_statistics(server: Server, counted: list[Sample]) -> None:
    with triton.InferenceServerClient(server.address) as client:
        (stats,) = client.get_inference_statistics(MODEL)["model_stats"]
    inference = stats["inference_stats"]
    assert value(counted, "headrace_requests_total") == inference["success"]["count"]
    assert value(counted, "headrace_rows_total") == stats["inference_count"]
    assert value(counted, "headrace_total_seconds_sum") == pytest.approx(inference["success"]["ns"] / 1e9)
    assert value(counted, "headrace_queue_seconds_sum") == pytest.approx(inference["queue"]["ns"] / 1e9)
    for name, expected in {
        "request_success": inference["success"]["count"],
        "count": stats["inference_count"],
        "exec_count": stats["execution_count"],
        "request_duration_us": inference["success"]["ns"] // 1_000,
        "queue_duration_us": inference["queue"]["ns"] // 1_000,
        "compute_input_duration_us": inference["compute_input"]["ns"] // 1_000,
        "compute_infer_duration_us": inference["compute_infer"]["ns"] // 1_000,
        "compute_output_duration_us": inference["compute_output"]["ns"] // 1_000,
    }.items():
        assert value(counted, f"nv_inference_{name}") == expected, name
    failures = {s.labels["reason"]: s.value for s in counted if s.name == "nv_inference_request_failure"}
    assert failures == {"REJECTED": 0, "CANCELED": 0, "BACKEND": 0, "OTHER": inference["fail"]["count"]}
    assert failures["OTHER"] == 2


def test_tritons_names_are_there_for_every_model(server: Server) -> None:
    for model in (MODEL, "affine", "identity_fp16"):
        assert {s.name for s in samples(server, model)} >= TRITON_NAMES


def test_errors_are_counted_by_protocol(grpc_server: Server, grpc_client: triton_grpc.InferenceServerClient) -> None:
    def errors() -> dict[str, float]:
        page = grpc_server.request("GET", "/metrics")[2].decode()
        all_samples = [s for family in read_page(page) for s in family.samples]
        return {
            s.labels["protocol"]: s.value
            for s in all_samples
            if s.name == "headrace_errors_total" and s.labels["reason"] == "not_found"
        }

    before = errors()
    with pytest.raises(InferenceServerException):
        grpc_client.get_model_metadata("nobody")
    assert grpc_server.request("GET", "/v2/models/nobody")[0] == 404
    assert errors() == {protocol: before.get(protocol, 0) + 1 for protocol in ("grpc", "http")}
