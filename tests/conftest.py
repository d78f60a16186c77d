"""Settings and hooks of every test."""

from __future__ import annotations

import gc
import os

import hypothesis
import pytest

from tests.support.examples import examples

# Two busy cores make single examples slow now and then; that says nothing about the code.
hypothesis.settings.register_profile("headrace", deadline=None, max_examples=examples(100))
# CI draws the same examples every time, so that a red build is the commit's fault.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=examples(100))
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "headrace")

# A slow test takes most of a minute on quiet cores, and many times that beside others.
SLOW_TIMEOUT_S = 900

COLLECTED = pytest.StashKey[tuple[pytest.Item, ...]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the collection as it is before `-m` and `-k` deselect tests; give slow tests more time."""
    config.stash[COLLECTED] = tuple(items)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


def pytest_collection_finish() -> None:
    """Exempt modules and test items from garbage collection: they live to the end of the session.

    Many fixtures run a full collection to see that memory is released. With the 8,000 test items it would take about
    half a second each time.
    """
    gc.collect()
    gc.freeze()
