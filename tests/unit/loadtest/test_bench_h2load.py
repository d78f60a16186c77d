"""Parsing of h2load's output, and refused results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.bench import h2load
from loadtest.bench.wrk import LoadFailed

REPORT = """\
starting benchmark...
spawning thread #0: 4 total client(s). 8000 total requests
Application protocol: h2c
progress: 100% done

finished in 1.15s, 6954.95 req/s, 1.22MB/s
requests: 8000 total, 8000 started, 8000 done, 7998 succeeded, 2 failed, 1 errored, 0 timeout
status codes: 7998 2xx, 0 3xx, 0 4xx, 1 5xx
traffic: 1.40MB (1469419) total, 23.73KB (24300) headers (space savings 96.25%), 976.56KB (1000000) data
                     min         max         mean         sd        +/- sd
time for request:     2.06ms     26.10ms      9.16ms      1.60ms    96.09%
"""
GOOD = h2load.CallSample(calls=8000, succeeded=8000, calls_per_s=6954.95, data_bytes=8000 * 125)


def test_report_is_read() -> None:
    assert h2load.parse(REPORT) == replace(GOOD, succeeded=7998)


def test_a_long_run_is_read_too() -> None:
    """h2load writes minutes as "1m23s", and sizes with other units."""
    report = REPORT.replace("finished in 1.15s", "finished in 1m23.00s").replace("976.56KB", "0.93GB")
    assert h2load.parse(report) == replace(GOOD, succeeded=7998)


@pytest.mark.parametrize("text", ["", "[ERROR] could not connect", REPORT.split("traffic")[0]])
def test_output_without_a_report_fails(text: str) -> None:
    with pytest.raises(LoadFailed, match="no report"):
        h2load.parse(text)


def test_success_is_every_call_and_every_byte() -> None:
    h2load.require_success(GOOD, answer_bytes=120)
    with pytest.raises(LoadFailed, match="only 7999 succeeded"):
        h2load.require_success(replace(GOOD, succeeded=7999), answer_bytes=120)
    # grpc-status stands in trailers that h2load skips: a call that fails brings no message and counts as a success.
    with pytest.raises(LoadFailed, match="answered with an error"):
        h2load.require_success(replace(GOOD, data_bytes=GOOD.data_bytes - 125), answer_bytes=120)


def test_a_missing_h2load_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LoadFailed, match="apt-get install nghttp2-client"):
        h2load.require()
