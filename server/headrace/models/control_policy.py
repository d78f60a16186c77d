"""Models that the control thread serves, and what requests may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelSelection:
    """The models to serve.

    Attributes:
        repositories: folders of models.
        names: models to load at start; None for all.
        model_filter: names of the served models, for each repository that is served in part.
    """

    repositories: Sequence[Path]
    names: frozenset[str] | None = None
    model_filter: Mapping[Path, frozenset[str]] = field(default_factory=dict)

    def includes(self, repository: Path, name: str) -> bool:
        """True if a model of a repository may be served."""
        return repository not in self.model_filter or name in self.model_filter[repository]


@dataclass(frozen=True, slots=True)
class ControlPolicy:
    """Policy for changes of the served models while the server runs.

    Attributes:
        mode: "none"; "explicit": by client requests; "poll": when files change.
        allow_override: a load request may contain a configuration and files.
        poll_interval_s: time between two scans of the repositories, in seconds.
        settle_s: a model's files must be unchanged for this time before they are loaded, in seconds.
        load_threads: number of loads that run at once.
    """

    mode: Literal["none", "explicit", "poll"] = "none"
    allow_override: bool = False
    poll_interval_s: float = 2.0
    settle_s: float = 1.0
    load_threads: int = 4
