"""Principals: scopes, model patterns, quota, expiry, and changes in place."""

from __future__ import annotations

import pytest
from headrace.core import access
from headrace.core.access import ALL_SCOPES, Grant, OpenAccess, Principal, QuotaBucket, Scope
from headrace.core.clock import NS_PER_S
from headrace.core.errors import Forbidden, QuotaExceeded, Unauthenticated
from headrace.core.quota import Quota
from headrace.wire.requests.status import grpc_code, http_status


def test_a_principal_without_a_grant_is_unauthenticated() -> None:
    for call in (lambda p: p.admit("tiny"), lambda p: p.require(Scope.READ)):
        with pytest.raises(Unauthenticated, match="Authorization: Bearer KEY") as error:
            call(Principal())
        assert (http_status(error.value), grpc_code(error.value)) == (401, "UNAUTHENTICATED")


@pytest.mark.parametrize("scope", list(Scope))
def test_a_scope_allows_its_operations_and_no_other(scope: Scope) -> None:
    principal = Principal("web", Grant(frozenset({scope})))
    for other in Scope:
        if other is scope:
            principal.require(other, "tiny")
        else:
            with pytest.raises(Forbidden, match=f"needs the scope '{other}': the key of 'web' has {scope}") as error:
                principal.require(other, "tiny")
            assert (http_status(error.value), grpc_code(error.value)) == (403, "PERMISSION_DENIED")


def test_model_patterns_bound_the_models_and_hide_the_others() -> None:
    principal = Principal("web", Grant(ALL_SCOPES, ("tiny", "resnet*")))
    principal.admit("tiny")
    principal.require(Scope.READ, "resnet50")
    principal.require(Scope.READ)
    with pytest.raises(Forbidden) as error:
        principal.admit("secret")
    assert "secret" not in str(error.value)
    rows = [{"name": "tiny"}, {"name": "secret"}, {"name": "resnet18"}]
    assert [row["name"] for row in principal.filter_models(rows)] == ["tiny", "resnet18"]
    assert Principal("all", Grant(ALL_SCOPES)).filter_models(rows) == rows
    assert Principal().filter_models(rows) == []


def test_the_models_that_a_principal_caches_are_bounded() -> None:
    principal = Principal("web", Grant(ALL_SCOPES, ("m*",)))
    for number in range(5000):
        assert principal.allows_model(f"m{number}")
        assert not principal.allows_model(f"n{number}")
    assert len(principal._models) <= 1024


def test_revocation_and_updates_act_on_the_same_object() -> None:
    principal = Principal("web", Grant(ALL_SCOPES))
    principal.admit("tiny")
    principal.update(Grant(frozenset({Scope.READ}), ("tiny",)))
    with pytest.raises(Forbidden):
        principal.admit("tiny")
    principal.update(Grant(frozenset({Scope.INFER}), ("other",)))
    with pytest.raises(Forbidden):
        principal.admit("tiny")
    principal.revoke()
    with pytest.raises(Unauthenticated, match="revoked"):
        principal.admit("tiny")


def test_a_grant_ends_at_its_expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 1000
    monkeypatch.setattr(access, "monotonic_ns", lambda: now_ns)
    principal = Principal("web", Grant(ALL_SCOPES, expires_ns=2000))
    principal.admit("tiny")
    now_ns = 2000
    with pytest.raises(Unauthenticated, match="expired"):
        principal.admit("tiny")


def test_the_keys_of_a_name_share_one_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = NS_PER_S
    monkeypatch.setattr(access, "monotonic_ns", lambda: now_ns)
    bucket = QuotaBucket("web", Quota(2.0, 2))
    one, two = (Principal("web", Grant(ALL_SCOPES, bucket=bucket)) for _ in range(2))
    one.admit("tiny")
    two.require(Scope.READ)
    with pytest.raises(QuotaExceeded, match=r"2 requests/s \(burst 2\)") as error:
        one.admit("tiny")
    assert error.value.client == "web"
    assert error.value.retry_after_s == pytest.approx(0.5, abs=0.01)
    now_ns += NS_PER_S // 2
    two.admit("tiny")


def test_a_server_without_keys_has_one_anonymous_principal() -> None:
    open_access = OpenAccess()
    principal = open_access.authenticate("Bearer nonsense", "", None)
    for scope in Scope:
        principal.require(scope, "tiny")
    limited = OpenAccess(Principal("", Grant(frozenset({Scope.INFER}), cure="start with --insecure-control")))
    with pytest.raises(Forbidden, match="start with --insecure-control"):
        limited.anonymous.require(Scope.CONTROL)


def test_names_that_no_model_has_are_not_cached() -> None:
    principal = Principal("web", Grant(ALL_SCOPES, ("*",)))
    assert principal.allows_model("x" * 128)
    assert not principal.allows_model("x" * 10_000_000)
    assert list(principal._models) == ["x" * 128]
