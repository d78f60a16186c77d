"""Queue policies, timeouts, priorities and sequences as in Triton, with Triton's clients on every protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.support import triton_clients
from tests.support.grpc_requests import gauge
from tests.support.models import add_model, affine, busy
from tests.support.python_models import Gate
from tests.support.serving import Server, look_quick, serving
from tests.support.triton_clients import connect
from tests.support.waiting import until

Infer = Callable[..., Any]

POLICY = "dynamic_batching {{ default_queue_policy {{ {} }} }}\n"
BUSY = {
    "busy": "",
    # No request here waits for a minute: a refused request was refused because of its own shorter timeout.
    "override": POLICY.format("default_timeout_microseconds: 60000000 allow_timeout_override: true"),
    "fixed": POLICY.format("default_timeout_microseconds: 60000000"),
    "no_default": POLICY.format("allow_timeout_override: true"),
}
GATES = {
    "short": POLICY.format("default_timeout_microseconds: 200000 allow_timeout_override: true"),
    "long": BUSY["override"],
}
LEVELS = "max_batch_size: 1\ndynamic_batching { priority_levels: 3 default_priority_level: 2 }\n"
X = np.ones((1, 16), np.float32)


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Gate]:
    repository = tmp_path_factory.mktemp("scheduling") / "models"
    return {name: Gate(repository, name, config) for name, config in GATES.items()}


@pytest.fixture(scope="module")
def scheduled(gates: dict[str, Gate]) -> Iterator[Server]:
    folder = gates["short"].repository.parent
    for name, config in BUSY.items():
        add_model(folder / "models", name, busy(), config=config or None)
    add_model(folder / "models", "affine", affine(), config=LEVELS)
    with serving(folder / "models", folder) as server:
        yield server


@pytest.fixture(scope="module")
def steps_per_s(scheduled: Server) -> int:
    """Measured once: later an abandoned request may still compute."""
    return look_quick(scheduled)


@pytest.fixture(params=["http", "grpc"])
def infer(scheduled: Server, request: pytest.FixtureRequest) -> Iterator[Infer]:
    """`infer(model, inputs, **options)` of a stock client; an input is an array, its name follows from the model."""
    with connect(scheduled, request.param) as client:

        def call(model: str, array: np.ndarray, **options: Any) -> Any:
            name = "X" if model == "affine" else "IN" if model in GATES else "STEPS"
            return triton_clients.infer(client, model, {name: array}, **options)

        yield call


def steps(count: int) -> np.ndarray:
    return np.array([count], np.int64)


@pytest.fixture
def held(scheduled: Server, gates: dict[str, Gate]) -> Iterator[Callable[[str], None]]:
    """Occupies the only instance of a gate until the end of the test."""
    closed: list[Gate] = []
    with ThreadPoolExecutor(1) as pool, triton.InferenceServerClient(scheduled.address, network_timeout=60) as client:

        def hold(model: str) -> None:
            until(lambda: gauge(scheduled, "headrace_in_flight", model) == 0)
            gates[model].close()
            closed.append(gates[model])
            pool.submit(triton_clients.infer, client, model, {"IN": steps(1)})
            until(lambda: gauge(scheduled, "headrace_in_flight", model) == 1)

        yield hold
        for gate in closed:
            gate.open()


@pytest.mark.parametrize("model", ["busy", "fixed", "no_default"])
def test_a_stock_client_s_timeout_of_30_us_fails_no_request(infer: Infer, model: str) -> None:
    for _ in range(5):
        assert infer(model, steps(3_000), timeout=30) is not None


def test_a_timeout_does_not_limit_the_time_of_computing(infer: Infer, steps_per_s: int) -> None:
    assert infer("override", steps(2 * steps_per_s), timeout=1_000_000) is not None


@pytest.mark.parametrize("model", ["busy", "fixed", "no_default"])
def test_a_timeout_is_ignored_without_an_override(
    scheduled: Server, infer: Infer, steps_per_s: int, model: str
) -> None:
    with ThreadPoolExecutor(1) as pool, triton.InferenceServerClient(scheduled.address, network_timeout=60) as client:
        until(lambda: gauge(scheduled, "headrace_in_flight", model) == 0)
        before = pool.submit(triton_clients.infer, client, model, {"STEPS": steps(int(steps_per_s * 0.3))})
        until(lambda: gauge(scheduled, "headrace_in_flight", model) == 1)
        assert infer(model, steps(1), timeout=1_000) is not None
        before.result(60)


def refusal(infer: Infer, model: str, **options: Any) -> str:
    with pytest.raises(InferenceServerException, match="exceeded the timeout of the queue policy") as caught:
        infer(model, steps(1), **options)
    return str(caught.value.status())


def test_a_request_timeout_may_shorten_the_timeout_of_the_policy(infer: Infer, held: Callable[[str], None]) -> None:
    held("long")
    began = time.monotonic()
    assert refusal(infer, "long", timeout=100_000) in ("503", "StatusCode.UNAVAILABLE")
    assert time.monotonic() - began > 0.09


def test_a_timeout_does_not_lengthen_the_policy_s(infer: Infer, held: Callable[[str], None]) -> None:
    held("short")
    assert refusal(infer, "short", timeout=60_000_000) in ("503", "StatusCode.UNAVAILABLE")


@pytest.mark.parametrize("parameters", [None, {"headrace_deadline_us": 50_000_000}])
def test_no_deadline_switches_the_policy_off(
    infer: Infer, held: Callable[[str], None], parameters: dict[str, int] | None
) -> None:
    """Neither ours nor, over gRPC, that of the call itself."""
    headers = {"x-request-timeout-ms": "50000"}
    held("short")
    assert refusal(infer, "short", parameters=parameters, headers=headers) in ("503", "StatusCode.UNAVAILABLE")


def test_the_deadline_of_a_call_does_not_switch_the_policy_off(scheduled: Server, held: Callable[[str], None]) -> None:
    tensor = triton_grpc.InferInput("IN", [1], "INT64").set_data_from_numpy(steps(1))
    with triton_grpc.InferenceServerClient(scheduled.grpc_address) as client:
        held("short")
        with pytest.raises(InferenceServerException, match="exceeded the timeout of the queue policy") as caught:
            client.infer("short", [tensor], client_timeout=50.0)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"


def test_the_deadline_header_ends_a_running_request(infer: Infer, steps_per_s: int) -> None:
    with pytest.raises(InferenceServerException, match="deadline") as caught:
        infer("busy", steps(2 * steps_per_s), parameters={"headrace_deadline_us": 500_000})
    assert caught.value.status() in ("504", "StatusCode.DEADLINE_EXCEEDED")


@pytest.mark.parametrize("options", [{"priority": 4}, {"priority": 2**31 + 5}, {"priority": 1}])
def test_any_priority_is_served(infer: Infer, options: dict[str, int]) -> None:
    assert infer("affine", X, **options).as_numpy("Y").shape == (1, 4)
