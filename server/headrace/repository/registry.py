"""The model registry: which versions serve, the state of every version, and the legal steps between states.

The event loop reads and the control thread writes. What is read is replaced as a whole and never changed in place.

Ownership of `Registry`: `_serving` is replaced under `_lock` and read without it; `_records` is read and written under it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

from headrace.core.errors import BadRequest, HeadraceError, NotFound, Unavailable
from headrace.core.model_config import is_version, name_problem
from headrace.observability.counters import to_triton
from headrace.scheduling.handle import ModelHandle


class State(Enum):
    """State of a model version; `triton_name` is its name in Triton's repository index."""

    UNKNOWN = "UNKNOWN"
    """Found in the repository, not looked at yet."""
    LOADING = "LOADING"
    """Its files are being read, its instances started."""
    READY = "READY"
    """It serves."""
    UNAVAILABLE = "UNAVAILABLE"
    """It cannot serve; the reason is kept (a broken model, or all its instances died)."""
    UNLOADING = "UNLOADING"
    """It takes no new requests and finishes what it has."""
    UNLOADED = "UNLOADED"
    """It was unloaded, or never loaded because it was not requested."""

    @property
    def triton_name(self) -> str:
        """The word of Triton's repository index, which has none for a model that is not loaded but the reason."""
        return State.UNAVAILABLE.value if self is State.UNLOADED else self.value


TRANSITIONS: dict[State, frozenset[State]] = {
    State.UNKNOWN: frozenset({State.LOADING, State.UNAVAILABLE, State.UNLOADED}),
    # UNLOADED: nothing of it served yet, since it waited for its engine.
    State.LOADING: frozenset({State.READY, State.UNAVAILABLE, State.UNLOADED}),
    # A version that is replaced stays READY: there is no moment in which it does not serve.
    State.READY: frozenset({State.UNLOADING, State.UNAVAILABLE}),
    # READY: one of its instances that had died is back.
    State.UNAVAILABLE: frozenset({State.LOADING, State.UNLOADING, State.READY}),
    # LOADING: wanted again while the requests of before are still being answered.
    State.UNLOADING: frozenset({State.UNLOADED, State.UNAVAILABLE, State.LOADING}),
    State.UNLOADED: frozenset({State.LOADING}),
}


def transition(current: State, following: State) -> State:
    """The following state, if the step is legal.

    Raises:
        ValueError: it is not; a fault of ours.
    """
    if following not in TRANSITIONS[current]:
        raise ValueError(f"a version cannot go from {current.name} to {following.name}")
    return following


# Names beyond these are not indexed, and no more than three are suggested.
MAX_NAMES = 256
MAX_SUGGESTIONS = 3
_MAX_LENGTH = 64
_SEPARATORS = re.compile(r"[._\-\s]+")


class SimilarNames:
    """Finds names that differ by one character (added, left out, replaced or swapped), by case or by separators.

    Each name is stored under its text without case and separators and under that text with each one character left out
    (SymSpell, W. Garbe). A search looks up the same texts of its own name, so it takes at most 65 look-ups.

    Args:
        names: to search; the first `MAX_NAMES` in alphabetical order.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names: dict[str, list[str]] = {}
        for name in sorted(names)[:MAX_NAMES]:
            for key in _keys(name):
                self._names.setdefault(key, []).append(name)

    def find(self, name: str) -> list[str]:
        """At most `MAX_SUGGESTIONS` similar names, the same but for case and separators first, then alphabetically."""
        if len(name) > _MAX_LENGTH:
            return []
        exact = self._names.get(_plain(name), [])
        matches = {similar for key in _keys(name) for similar in self._names.get(key, [])}
        return sorted(matches, key=lambda similar: (similar not in exact, similar))[:MAX_SUGGESTIONS]


def _plain(name: str) -> str:
    return _SEPARATORS.sub("", name.lower())


def _keys(name: str) -> Iterator[str]:
    plain = _plain(name)
    yield plain
    if len(plain) > 2:  # of two characters, one left out is similar to nothing
        yield from {plain[:index] + plain[index + 1 :] for index in range(len(plain))} - {plain}


ReadyWhen = Literal["any", "all"]


@dataclass(frozen=True, slots=True)
class Serving:
    """One model's versions that serve.

    Attributes:
        handles: by version, ascending.
        labels: names for versions.
        config: the configuration in Triton's JSON.
        remarks: by version, what the index is to say beside READY.
        substitutes: by version, why the CPU serves though the configuration asks for a GPU.
        by_name: handles by version and by label; "" is the latest version.
    """

    handles: dict[str, ModelHandle]
    labels: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
    substitutes: Mapping[str, str] = field(default_factory=dict)
    by_name: Mapping[str, ModelHandle | None] = field(init=False)

    def __post_init__(self) -> None:
        by_name: dict[str, ModelHandle | None] = dict(self.handles)
        by_name |= {label: self.handles.get(version) for label, version in self.labels.items()}
        by_name[""] = next(reversed(self.handles.values()), None)
        object.__setattr__(self, "by_name", by_name)


# Triton's words: its example clients look for them at the beginning of the message.
_UNKNOWN = "Request for unknown model:"
_MAX_LISTED_VERSIONS = 16


def placement(parameters: Mapping[str, object]) -> dict[str, object]:
    """Placement of a version from its metadata, by name without "headrace."."""
    return {name: parameters[f"headrace.{name}"] for name in PLACEMENT if f"headrace.{name}" in parameters}


def _statistics(name: str, version: str, handle: ModelHandle) -> dict[str, object]:
    return {**to_triton(name, version, handle.recorder.totals()), "headrace": placement(handle.spec.parameters)}


PLACEMENT = ("runtime", "device", "precision", "artefact", "not_on_gpu")
_DEAD = "all its instances have died"


@dataclass(slots=True)
class _Record:
    state: State
    reason: str


# Not counted by readiness: never loaded, or unloaded on purpose.
_INACTIVE = frozenset({State.UNLOADING, State.UNLOADED})


class Registry:
    """All models, their versions and states.

    Args:
        ready_when: "any": the server is ready while a model serves; "all": while every model that should serve does.
    """

    def __init__(self, ready_when: ReadyWhen = "any") -> None:
        self._lock = threading.Lock()
        self._ready_when = ready_when
        self._serving: Mapping[str, Serving] = {}
        self._records: dict[tuple[str, str], _Record] = {}
        self._similar: tuple[Mapping[str, Serving], SimilarNames] = ({}, SimilarNames(()))
        self._complete = False

    # For the front ends

    def lease(self, name: str, version: str) -> ModelHandle:
        """Lease a version; "" is the latest.

        Raises:
            NotFound: no such model or version.
            BadRequest: nor could there be one of that name.
            Unavailable: there is one, but it does not serve now.
        """
        while True:
            serving = self._serving.get(name)
            handle = serving.by_name.get(version) if serving is not None else None
            if handle is None:
                raise self._missing(name, version)
            if handle.lease():
                return handle

    def versions(self, name: str) -> Sequence[str]:
        """The versions that serve, ascending."""
        serving = self._serving.get(name)
        return list(serving.handles) if serving is not None else []

    def config(self, name: str, version: str) -> Mapping[str, object]:
        """The configuration in force; raises what `lease` raises."""
        serving = self._serving.get(name)
        if serving is None or serving.by_name.get(version) is None:
            raise self._missing(name, version)
        return serving.config

    def statistics(self, name: str, version: str) -> Sequence[Mapping[str, object]]:
        """Of all models if `name` is "", of all versions if `version` is ""; raises what `lease` raises."""
        serving = self._serving
        if not name:
            return [_statistics(model, number, handle) for model, number, handle in self.sources()]
        if name not in serving or serving[name].by_name.get(version) is None:
            raise self._missing(name, version)
        handle_of_version = serving[name].by_name[version] if version else None
        return [
            _statistics(name, number, handle)
            for number, handle in serving[name].handles.items()
            if handle_of_version is None or handle is handle_of_version
        ]

    def index(self) -> Sequence[Mapping[str, object]]:
        """Every version found, its state and reason."""
        with self._lock:
            return [
                {"name": name, "version": version, "state": record.state.triton_name, "reason": record.reason}
                for (name, version), record in sorted(self._records.items())
            ]

    def ready(self) -> bool:
        """Whether the server is ready for traffic.

        Never before the first loading is over, while the server drains, or while a version that serves has lost all its
        instances or its process: that is a fault of this replica, which another one may not have. A version that cannot be
        loaded is broken in every replica: with "all" it makes the server not ready, with "any" only if no model serves.
        Versions that are not to be served (never loaded, unloaded) do not count, nor does one that is loaded later on, until
        its loading has ended. A server that has nothing to serve is ready.
        """
        serving = self._serving
        if not self._complete or not all(
            handle.ready and ((process_status := handle.process_status) is None or process_status.up)
            for model in serving.values()
            for handle in model.handles.values()
        ):
            return False
        if serving and self._ready_when == "any":
            return True
        with self._lock:
            return not any(record.state is State.UNAVAILABLE for record in self._records.values())

    def model_counts(self) -> tuple[int, int]:
        """How many models are READY in every version that should be served, and how many should be served."""
        with self._lock:
            states: dict[str, bool] = {}
            for (name, _), record in self._records.items():
                if record.state not in _INACTIVE:
                    states[name] = states.get(name, True) and record.state is State.READY
        return sum(states.values()), len(states)

    # For metrics

    def sources(self) -> Iterable[tuple[str, str, ModelHandle]]:
        """Everything that serves."""
        return [
            (name, version, handle)
            for name, serving in self._serving.items()
            for version, handle in serving.handles.items()
        ]

    def states(self) -> Sequence[tuple[str, str, str]]:
        """Name, version ("" before they are known) and state of every version found."""
        with self._lock:
            return [(name, version, record.state.name) for (name, version), record in sorted(self._records.items())]

    # For the control thread

    def set_complete(self, complete: bool) -> None:
        """The first loading is over (True), or the server drains (False)."""
        self._complete = complete

    def mark(self, name: str, version: str, state: State, reason: str = "") -> None:
        """Move a version to a state."""
        with self._lock:
            record = self._records.setdefault((name, version), _Record(State.UNKNOWN, ""))
            if state is not State.UNKNOWN:
                record.state = transition(record.state, state)
            record.reason = reason

    def state(self, name: str, version: str) -> State | None:
        """State of a version, None if it is unknown; "" is the model before its versions are known."""
        with self._lock:
            record = self._records.get((name, version))
            return record.state if record is not None else None

    def set_reason(self, name: str, reason: str, version: str = "") -> None:
        """Set the reason shown beside the READY versions of a model, or beside one version."""
        with self._lock:
            for (model, number), record in self._records.items():
                if model == name and record.state is State.READY and version in ("", number):
                    record.reason = reason

    def set_loading_reason(self, name: str, version: str, reason: str) -> None:
        """Set the reason why a version is still LOADING."""
        with self._lock:
            record = self._records.get((name, version))
            if record is not None and record.state is State.LOADING:
                record.reason = reason

    def mark_dead(self, name: str, version: str) -> None:
        """All instances of the version that serves have died."""
        with self._lock:
            serving = self._serving.get(name)
            handle = serving.handles.get(version) if serving is not None else None
            record = self._records.get((name, version))
            if handle is not None and not handle.ready and record is not None and record.state is State.READY:
                record.state, record.reason = transition(record.state, State.UNAVAILABLE), _DEAD

    def mark_alive(self, name: str, version: str) -> None:
        """An instance of a version of which all had died serves again."""
        with self._lock:
            serving = self._serving.get(name)
            handle = serving.handles.get(version) if serving is not None else None
            record = self._records.get((name, version))
            if serving is None or handle is None or not handle.ready or record is None:
                return
            if record.state is State.UNAVAILABLE:
                record.state, record.reason = transition(record.state, State.READY), serving.remarks.get(version, "")

    def mark_unloaded(self, name: str, version: str, reason: str = "unloaded") -> None:
        """The last request of a version that was unloaded is answered; no news if it is wanted again."""
        with self._lock:
            record = self._records.get((name, version))
            if record is not None and record.state is State.UNLOADING:
                record.state, record.reason = transition(record.state, State.UNLOADED), reason

    def mark_all_unloaded(self, name: str, reason: str) -> None:
        """Nothing of a model serves: what is not still ending is UNLOADED."""
        with self._lock:
            for (model, _), record in self._records.items():
                if model != name or record.state in (State.UNLOADING, State.UNLOADED):
                    continue
                if record.state not in (State.UNKNOWN, State.LOADING):
                    record.state = transition(record.state, State.UNLOADING)
                record.state, record.reason = transition(record.state, State.UNLOADED), reason

    def forget(self, name: str, version: str) -> None:
        """Drop the record of a version; "" is the one a model has before its versions are known."""
        with self._lock:
            self._records.pop((name, version), None)

    def names(self) -> set[str]:
        """Every model that has a record."""
        with self._lock:
            return {name for name, _ in self._records}

    def prune(self, name: str, keep: Iterable[str] = ()) -> None:
        """Drop the records of a model's versions that neither serve nor end nor are in `keep`."""
        active = {State.READY, State.LOADING, State.UNLOADING}
        with self._lock:
            serving = self._serving.get(name)
            versions = {*keep, *(serving.handles if serving is not None else ())}
            for model, version in list(self._records):
                if model == name and version not in versions and self._records[model, version].state not in active:
                    del self._records[model, version]

    def serving(self, name: str) -> Serving | None:
        """What serves under a name."""
        return self._serving.get(name)

    def publish(self, name: str, serving: Serving | None) -> Serving | None:
        """Swap what serves under a name (None: nothing); gives what served before.

        Its versions that were LOADING are READY with that, or UNAVAILABLE if all their instances have died meanwhile.
        """
        with self._lock:
            all_serving = dict(self._serving)
            before = all_serving.pop(name, None)
            if serving is not None and serving.handles:
                ordered = dict(sorted(serving.handles.items(), key=lambda item: int(item[0])))
                all_serving[name] = replace(serving, handles=ordered)
                for version, handle in ordered.items():
                    record = self._records.setdefault((name, version), _Record(State.LOADING, ""))
                    remark = serving.remarks.get(version, "")
                    if record.state is State.LOADING:
                        record.state = transition(record.state, State.READY if handle.ready else State.UNAVAILABLE)
                        record.reason = remark if handle.ready else _DEAD
                    elif record.state is State.READY:
                        record.reason = remark
            self._serving = all_serving
            return before

    def substitutes(self) -> list[tuple[str, str, str]]:
        """(name, version, reason) of everything that the CPU serves though its configuration asks for a GPU."""
        return [
            (name, version, reason)
            for name, serving in sorted(self._serving.items())
            for version, reason in serving.substitutes.items()
        ]

    def placements(self) -> dict[tuple[str, str], Mapping[str, object]]:
        """Placement of each serving version: runtime, device, precision, artefact, and the reason if it is not on a GPU."""
        return {(name, version): placement(handle.spec.parameters) for name, version, handle in self.sources()}

    def failures(self) -> list[tuple[str, str, str]]:
        """(name, version, reason) of everything that cannot serve."""
        with self._lock:
            return [
                (name, version, record.reason)
                for (name, version), record in sorted(self._records.items())
                if record.state is State.UNAVAILABLE
            ]

    def _missing(self, name: str, version: str) -> HeadraceError:
        quoted = f"{name[:128]!r}" + (f" version {version[:64]!r}" if version else "")
        serving = self._serving.get(name)
        version = serving.labels.get(version, version) if serving is not None else version
        with self._lock:
            records = [
                record
                for (model, number), record in self._records.items()
                if model == name and (not version or version == number or not number)
            ]
        for record in records:
            if record.state is State.UNAVAILABLE:
                return Unavailable(f"model {quoted} cannot be served: {record.reason}")
            if record.state in (State.UNKNOWN, State.LOADING):
                return Unavailable(f"model {quoted} is being loaded" + (f": {record.reason}" if record.reason else ""))
        if records:
            return Unavailable(f"model {quoted} is not loaded")
        if (name and name_problem(name) is not None) or (version and not is_version(version)):
            return BadRequest(
                f"{_UNKNOWN} {quoted} is none: names are letters, digits, '_', '-' and '.', versions numbers and labels"
            )
        return NotFound(f"{_UNKNOWN} {quoted} is not found{self._hint(name, version)}")

    def suggestion(self, name: str) -> str:
        """Suggest similar model names, to follow an error message."""
        serving, similar = self._similar
        if serving is not self._serving:  # built once for each set of models that serve
            serving = self._serving
            similar = SimilarNames(self.names() | serving.keys())
            self._similar = (serving, similar)
        suggestions = " or ".join(f"'{suggestion}'" for suggestion in similar.find(name))
        return f"; did you mean {suggestions}?" if suggestions else "; the repository index lists what there is"

    def _hint(self, name: str, version: str) -> str:
        serving = self._serving.get(name)
        if serving is None:
            return self.suggestion(name)
        available = ", ".join([*serving.handles, *sorted(serving.labels)][:_MAX_LISTED_VERSIONS])
        # Triton's words, which its example clients look for.
        number = (
            "" if version.isdecimal() else f"failed to get model version from specified version string '{version}', "
        )
        return f": {number}it has {available}"
