"""Quotas that the engine process keeps: charges by name, refusals, and the end of the engine."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from headrace.core.access import ALL_SCOPES, Grant, Principal, QuotaBucket, RemoteBucket
from headrace.core.clock import NS_PER_S
from headrace.core.errors import QuotaExceeded, Unavailable
from headrace.core.limits import ClientLimits, Limits
from headrace.core.quota import Quota
from headrace.server.front_ends import frames, remote_quotas
from headrace.server.front_ends.errors import describe_error
from headrace.server.front_ends.inference import FrontEndHttp, ServedModels
from headrace.server.front_ends.remote_quotas import RemoteQuotas
from headrace.wire.access.access_control import KeyAccess
from headrace.wire.http.origins import OriginPolicy
from headrace.wire.requests.request_options import RequestOptionsReader
from headrace.wire.requests.services import InferenceServices

from tests.support import models
from tests.support.access_recorder import AccessRecorder
from tests.support.front_end_pair import open_pair
from tests.support.keys import Keys

BUCKET = RemoteBucket("shop", Quota(2.0, 1))


def run(test: Any) -> None:
    uvloop.run(asyncio.wait_for(test(), 60))


def test_a_refusal_is_repeated_without_the_engine_until_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 1000
    monkeypatch.setattr(remote_quotas, "monotonic_ns", lambda: now_ns)

    async def test() -> None:
        nonlocal now_ns
        sent: list[frames.Buffer] = []
        quotas = RemoteQuotas(asyncio.get_running_loop(), sent.append)
        bucket = RemoteBucket("shop", Quota(2.0, 1))
        waiting = asyncio.ensure_future(quotas.charge(bucket))
        await asyncio.sleep(0)
        assert frames.parse_message(bytes(sent[0]), 0, len(sent[0])).content == "shop"
        refusal = QuotaExceeded("client 'shop' exceeded", 0.5, "shop")
        quotas.on_charged(1, describe_error(refusal))
        with pytest.raises(QuotaExceeded, match="client 'shop' exceeded") as caught:
            await waiting
        assert (caught.value.retry_after_s, caught.value.client) == (0.5, "shop")
        now_ns += NS_PER_S // 4
        with pytest.raises(QuotaExceeded) as caught:
            await quotas.charge(bucket)
        assert (caught.value.retry_after_s, caught.value.client, len(sent)) == (0.25, "shop", 1)
        now_ns += NS_PER_S // 4
        waiting = asyncio.ensure_future(quotas.charge(bucket))
        await asyncio.sleep(0)
        assert len(sent) == 2
        quotas.on_charged(2, None)
        await waiting

    run(test)


def test_refusals_have_the_text_of_the_bucket_that_is_charged() -> None:
    bucket, remote = QuotaBucket("shop", Quota(2.0, 1)), RemoteBucket("shop", Quota(2.0, 1))
    bucket.charge(0)
    with pytest.raises(QuotaExceeded) as expected:
        bucket.charge(0)
    remote.mark_empty(NS_PER_S // 2)
    with pytest.raises(QuotaExceeded) as caught:
        remote.check(0)
    assert str(caught.value) == str(expected.value)
    assert caught.value.retry_after_s == expected.value.retry_after_s
    Principal("shop", Grant(ALL_SCOPES, bucket=remote)).admit("any")


def test_the_end_of_the_engine_ends_charges_and_a_cancelled_one_is_forgotten() -> None:
    async def test() -> None:
        quotas = RemoteQuotas(asyncio.get_running_loop(), lambda _frame: None)
        first, second = (asyncio.ensure_future(quotas.charge(BUCKET)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        quotas.on_charged(1, None)
        quotas.fail_all("the engine has ended")
        with pytest.raises(Unavailable, match="the engine has ended"):
            await second
        assert not quotas._waiting
        with pytest.raises(Unavailable):
            await ServedModels().charge(BUCKET)

    run(test)


ROW = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}).encode()


def test_front_ends_serve_keys_with_quotas_by_themselves(tmp_path: Path) -> None:
    """Over two front ends, `burst` requests are accepted in all; nothing is passed on."""
    models.add_model(tmp_path / "repository", "row_sums", models.row_sums())
    keys = Keys(tmp_path)
    keys.add("shop", scopes=["infer"], models=["row_*"], quota={"requests_per_s": 1e-5, "burst": 5})
    keys.write()
    engine_keys = KeyAccess(keys.path)

    async def pass_on(*_: Any) -> None:
        raise AssertionError("the request was passed on")

    async def test() -> None:
        async with open_pair(tmp_path / "repository", 2) as pair:
            pair.engine.charge = engine_keys.charge
            applications = []
            for front_end in pair.front_ends:
                served = ServedModels()
                served.current = front_end
                access = KeyAccess(keys.path, None, RemoteBucket)
                applications.append(application(served, access, pass_on))
            headers = [(b"authorization", f"Bearer {keys.keys['shop']}".encode())]
            calls = [request(applications[n % 2], headers) for n in range(12)]
            assert Counter(await asyncio.gather(*calls)) == {200: 5, 429: 7}

    run(test)


def application(served: ServedModels, access: KeyAccess, pass_on: Any) -> FrontEndHttp:
    absent: Any = None
    reader = RequestOptionsReader(access=access)
    services = InferenceServices(
        models=cast(Any, served),
        regions=absent,
        observer=AccessRecorder(),
        extensions=(),
        options_reader=reader,
        quotas=served,
    )
    return FrontEndHttp(services, served, ClientLimits(Limits()), OriginPolicy(), pass_on)


async def request(target: FrontEndHttp, headers: list[tuple[bytes, bytes]]) -> int:
    incoming = [{"type": "http.request", "body": ROW, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return incoming.pop(0) if incoming else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        sent.append(dict(message))

    scope = {"type": "http", "method": "POST", "path": "/v2/models/row_sums/infer", "headers": headers}
    await target(scope, receive, send)
    return int(sent[0]["status"])
