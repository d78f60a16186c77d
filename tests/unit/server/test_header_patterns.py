"""Patterns of forwarded headers: whole names, credentials, invalid patterns, no exponential time, a bounded table."""

from __future__ import annotations

import argparse

import pytest
from headrace.core.errors import BadRequest
from headrace.core.request import InferRequest
from headrace.server import settings
from headrace.server.settings import header_matcher
from headrace.wire.requests.forwarded_headers import ForwardedHeaders, add_headers
from headrace.wire.requests.request_options import RequestOptionsReader

NAMES = (
    "x-tenant",
    "x-tenant-id",
    "ax-tenant",
    "authorization",
    "cookie",
    "x-api-key",
    "proxy-authorization",
    "accept",
)


def forwarded(pattern: str) -> ForwardedHeaders:
    return ForwardedHeaders(*header_matcher(pattern))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("X-Tenant", ["x-tenant"]),
        ("(?-i)X-Tenant", []),
        ("x-tenant.*", ["x-tenant", "x-tenant-id"]),
        (".*", ["x-tenant", "x-tenant-id", "ax-tenant", "accept"]),
        (".*auth.*|cooki[e]|(authorization|a).*|proxy-.*", ["ax-tenant", "accept"]),
        ("(Authorization|x-(a|b))", []),
        ("(Authorization|x-api-key)", ["authorization", "x-api-key"]),
        ("x-(tenant|a)|proxy-authorization|cookie", ["x-tenant", "cookie", "proxy-authorization"]),
    ],
)
def test_names_that_a_pattern_forwards(pattern: str, names: list[str]) -> None:
    selects = forwarded(pattern).selects
    assert {name for name in NAMES if selects(name)} == set(names)


@pytest.mark.parametrize(
    "name", ["te", "content-length", "origin", "grpc-timeout", "headrace.sequence_id", "a-bin", ":path", "a" * 129]
)
def test_headers_of_the_transport_and_reserved_names_are_never_forwarded(name: str) -> None:
    assert not forwarded(f".*|{name}").selects(name)


@pytest.mark.parametrize("pattern", ["[", "(?=a)b", "a)|(b", "((a{100}){100}){100}", r"(a)\1"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_invalid_pattern_ends_the_start(protocol: str, pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser, {})
    with pytest.raises(SystemExit):
        parser.parse_args([f"--{protocol}-header-forward-pattern", pattern])
    assert "is no regular expression of header names (" in capsys.readouterr().err


@pytest.mark.parametrize("pattern", ["(a*)*b", "(a|aa)+b", "(.*a){40}b", "(a?){120}a{120}b"])
def test_a_pattern_that_backtracks_forever_elsewhere_returns(pattern: str) -> None:
    assert not forwarded(pattern).selects("a" * 128)


def test_results_are_kept_for_a_bounded_number_of_names() -> None:
    matched: list[str] = []
    headers = ForwardedHeaders(lambda name: not matched.append(name), frozenset())
    for _ in range(2):
        assert all(headers.selects(f"x-{number}") for number in range(3000))
    assert len(matched) == 2 * 3000 - 1024


def test_values_are_utf_8() -> None:
    reader = RequestOptionsReader(forwarded=forwarded("x-.*"), grpc_forwarded=forwarded("y-.*"))
    headers = [(b"x-a", "é".encode()), (b"x-b", b"\xe9"), (b"y-c", b"c"), (b"traceparent", b"t")]
    assert reader.read(reader.values(headers)).forwarded == {"x-a": "é", "x-b": "\N{REPLACEMENT CHARACTER}"}
    assert reader.grpc.read(reader.grpc.values(headers)).forwarded == {"y-c": "c"}
    assert "é" not in repr(reader.read(reader.values(headers)))
    reader.set_routing_headers(frozenset({"x-a", "z"}))
    options = reader.grpc.read(reader.grpc.values([*headers, (b"z", b"z")]))
    assert (options.forwarded, options.routing) == ({"y-c": "c"}, {"x-a": "Ã©", "z": "z"})


def test_without_patterns_both_protocols_have_one_reader_with_a_plain_table() -> None:
    reader = RequestOptionsReader()
    assert reader.grpc is reader
    assert type(reader.wire_names) is dict


def test_a_parameter_of_the_same_name_in_another_case_is_refused() -> None:
    request = InferRequest(inputs={}, rows=1, shape_key=None, received_ns=0, parameters={"X-A": 1})
    with pytest.raises(BadRequest, match="'X-A' is also a header") as caught:
        add_headers(request, {"x-a": "secret"})
    assert "secret" not in str(caught.value)
