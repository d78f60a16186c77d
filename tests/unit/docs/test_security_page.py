"""docs/security.md is true: the limits are those of the server, and every test that it names is there."""

from __future__ import annotations

import re

from headrace.core.limits import LIMIT_HELP, Limits

from tests.support.serving import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text()


def test_every_limit_is_listed_with_its_default() -> None:
    documented = {
        name.removeprefix("--").replace("-", "_"): (float(number.replace(",", "")), unit)
        for name, number, unit in re.findall(r"\| `([a-z_-]+)`(?:, no option)? \| ([0-9,]+) ?(KiB|MiB|)", PAGE)
    }
    factors = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}
    assert {name: number * factors[unit] for name, (number, unit) in documented.items()} == dict(Limits().table())


def test_options_are_distinguished_from_constants() -> None:
    assert {name.replace("-", "_") for name in re.findall(r"\| `--([a-z-]+)` \| [0-9,]+", PAGE)} == set(LIMIT_HELP)


def test_every_test_that_is_named_is_there() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)
    assert len(named) > 30
    for file, test in named:
        text = (ROOT / "tests" / "faults" / file).read_text()
        assert re.search(rf"^def {test}\(", text, re.MULTILINE), f"{file}::{test}"


def test_every_attack_has_a_line() -> None:
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)]
    assert {*range(1, 9), 12, 14, 15, 17, 18, 24} <= set(numbers)
    assert len(set(numbers)) == len(numbers)
