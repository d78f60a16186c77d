"""The model registry: serving versions, the state of every version, the legal transitions, and reports about the models.

The event loop reads, the control thread and the loads write. Shared data is replaced as a whole and never changed in place.

Ownership of `Registry`: `_serving` is replaced under `_lock` and read without it; `_records` is read and written under it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import itemgetter
from typing import Any, Literal

from headrace.config.model_config import is_version, name_problem
from headrace.config.traffic_config import Traffic
from headrace.core.clock import pause, stepwise
from headrace.core.errors import BadRequest, HeadraceError, NotFound, Unavailable
from headrace.core.response_bodies import IndexRow, TrafficReport, VersionStatistics
from headrace.inference.scheduling.sequences.directory import SequenceDirectory
from headrace.inference.scheduling.version_handle import VersionHandle
from headrace.observability.totals import to_triton


class State(Enum):
    """State of a model version; `triton_name` is its name in Triton's repository index."""

    UNKNOWN = "UNKNOWN"
    """Found in the repository, not read yet."""
    LOADING = "LOADING"
    """Its files are being read and its instances started."""
    READY = "READY"
    """It accepts requests."""
    UNAVAILABLE = "UNAVAILABLE"
    """It cannot serve: the model is broken, or all its instances died; the record has the reason."""
    UNLOADING = "UNLOADING"
    """It accepts no new requests and completes its queued ones."""
    UNLOADED = "UNLOADED"
    """It was unloaded, or never loaded because it was not requested."""

    @property
    def triton_name(self) -> str:
        """Name in Triton's repository index, which shows a model that is not loaded as UNAVAILABLE with the reason."""
        return State.UNAVAILABLE.value if self is State.UNLOADED else self.value


TRANSITIONS: dict[State, frozenset[State]] = {
    State.UNKNOWN: frozenset({State.LOADING, State.UNAVAILABLE, State.UNLOADED}),
    # UNLOADED: it waited for its engine and never served.
    State.LOADING: frozenset({State.READY, State.UNAVAILABLE, State.UNLOADED}),
    # A replaced version stays READY: the new one serves before the old one ends.
    State.READY: frozenset({State.UNLOADING, State.UNAVAILABLE}),
    # READY: a dead instance has been restarted.
    State.UNAVAILABLE: frozenset({State.LOADING, State.UNLOADING, State.READY}),
    # LOADING: loaded again while earlier requests still run.
    State.UNLOADING: frozenset({State.UNLOADED, State.UNAVAILABLE, State.LOADING}),
    State.UNLOADED: frozenset({State.LOADING}),
}


def transition(current: State, following: State) -> State:
    """Return the next state if the transition is legal.

    Args:
        current: present state.
        following: next state.

    Raises:
        ValueError: the transition is illegal; a bug in the caller.
    """
    if following not in TRANSITIONS[current]:
        raise ValueError(f"a version cannot go from {current.name} to {following.name}")
    return following


# Maximum number of indexed names and of suggestions.
MAX_NAMES = 256
MAX_SUGGESTIONS = 3
_MAX_LENGTH = 64
_SEPARATORS = re.compile(r"[._\-\s]+")


class SimilarNames:
    """Finds names that differ by one character (added, left out, replaced or swapped), by case or by separators.

    Each name is stored under its text without case and separators, and under that text with each single character left out
    (SymSpell, W. Garbe). A search uses the same keys of its own name, so it takes at most 65 look-ups.

    Args:
        names: names to search; the first `MAX_NAMES` in alphabetical order.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names: dict[str, list[str]] = {}
        for name in sorted(names)[:MAX_NAMES]:
            for key in _keys(name):
                self._names.setdefault(key, []).append(name)

    def find(self, name: str) -> list[str]:
        """Return at most `MAX_SUGGESTIONS` similar names; names that differ only by case and separators first, then
        alphabetically.
        """
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
    if len(plain) > 2:  # one of two characters left out would match too many names
        yield from {plain[:index] + plain[index + 1 :] for index in range(len(plain))} - {plain}


ReadyWhen = Literal["any", "all"]


@dataclass(frozen=True, slots=True)
class Serving:
    """Serving versions of one model.

    Attributes:
        handles: by version number, ascending.
        labels: version number by label.
        config: the configuration in Triton's JSON.
        remarks: by version, text shown beside READY in the index.
        substitutes: by version, reason why the CPU serves although the configuration requires a GPU.
        traffic: shares of the versions in requests that name none; None for the latest version.
        by_name: handle by version number and label, None for a label of a version that does not serve; "" is the latest, with
            `traffic` the stable version.
    """

    handles: dict[str, VersionHandle]
    labels: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
    substitutes: Mapping[str, str] = field(default_factory=dict)
    traffic: Traffic | None = None
    by_name: Mapping[str, VersionHandle | None] = field(init=False)

    def __post_init__(self) -> None:
        by_name: dict[str, VersionHandle | None] = dict(self.handles)
        by_name |= {label: self.handles.get(version) for label, version in self.labels.items()}
        by_name[""] = next(reversed(self.handles.values()), None)
        if self.traffic is not None:
            by_name[""] = self.handles.get(self.traffic.stable_version(sorted(self.handles, key=int)))
        object.__setattr__(self, "by_name", by_name)


# Triton's text: its example clients compare the beginning of the message.
_UNKNOWN = "Request for unknown model:"
_MAX_LISTED_VERSIONS = 16


def placement(parameters: Mapping[str, object]) -> dict[str, str]:
    """Return the placement of a version from its metadata, by name without "headrace."."""
    return {name: str(parameters[f"headrace.{name}"]) for name in PLACEMENT if f"headrace.{name}" in parameters}


def _statistics(name: str, version: str, handle: VersionHandle) -> VersionStatistics:
    return {**to_triton(name, version, handle.recorder.totals()), "headrace": placement(handle.spec.parameters)}


PLACEMENT = ("runtime", "device", "precision", "artefact", "not_on_gpu")
_UNLOADED = "unloaded"


@dataclass(slots=True)
class _Record:
    state: State
    reason: str


# States that readiness does not count: never loaded, or unloaded on purpose.
_INACTIVE = frozenset({State.UNLOADING, State.UNLOADED})


def _do_nothing(*_: object) -> None:
    """Default of `Registry.on_published` and `Registry.on_traffic`."""


class Registry:
    """All models, their versions and states.

    Args:
        ready_when: "any": the server is ready while one model serves; "all": while every model that should serve does.
        is_starting: an unknown name may be that of a model until the initial load has ended.

    Attributes:
        generation: number of changes of the serving versions, from 1.
        on_published: called after each of these changes by the thread that has made it, and may wait.
        on_traffic: called with a model and its traffic, None for none, when that has changed; must not wait.
        traffic_report: returns shares, states and figures of a model's traffic; None without any.
        sequences: versions with live sequences; one that is being unloaded serves the sequences that it has.
    """

    def __init__(self, ready_when: ReadyWhen = "any", is_starting: bool = False) -> None:
        self._lock = threading.Lock()
        self._ready_when = ready_when
        self._serving: Mapping[str, Serving] = {}
        self.on_published: Callable[[], None] = _do_nothing
        self.on_traffic: Callable[[str, Traffic | None], None] = _do_nothing
        self.traffic_report: Callable[[str], TrafficReport | None] = lambda _name: None
        self._traffic_changes: dict[str, tuple[Traffic | None, Traffic]] = {}  # of the configuration, and in force
        self._configured_traffic: dict[str, Traffic] = {}  # of serving models
        self.generation = 1
        self._records: dict[tuple[str, str], _Record] = {}
        self._numbers: dict[str, set[str]] = {}  # versions with a record, by model
        self._pipelines: dict[str, Serving] = {}  # those of `_serving` that call other models
        self._similar: tuple[Mapping[str, Serving], SimilarNames] = ({}, SimilarNames(()))
        self._used: dict[tuple[str, str], VersionHandle] = {}  # those of `_serving` that were loaded or had a request
        self._complete, self._is_starting = False, is_starting
        self.sequences = SequenceDirectory()

    # For the protocols

    def lease(self, name: str, version: str) -> VersionHandle:
        """Lease a version of a model.

        Args:
            name: name of the model.
            version: version number or label; "" is the latest.

        Raises:
            NotFound: no such model or version.
            BadRequest: the name or version is not well formed.
            Unavailable: the version does not serve now.
        """
        while True:
            serving = self._serving.get(name)
            handle = serving.by_name.get(version) if serving is not None else None
            if handle is None:
                ending = self.sequences.lease_ending(name, version)
                if ending is not None:
                    return ending
                raise self._missing(name, version)
            if handle.lease():
                return handle

    @property
    def pipelines(self) -> dict[str, Serving]:
        """The serving models that call others, by name."""
        with self._lock:
            return dict(self._pipelines)

    def serving(self, name: str, version: str) -> VersionHandle | None:
        """Return the version that serves under a number or label, "" for the latest, without a lease; None if there is none."""
        serving = self._serving.get(name)
        return serving.by_name.get(version) if serving is not None else None

    def selections(self) -> Sequence[tuple[str, VersionHandle]]:
        """Return each number and label ("" for the latest) of each model, with the version that it selects.

        Without the "" of a model with traffic: its requests are distributed.
        """
        return [
            (version, handle)
            for serving in self._serving.values()
            for version, handle in serving.by_name.items()
            if handle is not None and (version or serving.traffic is None)
        ]

    def traffic(self, name: str) -> Traffic | None:
        """Return the traffic in force of a model; None without any."""
        serving = self._serving.get(name)
        return None if serving is None else serving.traffic

    def versions(self, name: str) -> Sequence[str]:
        """Return the serving versions, ascending."""
        serving = self._serving.get(name)
        return list(serving.handles) if serving is not None else []

    def config(self, model: str, version: str = "") -> Mapping[str, object]:
        """Return the configuration in force, in Triton's JSON; raises the errors of `lease`."""
        return self._find(model, version)[0].config

    def statistics(self, name: str, version: str) -> list[VersionStatistics]:
        """Return statistics in Triton's JSON, of all models if `name` is "", of all versions if `version` is "".

        Raises:
            NotFound, BadRequest, Unavailable: see `lease`.
        """
        if not name:
            rows = []
            for source in self.sources():
                rows.append(_statistics(*source))
                pause()
            return rows
        serving, handle = self._find(name, version)
        return [
            _statistics(name, number, other)
            for number, other in serving.handles.items()
            if not version or other is handle
        ]

    def index(self) -> list[IndexRow]:
        """Return name, version, state and reason of every known version; of one that serves, how many instances are left."""
        with self._lock:  # only for the copy: the event loop takes it too
            records = [(*key, record.state, record.reason) for key, record in self._records.items()]
        rows: list[IndexRow] = []
        for name, version, state, reason in sorted(records, key=itemgetter(0, 1)):
            handle = self.serving(name, version) if state is State.READY else None
            if handle is not None and (shortage := handle.shortage()):
                reason = f"{shortage}; {reason}" if reason else shortage
            rows.append({"name": name, "version": version, "state": state.triton_name, "reason": reason})
            pause()
        return rows

    def ready(self) -> bool:
        """Return whether the server is ready for traffic.

        Never ready: before the initial load has ended, while the server drains, and while a serving version has lost
        all its instances or its process. Such a loss is a fault of this replica, which another one may not have. A
        version that cannot be loaded is broken in every replica: with "all" it makes the server not ready, with "any"
        only if no model serves. Versions that should not serve (never loaded, unloaded) do not count. A version that is
        loaded later counts when its load has ended. A server without models is ready.
        """
        serving = self._serving
        if not self._complete or not all(
            handle.evicted  # first, as thousands may be
            # A pipeline is as ready as its models, one of which may be unloaded on purpose.
            or handle.calls
            or (handle.ready and ((process_status := handle.process_status) is None or process_status.up))
            for _, _, handle in self.used_sources()
        ):
            return False
        if serving and self._ready_when == "any":
            return True
        with self._lock:
            return not any(record.state is State.UNAVAILABLE for record in self._records.values())

    def model_counts(self) -> tuple[int, int]:
        """Return the number of models that are READY in every version that should serve, and the number of models that should
        serve.
        """
        with self._lock:
            states: dict[str, bool] = {}
            for (name, _), record in self._records.items():
                if record.state not in _INACTIVE:
                    states[name] = states.get(name, True) and record.state is State.READY
        return sum(states.values()), len(states)

    # For metrics

    def sources(self) -> Iterable[tuple[str, str, VersionHandle]]:
        """Return model name, version and handle of everything that serves."""
        return [
            (name, version, handle)
            for name, serving in self._serving.items()
            for version, handle in serving.handles.items()
        ]

    def used_sources(self) -> Iterable[tuple[str, str, VersionHandle]]:
        """Return `sources` without versions that were never loaded and had no request: of thousands, some may be in use."""
        with self._lock:
            return [(*key, handle) for key, handle in self._used.items()]

    def states(self) -> Sequence[tuple[str, str, str, bool]]:
        """Return name, version and state of every known version, and whether it serves but is not in `used_sources`.

        The version is "" before a model's versions are known.
        """
        with self._lock:  # only for the copy: the event loop takes it too
            records, used = list(self._records.items()), set(self._used)
        states = []
        for key, record in stepwise(sorted(records, key=itemgetter(0))):
            state = record.state
            states.append((*key, state.name, state is State.READY and key not in used))
        return states

    # For the control thread and the loads

    def set_complete(self, complete: bool) -> None:
        """Record that the initial load has ended (True), or that the server drains (False)."""
        self._complete, self._is_starting = complete, False

    def mark(self, name: str, version: str, state: State, reason: str = "") -> None:
        """Move a version to a state.

        Args:
            name: name of the model.
            version: version number; "" before the model's versions are known.
            state: next state.
            reason: text shown beside the state.
        """
        with self._lock:
            record = self._record(name, version, State.UNKNOWN)
            if state is not State.UNKNOWN:
                record.state = transition(record.state, state)
            record.reason = reason

    def state(self, name: str, version: str) -> State | None:
        """Return the state of a version, None if it is unknown; "" is the model before its versions are known."""
        with self._lock:
            record = self._records.get((name, version))
            return record.state if record is not None else None

    def set_reason(self, name: str, reason: str, version: str = "", state: State = State.READY) -> None:
        """Set the reason shown beside the versions of a model in a state, or beside one version."""
        with self._lock:
            for number in self._numbers.get(name, ()):
                record = self._records[name, number]
                if record.state is state and version in ("", number):
                    record.reason = reason

    def mark_waiting(self, name: str, reason: str, is_serving: bool) -> None:
        """Show that new versions of a model are not loaded yet: as LOADING, or beside the versions that serve meanwhile.

        Args:
            name: name of the model.
            reason: what the load waits for.
            is_serving: versions of it serve.
        """
        if is_serving:
            self.set_reason(name, f"the new version is not loaded yet: {reason}")
            return
        if self.state(name, "") is not State.LOADING:
            self.mark(name, "", State.LOADING)
        self.set_reason(name, reason, "", State.LOADING)

    def mark_loading(self, name: str, versions: Iterable[str]) -> None:
        """Replace the record of a model whose versions were unknown by those of its versions, as LOADING."""
        with self._lock:
            for version in versions:
                record = self._record(name, version, State.UNKNOWN)
                if record.state is not State.LOADING:
                    record.state, record.reason = transition(record.state, State.LOADING), ""
            self._drop(name, "")

    def _record(self, name: str, version: str, state: State) -> _Record:
        """Return the record of a version, a new one in `state` if there is none; call it with `_lock` held."""
        self._numbers.setdefault(name, set()).add(version)
        return self._records.setdefault((name, version), _Record(state, ""))

    def _drop(self, name: str, version: str) -> None:
        """Remove the record of a version, if there is one; call it with `_lock` held."""
        if self._records.pop((name, version), None) is not None:
            self._numbers[name].discard(version)
            if not self._numbers[name]:
                del self._numbers[name]

    def update_health(self, name: str, version: str) -> None:
        """Mark a serving version UNAVAILABLE if it cannot serve, e.g. as all its instances have died, READY again if it can; and
        the pipelines that call it.
        """
        with self._lock:
            self._update_health(name, version)
            self._update_callers(name)

    def _update_health(self, name: str, version: str) -> None:
        serving, record = self._serving.get(name), self._records.get((name, version))
        if serving is None or record is None or version not in serving.handles:
            return
        problem = serving.handles[version].problem()
        if record.state is State.READY and problem:
            record.state, record.reason = transition(record.state, State.UNAVAILABLE), problem
        elif record.state is State.UNAVAILABLE:
            if not problem:
                record.state = transition(record.state, State.READY)
            record.reason = problem or serving.remarks.get(version, "")

    def _update_callers(self, name: str) -> None:
        """Update the pipelines that call a model, directly or by another pipeline."""
        names, updated = [name], {name}
        while names:
            called = names.pop()
            for caller, serving in self._pipelines.items():
                for version, handle in serving.handles.items():
                    if called in handle.calls:
                        self._update_health(caller, version)
                        if caller not in updated:
                            updated.add(caller)
                            names.append(caller)

    def mark_unloaded(self, name: str, version: str) -> None:
        """Mark a version UNLOADED after its last request has completed; ignored if it has been loaded again."""
        with self._lock:
            record = self._records.get((name, version))
            if record is not None and record.state is State.UNLOADING:
                record.state, record.reason = transition(record.state, State.UNLOADED), _UNLOADED

    def mark_all_unloaded(self, name: str) -> None:
        """Mark all versions of a model UNLOADED that are not still UNLOADING."""
        with self._lock:
            if len(self._numbers.get(name, ())) > 1:
                self._drop(name, "")
            for record in [self._records[name, version] for version in self._numbers.get(name, ())]:
                if record.state in (State.UNLOADING, State.UNLOADED):
                    continue
                if record.state not in (State.UNKNOWN, State.LOADING):
                    record.state = transition(record.state, State.UNLOADING)
                record.state, record.reason = transition(record.state, State.UNLOADED), _UNLOADED

    def forget(self, name: str, version: str) -> None:
        """Remove the record of a version; "" is the record of a model before its versions are known."""
        with self._lock:
            self._drop(name, version)

    def names(self) -> set[str]:
        """Return the names of all models with a record."""
        with self._lock:
            return set(self._numbers)

    def prune(self, name: str, keep: Iterable[str] = ()) -> None:
        """Remove the records of a model's versions, except serving, loading and unloading ones and those in `keep`."""
        active = {State.READY, State.LOADING, State.UNLOADING}
        with self._lock:
            serving = self._serving.get(name)
            versions = {*keep, *(serving.handles if serving is not None else ())}
            for version in list(self._numbers.get(name, ())):
                if version not in versions and self._records[name, version].state not in active:
                    self._drop(name, version)

    def publish(self, name: str, serving: Serving | None) -> None:
        """Replace the serving versions of a model (None: none serve).

        LOADING versions become READY, or UNAVAILABLE if all their instances have died since. So do the pipelines that call the
        model.
        """
        with self._lock:
            all_serving = dict(self._serving)
            before = all_serving.pop(name, None)
            for version in () if before is None else before.handles:
                self._used.pop((name, version), None)
            traffic = None
            if serving is not None and serving.handles:
                ordered = dict(sorted(serving.handles.items(), key=lambda item: int(item[0])))
                traffic = self._traffic_in_force(name, serving.traffic)
                all_serving[name] = replace(serving, handles=ordered, traffic=traffic)
                for version, handle in ordered.items():
                    if not handle.is_unused:  # else `set_used` follows
                        self._used[name, version] = handle
                    record = self._record(name, version, State.LOADING)
                    remark = serving.remarks.get(version, "")
                    if record.state is State.LOADING:
                        problem = handle.problem()
                        record.state = transition(record.state, State.UNAVAILABLE if problem else State.READY)
                        record.reason = problem or remark
                    elif record.state is State.READY:
                        record.reason = remark
            self._serving = all_serving
            self._pipelines.pop(name, None)
            if name in all_serving and any(handle.calls for handle in all_serving[name].handles.values()):
                self._pipelines[name] = all_serving[name]
            self.generation += 1
            self._update_callers(name)
            if serving is None:
                self._traffic_changes.pop(name, None)
            if name not in all_serving:
                self._configured_traffic.pop(name, None)
            if traffic is not None or (before is not None and before.traffic is not None):
                self.on_traffic(name, traffic)
        self.on_published()

    def set_used(self, handle: VersionHandle) -> None:
        """Note the first request of a version that began evicted; from any thread."""
        name, version = handle.spec.name, handle.spec.version
        with self._lock:
            serving = self._serving.get(name)
            if serving is not None and serving.handles.get(version) is handle:
                self._used[name, version] = handle

    def _traffic_in_force(self, name: str, configured: Traffic | None) -> Traffic | None:
        """Return the traffic that a request has set, unless the configuration has changed since; called with the lock."""
        origin, traffic = self._traffic_changes.get(name, (None, None))
        if traffic is not None and origin == configured:
            return traffic
        self._traffic_changes.pop(name, None)
        if configured is None:
            self._configured_traffic.pop(name, None)
        else:
            self._configured_traffic[name] = configured
        return configured

    def set_traffic(self, name: str, traffic: Traffic | None) -> None:
        """Use other traffic for a model until its configuration changes or it is unloaded.

        Args:
            name: of the model; ignored if it does not serve.
            traffic: None for that of the configuration.
        """
        with self._lock:
            self._set_traffic(name, traffic)
        self.on_published()

    def traffic_changes(self) -> dict[str, tuple[Traffic | None, Traffic]]:
        """Return, for each model whose traffic `set_traffic` has changed, the configured traffic and the present one."""
        with self._lock:
            return self._traffic_changes.copy()

    def restore_traffic(self, changes: Mapping[str, Sequence[Any]]) -> None:
        """Take over the changes of another process, before the models are loaded."""
        self._traffic_changes.update({name: (configured, traffic) for name, (configured, traffic) in changes.items()})

    def replace_traffic(self, name: str, before: Traffic, traffic: Traffic) -> None:
        """Use other traffic for a model if `before` is in force; see `set_traffic`."""
        with self._lock:
            if self.traffic(name) == before:
                self._set_traffic(name, traffic)
        self.on_published()

    def _set_traffic(self, name: str, traffic: Traffic | None) -> None:
        serving, configured = self._serving.get(name), self._configured_traffic.get(name)
        if serving is None:
            return
        if traffic is None:
            self._traffic_changes.pop(name, None)
            traffic = configured
        else:
            self._traffic_changes[name] = configured, traffic
        self._serving = {**self._serving, name: replace(serving, traffic=traffic)}
        self.generation += 1
        self.on_traffic(name, traffic)

    def substitutes(self) -> list[tuple[str, str, str]]:
        """Return (name, version, reason) of every version that the CPU serves although its configuration requires a GPU."""
        return [
            (name, version, reason)
            for name, serving in sorted(self._serving.items())
            for version, reason in serving.substitutes.items()
        ]

    def placements(self) -> dict[tuple[str, str], Mapping[str, object]]:
        """Placement of each serving version: runtime, device, precision, artefact, and the reason if it is not on a GPU."""
        return {(name, version): placement(handle.spec.parameters) for name, version, handle in self.sources()}

    def failures(self) -> list[tuple[str, str, str]]:
        """Return (name, version, reason) of every version that cannot serve."""
        with self._lock:
            return [
                (name, version, record.reason)
                for (name, version), record in sorted(self._records.items())
                if record.state is State.UNAVAILABLE
            ]

    def _find(self, name: str, version: str) -> tuple[Serving, VersionHandle]:
        serving = self._serving.get(name)
        handle = serving.by_name.get(version) if serving is not None else None
        if serving is None or handle is None:
            raise self._missing(name, version)
        return serving, handle

    def _missing(self, name: str, version: str) -> HeadraceError:
        quoted = f"{name[:128]!r}" + (f" version {version[:64]!r}" if version else "")
        serving = self._serving.get(name)
        version = serving.labels.get(version, version) if serving is not None else version
        with self._lock:
            records = [
                self._records[name, number]
                for number in sorted(self._numbers.get(name, ()))
                if not version or version == number or not number
            ]
        for record in records:
            if record.state is State.UNAVAILABLE:
                return Unavailable(f"model {quoted} cannot be served: {record.reason}", can_retry=False)
            if record.state in (State.UNKNOWN, State.LOADING):
                return Unavailable(f"model {quoted} is being loaded" + (f": {record.reason}" if record.reason else ""))
        if records:
            return Unavailable(f"model {quoted} is not loaded")
        if (name and name_problem(name) is not None) or (version and not is_version(version)):
            return BadRequest(
                f"{_UNKNOWN} {quoted} is not a valid name or version: names have letters, digits, '_', '-' and '.', "
                "versions are numbers or labels"
            )
        if self._is_starting:
            return Unavailable(f"the server is starting and has not listed its models: it may have model {quoted}")
        return NotFound(f"{_UNKNOWN} {quoted} is not found{self._hint(name, version)}")

    def suggestion(self, name: str) -> str:
        """Return a suggestion of similar model names, to append to an error message."""
        serving, similar = self._similar
        if serving is not self._serving:  # built once for each set of serving models
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
        # Triton's text, which its example clients compare.
        number = (
            "" if version.isdecimal() else f"failed to get model version from specified version string '{version}', "
        )
        return f": {number}it has {available}"
