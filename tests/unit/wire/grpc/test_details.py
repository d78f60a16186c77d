"""Error details of a failed call besides code and text, read like gRPC's clients do."""

from __future__ import annotations

import grpc
import pytest
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.errors import (
    GRPC_CODES,
    BadRequest,
    HeadraceError,
    ModelFailed,
    Overloaded,
    QuotaExceeded,
    TooLarge,
    Unavailable,
    WouldMiss,
)
from headrace.wire.grpc.status import error_status

from tests.support.rich_status import retry_delay_s, rich_status


def test_the_codes_are_those_of_grpcio() -> None:
    assert {code.name: code.value[0] for code in grpc.StatusCode} == GRPC_CODES


@pytest.mark.parametrize(
    ("error", "delay_s", "seconds"),
    [
        (WouldMiss("late", 0.0125), 0.0125, "1"),
        (Overloaded("full", 2.4), 2.4, "3"),
        (Unavailable("loading", 70.0), 70.0, "70"),
        (Unavailable("now", 0.0), 0.0, "1"),
        (QuotaExceeded("too many", 1e-9, "shop"), 1e-9, "1"),
    ],
)
def test_the_retry_delay(error: HeadraceError, delay_s: float, seconds: str) -> None:
    end = error_status(error)
    metadata = dict(end.metadata)
    assert metadata["retry-after"] == seconds
    content = metadata["grpc-status-details-bin"]
    assert isinstance(content, bytes)
    code, text, details = rich_status(content)
    assert (code, text) == ({"UNAVAILABLE": 14, "RESOURCE_EXHAUSTED": 8}[end.code], str(error))
    assert retry_delay_s(details) == pytest.approx(delay_s, abs=1e-9)
    assert ("google.rpc.QuotaFailure" in details) == isinstance(error, QuotaExceeded)


PAUSES: list[tuple[HeadraceError, float, str | None]] = [
    (WouldMiss("late", 0.0125), 0.0, "13"),
    (Overloaded("full", 2.4), 0.0, "2400"),
    (Overloaded("full", 2.4), 5.0, "2400"),
    (Overloaded("full", 2.4), 2.3, "-1"),
    (QuotaExceeded("too many", 0.5, "shop"), 0.0, "500"),
    (QuotaExceeded("too many", 60.001, "shop"), 0.0, "-1"),
    (Unavailable("the sequence has ended", can_retry=False), 0.0, "-1"),
    (TooLarge("over --max-body-bytes"), 0.0, "-1"),
    (BadRequest("no"), 0.0, None),
    (ModelFailed("no"), 5.0, None),
]


@pytest.mark.parametrize(("error", "remaining_s", "pushback"), PAUSES)
def test_the_pause_that_retry_policies_of_clients_read(
    error: HeadraceError, remaining_s: float, pushback: str | None
) -> None:
    """gRFC A6: milliseconds as a signed 32-bit number in ASCII; a negative one forbids the retry."""
    deadline_ns = monotonic_ns() + int(remaining_s * NS_PER_S) if remaining_s else 0
    assert dict(error_status(error, deadline_ns).metadata).get("grpc-retry-pushback-ms") == pushback


@pytest.mark.parametrize(("client", "subject"), [("shop", "client:shop"), ("", "client:clients without a name")])
def test_the_name_of_the_exceeded_quota(client: str, subject: str) -> None:
    content = dict(error_status(QuotaExceeded("five a second", 1.0, client)).metadata)["grpc-status-details-bin"]
    assert isinstance(content, bytes)
    (violation,) = rich_status(content)[2]["google.rpc.QuotaFailure"].violations
    assert (violation.subject, violation.description) == (subject, "five a second")


@pytest.mark.parametrize("error", [BadRequest("no"), ModelFailed("no"), RuntimeError("no")])
def test_permanent_errors_have_no_details(error: Exception) -> None:
    assert error_status(error).metadata == ()


@pytest.mark.parametrize("text", ["a" * 100_000, "\u6771" * 100_000])
def test_the_trailers_stay_below_the_limit_of_clients(text: str) -> None:
    end = error_status(QuotaExceeded(text, 1.0, "x" * 128))
    content = dict(end.metadata)["grpc-status-details-bin"]
    assert isinstance(content, bytes)
    percent = sum(1 if 0x20 <= byte <= 0x7E else 3 for byte in end.text.encode())
    assert percent + len(content) * 4 // 3 < 8000
