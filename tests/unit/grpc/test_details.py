"""Error details of a failed call besides code and text, read like gRPC's clients do."""

from __future__ import annotations

import grpc
import pytest
from headrace.core.errors import (
    BadRequest,
    HeadraceError,
    ModelFailed,
    Overloaded,
    QuotaExceeded,
    Unavailable,
    WouldMiss,
)
from headrace.grpc.status import CODES, error_status

from tests.support.rich_status import retry_delay_s, rich_status


def test_the_codes_are_those_of_grpcio() -> None:
    assert {code.name: code.value[0] for code in grpc.StatusCode} == CODES


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
