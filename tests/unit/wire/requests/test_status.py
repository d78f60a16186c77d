"""Statuses and codes of errors: the table against the tree of errors."""

from __future__ import annotations

import inspect

import pytest
from headrace.core import errors
from headrace.wire.requests import status

TREE = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.HeadraceError)]

EXPECTED = {
    "BadRequest": (400, "INVALID_ARGUMENT"),
    "Aborted": (409, "ABORTED"),
    "Conflict": (409, "ALREADY_EXISTS"),
    "Unauthenticated": (401, "UNAUTHENTICATED"),
    "Forbidden": (403, "PERMISSION_DENIED"),
    "Cancelled": (499, "CANCELLED"),
    "ConfigError": (400, "INVALID_ARGUMENT"),
    "DeadlineExceeded": (504, "DEADLINE_EXCEEDED"),
    "HeadraceError": (500, "INTERNAL"),
    "BatchLost": (500, "INTERNAL"),
    "ModelFailed": (500, "INTERNAL"),
    "NotFound": (404, "NOT_FOUND"),
    "Overloaded": (503, "UNAVAILABLE"),
    "QueueTimeout": (503, "UNAVAILABLE"),
    "QuotaExceeded": (429, "RESOURCE_EXHAUSTED"),
    "TooLarge": (413, "RESOURCE_EXHAUSTED"),
    "Unavailable": (503, "UNAVAILABLE"),
    "Unsupported": (400, "UNIMPLEMENTED"),
    "WouldMiss": (503, "UNAVAILABLE"),
}


def make(kind: type[errors.HeadraceError]) -> errors.HeadraceError:
    return errors.ConfigError([]) if kind is errors.ConfigError else kind("text")


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_every_error_has_its_status_and_code(kind: type[errors.HeadraceError]) -> None:
    error = make(kind)
    assert (status.http_status(error), status.grpc_code(error)) == EXPECTED[kind.__name__]


def test_every_error_has_a_row_of_its_own() -> None:
    assert {kind for kind, _, _ in status.STATUS} == set(TREE)


def test_no_row_hides_a_later_one() -> None:
    kinds = [kind for kind, _, _ in status.STATUS]
    for index, kind in enumerate(kinds):
        assert not any(issubclass(later, kind) for later in kinds[index + 1 :])


def test_the_reasons_for_the_metrics_differ() -> None:
    reasons = [kind.reason for kind in TREE]
    assert len(set(reasons)) == len(reasons)


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (errors.Overloaded("full", 0.2), 1),
        (errors.Overloaded("full", 2.0), 2),
        (errors.QueueTimeout("late", 2.1), 3),
        (errors.Unavailable("loading"), 1),
        (errors.WouldMiss("late", 0.05), 1),
        (errors.QuotaExceeded("too many", 3.5, "shop"), 4),
        (errors.DeadlineExceeded("late"), None),
        (errors.BadRequest("no"), None),
        (errors.ModelFailed("no"), None),
    ],
)
def test_retry_after_is_in_whole_seconds_and_only_for_temporary_errors(
    error: errors.HeadraceError, seconds: int | None
) -> None:
    assert status.retry_after_s(error) == seconds
