"""Which models the pipelines of a repository call: load order, cycles, and what an unload leaves without use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class DependencyGraph:
    """Models by the pipeline that calls them. Ownership: the control thread."""

    def __init__(self) -> None:
        self._members: dict[str, frozenset[str]] = {}

    def set(self, name: str, members: Iterable[str]) -> None:
        """Set the models that a pipeline calls; none for a model that is no pipeline."""
        called = frozenset(members)
        if called:
            self._members[name] = called
        else:
            self._members.pop(name, None)

    def members(self, name: str) -> frozenset[str]:
        """Return the models that a pipeline calls itself."""
        return self._members.get(name, frozenset())

    def dependents(self, name: str) -> list[str]:
        """Return the pipelines that call a model, directly or by another pipeline, the nearest first."""
        found: list[str] = []
        called = [name]
        while called:
            following = sorted(pipeline for pipeline, members in self._members.items() if members & set(called))
            called = [pipeline for pipeline in following if pipeline not in found and pipeline != name]
            found += called
        return found

    def cycle(self, name: str) -> list[str]:
        """Return a chain of pipelines from `name` back to itself; empty if there is none."""
        chains = [[name]]
        seen: set[str] = set()
        while chains:
            chain = chains.pop()
            for member in sorted(self.members(chain[-1])):
                if member == name:
                    return [*chain, name]
                if member not in seen:
                    seen.add(member)
                    chains.append([*chain, member])
        return []

    def unused_without(self, name: str) -> list[str]:
        """Return the models that a pipeline calls, directly or by another pipeline, and that no other pipeline calls.

        The pipeline that calls a model comes before it.
        """
        removed = [name]
        for pipeline in removed:
            for member in sorted(self.members(pipeline)):
                users = {other for other, members in self._members.items() if member in members}
                if member not in removed and users <= set(removed):
                    removed.append(member)
        return removed[1:]


def load_order(members: Mapping[str, Iterable[str]]) -> list[str]:
    """Return names in the order in which they are loaded: the models of a pipeline before it, else in the given order.

    Args:
        members: models that each name calls; those that are no key are left out. Cycles are broken anywhere.
    """
    order: dict[str, None] = {}
    begun: set[str] = set()

    for first in members:
        stack = [(first, False)]
        while stack:
            name, is_done = stack.pop()
            if is_done:
                order[name] = None
            elif name in members and name not in begun:
                begun.add(name)
                stack.append((name, True))
                stack += [(member, False) for member in sorted(members[name], reverse=True)]
    return list(order)
