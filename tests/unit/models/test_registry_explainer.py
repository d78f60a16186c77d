"""Bottlenecks of a model are explained without naming its clients."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from headrace.core.completion import Mailbox
from headrace.core.errors import QuotaExceeded
from headrace.core.quota import Quota
from headrace.inference.scheduling.policy import RateLimits
from headrace.models.explanation import explain

from tests.support.fakes import FakeModel, handle, infer_request


async def test_a_quota_is_explained_without_naming_the_client() -> None:
    served = handle(Mailbox(asyncio.get_running_loop()), FakeModel(), rate_limits=RateLimits(default=Quota(0.01)))
    await served.infer(infer_request(1, client="hunter2"))
    with pytest.raises(QuotaExceeded) as refused:
        served.infer(infer_request(2, client="hunter2"))
    served.record_failure(refused.value, 1)
    served.lease()
    registry: Any = SimpleNamespace(lease=lambda _model, _version: served, traffic_report=lambda _model: None)
    report = explain(registry, "fake", "1")
    assert (report["limit"], "the access log names the clients" in str(report["summary"])) == ("quota", True)
    assert "hunter2" not in str(report)
    assert served.close(60)
