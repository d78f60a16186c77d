"""Settings and hooks of every test."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
from collections.abc import Iterator

import hypothesis
import pytest
from _pytest.runner import runtestprotocol
from headrace.core.completion import Mailbox

from tests.support.examples import examples

# Two busy cores make single examples slow now and then; that says nothing about the code.
hypothesis.settings.register_profile("headrace", deadline=None, max_examples=examples(100))
# CI draws the same examples every time, so that a red build is the commit's fault.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=examples(100))
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "headrace")

# A slow test takes most of a minute on quiet cores, and many times that beside others.
SLOW_TIMEOUT_S = 900

COLLECTED = pytest.StashKey[tuple[pytest.Item, ...]]()
REPEATED = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPEATED] = []


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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test that measures time once more if it fails: the machine may have been slow for a moment."""
    if item.get_closest_marker("timing") is None:
        return None
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if any(report.failed for report in reports):
        item.config.stash[REPEATED].append(f"{item.nodeid}: {_last_line(reports)}")
        item._initrequest()  # type: ignore[attr-defined]  # values of its fixtures are those of the first run
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _last_line(reports: list[pytest.TestReport]) -> str:
    return next(str(report.longrepr).strip().splitlines()[-1] for report in reports if report.failed)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Name the tests that ran twice in the last lines of the run."""
    for name in config.stash[REPEATED]:
        print(f"ran twice: {name}")


# More than any step of a coroutine test takes on busy cores.
COROUTINE_TIMEOUT_S = 100


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of a coroutine test."""
    with asyncio.Runner() as created:
        yield created


@pytest.fixture
def mailbox(runner: asyncio.Runner) -> Mailbox:
    """Completions on the event loop of a coroutine test."""
    return Mailbox(runner.get_loop())


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    runner: asyncio.Runner = pyfuncitem._request.getfixturevalue("runner")
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def main() -> None:
        async with asyncio.timeout(COROUTINE_TIMEOUT_S):
            await pyfuncitem.obj(**arguments)

    runner.run(main())
    return True
