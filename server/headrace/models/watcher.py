"""Watches the folders of models for changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.models import folders


@dataclass(slots=True)
class _Model:
    fingerprint: folders.Fingerprint
    since_ns: int
    scans: int
    reported: folders.Fingerprint


class Watcher:
    """Reports changed models once their fingerprint has been stable for the settle time, over at least two scans.

    Args:
        settle_ns: minimum time without a change, in nanoseconds.
    """

    def __init__(self, settle_ns: int) -> None:
        self._settle_ns = settle_ns
        self._models: dict[str, _Model] = {}

    def update(self, fingerprints: Mapping[str, folders.Fingerprint], now_ns: int) -> list[str]:
        """Compare the fingerprints of all models with the last scan and return the models to reload or unload, each once a
        change.

        A model without a fingerprint has been removed; a removal must be stable for the settle time too.

        Args:
            fingerprints: by model name.
            now_ns: monotonic nanoseconds.
        """
        due: list[str] = []
        for name in sorted(fingerprints.keys() | self._models.keys()):
            fingerprint = fingerprints.get(name, folders.ABSENT)
            model = self._models.get(name)
            if model is None:
                model = self._models[name] = _Model(fingerprint, now_ns, 0, folders.ABSENT)
            if model.fingerprint != fingerprint:
                model.fingerprint, model.since_ns, model.scans = fingerprint, now_ns, 0
            model.scans += 1
            if model.fingerprint == model.reported:
                if fingerprint == folders.ABSENT:
                    del self._models[name]
            elif model.scans > 1 and now_ns - model.since_ns >= self._settle_ns:
                model.reported = fingerprint
                due.append(name)
        return due

    @property
    def names(self) -> set[str]:
        """Models in the last scan, and removed ones whose removal is not stable yet."""
        return set(self._models)

    @property
    def is_changing(self) -> bool:
        """True while a model has changed and is not stable yet."""
        return any(model.fingerprint != model.reported for model in self._models.values())
