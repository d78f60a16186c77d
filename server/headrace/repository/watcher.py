"""Which models of a watched repository have changed and have come to rest since. Knows no files and no threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.repository.file_look import GONE, Look


@dataclass(slots=True)
class _Model:
    look: Look
    since_ns: int
    looks: int
    done: Look


class Watcher:
    """Tells when to act: once a model has looked the same for the settle time, in two looks at least.

    Args:
        settle_ns: how long nothing may have changed, in nanoseconds.
    """

    def __init__(self, settle_ns: int) -> None:
        self._settle_ns = settle_ns
        self._models: dict[str, _Model] = {}

    def see(self, looks: Mapping[str, Look], now_ns: int) -> list[str]:
        """Take a look at all models and give those to act on, each only once for every way it looks.

        A model that is not among `looks` has been removed; that too must last before it counts.

        Args:
            looks: by model name.
            now_ns: monotonic.
        """
        due: list[str] = []
        for name in sorted(looks.keys() | self._models.keys()):
            look = looks.get(name, GONE)
            model = self._models.get(name)
            if model is None:
                model = self._models[name] = _Model(look, now_ns, 0, GONE)
            if model.look != look:
                model.look, model.since_ns, model.looks = look, now_ns, 0
            model.looks += 1
            if model.look == model.done:
                if look == GONE:
                    del self._models[name]
            elif model.looks > 1 and now_ns - model.since_ns >= self._settle_ns:
                model.done = look
                due.append(name)
        return due

    @property
    def names(self) -> set[str]:
        """Every model that is there, or was until a moment ago."""
        return set(self._models)

    @property
    def restless(self) -> bool:
        """True while some model has changed and is not at rest yet."""
        return any(model.look != model.done for model in self._models.values())
