"""Which models pipelines call: load order, dependents, cycles, models without use."""

from __future__ import annotations

import pytest
from headrace.models.dependencies import DependencyGraph, load_order


def graph(**members: str) -> DependencyGraph:
    result = DependencyGraph()
    for name, called in members.items():
        result.set(name, called.split())
    return result


def test_dependents_are_direct_and_indirect_callers_the_nearest_first() -> None:
    pipelines = graph(outer="inner c", inner="a b", other="c")
    assert pipelines.dependents("a") == ["inner", "outer"]
    assert pipelines.dependents("c") == ["other", "outer"]
    assert pipelines.dependents("outer") == []
    pipelines.set("outer", ())
    assert pipelines.dependents("a") == ["inner"]
    assert pipelines.members("outer") == frozenset()


def test_dependents_of_a_cycle_end() -> None:
    assert graph(a="b", b="a").dependents("a") == ["b"]


@pytest.mark.parametrize(
    ("members", "name", "cycle"),
    [
        ({"a": "b", "b": "c", "c": "a"}, "a", ["a", "b", "c", "a"]),
        ({"a": "a"}, "a", ["a", "a"]),
        ({"a": "b", "b": "c d", "c": "d"}, "a", []),
        # A cycle behind it is not its own.
        ({"a": "b", "b": "c", "c": "b"}, "a", []),
    ],
)
def test_a_cycle_is_found_with_its_chain(members: dict[str, str], name: str, cycle: list[str]) -> None:
    assert graph(**members).cycle(name) == cycle


def test_models_without_another_caller_have_no_use_left() -> None:
    pipelines = graph(outer="inner shared a", inner="b c", other="shared c")
    assert pipelines.unused_without("outer") == ["a", "inner", "b"]
    assert pipelines.unused_without("other") == []
    assert pipelines.unused_without("b") == []


def test_models_are_loaded_before_the_pipelines_that_call_them() -> None:
    order = load_order({"a": [], "outer": ["inner", "z"], "inner": ["y", "a"], "y": [], "z": [], "last": ["missing"]})
    assert order == ["a", "y", "inner", "z", "outer", "last"]
    assert set(load_order({"a": ["b"], "b": ["a"]})) == {"a", "b"}


def test_a_long_chain_needs_no_recursion() -> None:
    members = {str(number): [str(number + 1)] for number in range(5000)}
    assert load_order(members)[0] == "4999"
