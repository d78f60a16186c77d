from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from headrace.inference.scheduling import latency_table as dataplane
from headrace.inference.simulation.replay import StepLatency, Variation, parse_profile, profile_of


def test_a_line_costs_so_much_a_batch_and_so_much_a_row() -> None:
    table = parse_profile("450+20n").compute.table(64)
    assert (table[1], table[64]) == (470_000, 450_000 + 64 * 20_000)
    assert parse_profile("12.5 + 0.5*n").compute.table(2)[2] == 13_500
    assert set(parse_profile("300").compute.table(8)) == {300_000}


def test_between_two_sizes_the_time_is_interpolated_or_that_of_the_larger_one() -> None:
    entry = {"1": 100, "4": 400, "8": 480}
    assert profile_of(entry).compute.table(10)[1:] == tuple(
        round(us * 1000) for us in (100, 200, 300, 400, 420, 440, 460, 480, 480 + 380 / 7, 480 + 2 * 380 / 7)
    )
    padded = profile_of({"compute": entry, "padded": True}).compute.table(8)
    assert padded[1:] == (100_000, 400_000, 400_000, 400_000, 480_000, 480_000, 480_000, 480_000)


def test_a_file_has_steps(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"compute": {"8": 900, "1": 500}, "fill": "2+1n", "variation": 0.1}))
    profile = parse_profile(str(file))
    assert (profile.compute.table(8)[8], profile.fill.table(8)[8], profile.copy_in.table(8)[8]) == (900_000, 10_000, 0)
    assert profile.variation == 0.1


def test_a_saved_profile_of_a_server_is_used() -> None:
    entry = dataplane.LatencyTable()
    entry.seed({1: [100_000, 120_000, 110_000], 8: [400_000]})
    profile = profile_of({"name": "m", "version": "1", "profile": entry.table()})
    assert profile.compute.table(8)[1::7] == (110_000, 400_000)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"profile": []}, r"the profile is \{\}: use microseconds"),
        ({"profile": [{"rows": 1}]}, "use objects with rows and median_us"),
        ({"profile": [{"rows": 0, "median_us": 5.0}]}, "'0' is not a number of rows"),
        ([], "a profile is a JSON object"),
        ({"0": 5}, "'0' is not a number of rows"),
        ({"two": 5}, "'two' is not a number of rows"),
        ({"1": -5}, "is not a time: use microseconds"),
        ({"1": float("nan")}, "is not a time: use microseconds"),
        ({"1": True}, "is not a time: use microseconds"),
        ({"compute": "fast"}, "compute: 'fast' is not a time"),
        ({"compute": {}}, r"compute is \{\}: use microseconds"),
        ({"compute": "5", "fil": "5"}, "unknown key 'fil'"),
        ({"compute": "5", "padded": 1}, "padded is 1: use true or false"),
        ({"compute": "5", "variation": -1}, "variation is -1: use a number"),
    ],
)
def test_invalid_profiles_are_refused(document: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profile_of(document)


def test_a_file_that_is_no_profile_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json"):
        parse_profile(str(file))
    with pytest.raises(ValueError, match="450\\+20n"):
        parse_profile("quick")


@pytest.mark.parametrize("coefficient", [0.2, 1.0])
def test_times_have_the_requested_variation(coefficient: float) -> None:
    variation = Variation(coefficient, np.random.default_rng(3))
    times = np.array([variation.apply(1_000_000) for _ in range(50_000)])
    assert times.mean() == pytest.approx(1_000_000, rel=0.02)
    assert times.std() / times.mean() == pytest.approx(coefficient, rel=0.03)


def test_one_measured_size_is_not_extrapolated() -> None:
    assert StepLatency(((4, 100.0),)).table(8) == (100,) * 9
