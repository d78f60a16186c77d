"""ModelStreamInfer: many requests in flight on one stream; every response has its id, errors end a request and not the stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2

from tests.e2e.conftest import Reference
from tests.support.grpc_requests import (
    STEPS_PER_S,
    STREAM,
    Collector,
    depth,
    fail_count,
    gate_request,
    gauge,
    message,
    steps,
    tensor,
)
from tests.support.python_models import Gate
from tests.support.serving import Server
from tests.support.waiting import at_rest, until

pb: Any = service_pb2


def test_64_in_flight_with_their_ids(grpc_client: triton.InferenceServerClient, reference: Reference) -> None:
    collect, rng = Collector(), np.random.default_rng(1)
    sent = {str(n): rng.standard_normal((int(rng.integers(1, 5)), 16), np.float32) for n in range(64)}
    grpc_client.start_stream(collect)
    for request_id, x in sent.items():
        grpc_client.async_stream_infer("affine", [tensor("X", x)], request_id=request_id)
    results = [result for result, error in collect.take(64) if error is None]
    grpc_client.stop_stream()
    answers = {result.get_response().id: result for result in results}
    assert answers.keys() == sent.keys()
    for request_id, x in sent.items():
        assert np.allclose(answers[request_id].as_numpy("Y"), reference.affine(x), atol=1e-5)
        assert answers[request_id].get_response().parameters["triton_final_response"].bool_param is True


def test_an_error_ends_its_request_and_not_the_stream(grpc_client: triton.InferenceServerClient) -> None:
    collect, x = Collector(), np.ones((1, 4), np.float32)
    grpc_client.start_stream(collect)
    grpc_client.async_stream_infer("row_sums", [tensor("X", x)], request_id="0")
    grpc_client.async_stream_infer("nothing", [tensor("X", x)], request_id="1")
    grpc_client.async_stream_infer("affine", [tensor("X", x)], request_id="2")  # of another shape
    grpc_client.async_stream_infer("table_lookup", [tensor("X", np.array([[99]]), "INT64")], request_id="3")
    grpc_client.async_stream_infer("row_sums", [tensor("X", x)], request_id="4", enable_empty_final_response=True)
    answers = collect.take(5)
    grpc_client.stop_stream()
    assert sorted(result.get_response().id for result, error in answers if error is None) == ["0", "4"]
    texts = [str(error) for _, error in answers if error is not None]
    assert ["'nothing' is not found" in texts[0], "'X'" in texts[1], "refused the values" in texts[2]] == [True] * 3


def test_errors_carry_the_id(grpc_channel: grpc.Channel) -> None:
    x = np.ones((1, 4), np.float32)
    messages = [message("nothing", "a", x), b"\xff no message", message("affine", "b", x), message("row_sums", "c", x)]
    answers = [pb.ModelStreamInferResponse.FromString(m) for m in grpc_channel.stream_stream(STREAM)(iter(messages))]
    assert len(answers) == 4
    failed = {answer.infer_response.id for answer in answers if answer.error_message}
    assert failed == {"a", "b", ""}
    assert [answer.infer_response.id for answer in answers if not answer.error_message] == ["c"]


def unordered(request: bytes) -> bytes:
    """The same request, whose answer may overtake those of earlier ones."""
    parsed = pb.ModelInferRequest.FromString(request)
    parsed.parameters["headrace_unordered"].bool_param = True
    return bytes(parsed.SerializeToString())


def test_responses_have_the_order_of_their_requests(grpc_channel: grpc.Channel) -> None:
    """Errors keep their places too; half-closing the stream waits for all."""
    x = np.ones((1, 4), np.float32)
    messages = [
        steps("slow", STEPS_PER_S // 2),
        message("row_sums", "1", x),
        message("nothing", "2", x),
        *(message("row_sums", str(n), x) for n in range(3, 8)),
        message("affine", "8", x),
    ]
    answers = [pb.ModelStreamInferResponse.FromString(m) for m in grpc_channel.stream_stream(STREAM)(iter(messages))]
    assert [answer.infer_response.id for answer in answers] == ["slow", *map(str, range(1, 9))]
    assert [answer.infer_response.id for answer in answers if answer.error_message] == ["2", "8"]


def test_unordered_answers_overtake(gated: Server, gate: Gate) -> None:
    """They neither wait for earlier answers nor delay later ones; the others keep their order."""
    x = np.ones((1, 4), np.float32)
    slow = gate_request("slow")
    fast = [message("row_sums", str(n), x) for n in range(8)]
    with grpc.insecure_channel(gated.grpc_address) as channel:

        def ids(messages: list[bytes], held: int) -> Iterator[str]:
            """The answers in their order; the slow one is given after so many others."""
            gate.close()
            for number, answer in enumerate(channel.stream_stream(STREAM)(iter(messages)), 1):
                yield pb.ModelStreamInferResponse.FromString(answer).infer_response.id
                if number == held:
                    gate.open()

        first = list(ids([slow, *(unordered(each) if n % 2 else each for n, each in enumerate(fast))], held=4))
        assert sorted(first[:4]) == ["1", "3", "5", "7"]
        assert first[4:] == ["slow", "0", "2", "4", "6"]
        assert list(ids([unordered(slow), *fast], held=8)) == [*map(str, range(8)), "slow"]


@pytest.mark.parametrize("bad", ["nothing", "affine"])
def test_an_error_ends_the_stream_on_request(grpc_channel: grpc.Channel, bad: str) -> None:
    """Triton's metadata `triton_grpc_error`: what came before the error is answered first."""
    x = np.ones((1, 4), np.float32)
    messages = [
        steps("0", STEPS_PER_S // 4),
        message("row_sums", "1", x),
        message(bad, "2", x),
        message("row_sums", "3", x),
    ]
    call = grpc_channel.stream_stream(STREAM)(iter(messages), metadata=(("triton_grpc_error", "true"),))
    ids: list[str] = []
    with pytest.raises(grpc.RpcError) as caught:
        ids.extend(pb.ModelStreamInferResponse.FromString(answer).infer_response.id for answer in call)
    expected = grpc.StatusCode.NOT_FOUND if bad == "nothing" else grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.code() is expected
    answers = grpc_channel.stream_stream(STREAM)(iter(messages), metadata=(("triton_grpc_error", "false"),))
    assert [pb.ModelStreamInferResponse.FromString(m).infer_response.id for m in answers] == ["0", "1", "2", "3"]


def test_more_requests_than_may_be_in_flight(grpc_channel: grpc.Channel) -> None:
    """The first holds the instance, so that the others pile up beyond what one stream may have."""
    count = 600
    messages = [steps("slow", STEPS_PER_S // 4), *(steps(str(n), 1) for n in range(count))]
    answers = [pb.ModelStreamInferResponse.FromString(m) for m in grpc_channel.stream_stream(STREAM)(iter(messages))]
    assert [answer.error_message for answer in answers if answer.error_message] == []
    assert [answer.infer_response.id for answer in answers] == ["slow", *map(str, range(count))]


def test_a_client_that_reads_late_is_not_read(grpc_channel: grpc.Channel) -> None:
    """200 MB of answers, none read at first: the server holds back, and everything arrives in the end."""
    x = np.random.default_rng(3).standard_normal((1, 250_000), np.float32)
    sent = 0

    def messages() -> Iterator[bytes]:
        nonlocal sent
        for number in range(100):
            sent += 1
            yield message("row_sums", str(number), x)

    call = grpc_channel.stream_stream(STREAM)(messages())
    until(lambda: sent)
    assert at_rest(lambda: sent) < 60  # windows and buffers take some
    answers = [pb.ModelStreamInferResponse.FromString(m) for m in call]
    assert sorted(int(answer.infer_response.id) for answer in answers) == list(range(100))
    assert {answer.infer_response.raw_output_contents[0] for answer in answers} == {(2 * x).tobytes()}


def test_cancelling_drops_queued_requests(gated: Server, gate: Gate) -> None:
    before = fail_count(gated, "gate")
    half_open = threading.Event()

    def messages() -> Iterator[bytes]:
        for number in range(21):
            yield gate_request(str(number))
        half_open.wait(20)

    gate.close()
    with grpc.insecure_channel(gated.grpc_address) as channel:
        call = channel.stream_stream(STREAM)(messages())
        until(lambda: depth(gated, "gate") == 20)
        call.cancel()
        half_open.set()
        until(lambda: depth(gated, "gate") == 0)  # what still runs does not hold them
        gate.open()
        until(lambda: fail_count(gated, "gate") - before == 21)
        until(lambda: gauge(gated, "headrace_in_flight", "gate") == 0)
