"""The model registry: serving versions, the state of every version, the legal transitions, and reports about the models.

The event loop reads and the control thread writes. Shared data is replaced as a whole and never changed in place.

Ownership of `Registry`: `_serving` is replaced under `_lock` and read without it; `_records` is read and written under it.

All figures of reports are totals since the version was loaded. The reader computes rates, percentiles of the last
minute and curves from the difference of two responses: the server keeps no history, and requests pay nothing for being
observed.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Literal

from headrace.config.manifest import is_artefact_name, read_layers
from headrace.core.clock import NS_PER_MS, NS_PER_US, Clock, monotonic_ns
from headrace.core.errors import BadRequest, ConfigError, HeadraceError, NotFound, Unavailable
from headrace.core.model_config import is_version, name_problem
from headrace.observability.counters import FIRST_NATIVE, SCHEMA, to_triton
from headrace.repository.folders import find
from headrace.scheduling.bottlenecks import Bottleneck, LoadSnapshot, find_bottlenecks, snapshot_figures
from headrace.scheduling.handle import ModelHandle


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
        by_name: handle by version number and label, None for a label of a version that does not serve; "" is the latest.
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


# Triton's text: its example clients compare the beginning of the message.
_UNKNOWN = "Request for unknown model:"
_MAX_LISTED_VERSIONS = 16


def placement(parameters: Mapping[str, object]) -> dict[str, object]:
    """Return the placement of a version from its metadata, by name without "headrace."."""
    return {name: parameters[f"headrace.{name}"] for name in PLACEMENT if f"headrace.{name}" in parameters}


def _statistics(name: str, version: str, handle: ModelHandle) -> dict[str, object]:
    return {**to_triton(name, version, handle.recorder.totals()), "headrace": placement(handle.spec.parameters)}


PLACEMENT = ("runtime", "device", "precision", "artefact", "not_on_gpu")
_DEAD = "all its instances have died"
_UNLOADED = "unloaded"


@dataclass(slots=True)
class _Record:
    state: State
    reason: str


# States that readiness does not count: never loaded, or unloaded on purpose.
_INACTIVE = frozenset({State.UNLOADING, State.UNLOADED})


class Registry:
    """All models, their versions and states.

    Args:
        ready_when: "any": the server is ready while one model serves; "all": while every model that should serve does.
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
                raise self._missing(name, version)
            if handle.lease():
                return handle

    def versions(self, name: str) -> Sequence[str]:
        """Return the serving versions, ascending."""
        serving = self._serving.get(name)
        return list(serving.handles) if serving is not None else []

    def config(self, model: str, version: str = "") -> Mapping[str, object]:
        """Return the configuration in force, in Triton's JSON; raises the errors of `lease`."""
        return self._find(model, version)[0].config

    def statistics(self, name: str, version: str) -> Sequence[Mapping[str, object]]:
        """Return statistics in Triton's JSON, of all models if `name` is "", of all versions if `version` is "".

        Raises:
            NotFound, BadRequest, Unavailable: see `lease`.
        """
        if not name:
            return [_statistics(*source) for source in self.sources()]
        serving, handle = self._find(name, version)
        return [
            _statistics(name, number, other)
            for number, other in serving.handles.items()
            if not version or other is handle
        ]

    def index(self) -> Sequence[Mapping[str, object]]:
        """Return name, version, state and reason of every known version."""
        with self._lock:
            return [
                {"name": name, "version": version, "state": record.state.triton_name, "reason": record.reason}
                for (name, version), record in sorted(self._records.items())
            ]

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

    def sources(self) -> Iterable[tuple[str, str, ModelHandle]]:
        """Return model name, version and handle of everything that serves."""
        return [
            (name, version, handle)
            for name, serving in self._serving.items()
            for version, handle in serving.handles.items()
        ]

    def states(self) -> Sequence[tuple[str, str, str]]:
        """Return name, version and state of every known version; the version is "" before a model's versions are known."""
        with self._lock:
            return [(name, version, record.state.name) for (name, version), record in sorted(self._records.items())]

    # For the control thread

    def set_complete(self, complete: bool) -> None:
        """Record that the initial load has ended (True), or that the server drains (False)."""
        self._complete = complete

    def mark(self, name: str, version: str, state: State, reason: str = "") -> None:
        """Move a version to a state.

        Args:
            name: name of the model.
            version: version number; "" before the model's versions are known.
            state: next state.
            reason: text shown beside the state.
        """
        with self._lock:
            record = self._records.setdefault((name, version), _Record(State.UNKNOWN, ""))
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
            for (model, number), record in self._records.items():
                if model == name and record.state is state and version in ("", number):
                    record.reason = reason

    def update_health(self, name: str, version: str) -> None:
        """Mark a serving version UNAVAILABLE if all its instances have died, READY again if one has been restarted."""
        with self._lock:
            serving, record = self._serving.get(name), self._records.get((name, version))
            if serving is None or record is None or version not in serving.handles:
                return
            is_ready = serving.handles[version].ready
            if record.state is State.READY and not is_ready:
                record.state, record.reason = transition(record.state, State.UNAVAILABLE), _DEAD
            elif record.state is State.UNAVAILABLE and is_ready:
                record.state, record.reason = transition(record.state, State.READY), serving.remarks.get(version, "")

    def mark_unloaded(self, name: str, version: str) -> None:
        """Mark a version UNLOADED after its last request has completed; ignored if it has been loaded again."""
        with self._lock:
            record = self._records.get((name, version))
            if record is not None and record.state is State.UNLOADING:
                record.state, record.reason = transition(record.state, State.UNLOADED), _UNLOADED

    def mark_all_unloaded(self, name: str) -> None:
        """Mark all versions of a model UNLOADED that are not still UNLOADING."""
        with self._lock:
            for (model, _), record in self._records.items():
                if model != name or record.state in (State.UNLOADING, State.UNLOADED):
                    continue
                if record.state not in (State.UNKNOWN, State.LOADING):
                    record.state = transition(record.state, State.UNLOADING)
                record.state, record.reason = transition(record.state, State.UNLOADED), _UNLOADED

    def forget(self, name: str, version: str) -> None:
        """Remove the record of a version; "" is the record of a model before its versions are known."""
        with self._lock:
            self._records.pop((name, version), None)

    def names(self) -> set[str]:
        """Return the names of all models with a record."""
        with self._lock:
            return {name for name, _ in self._records}

    def prune(self, name: str, keep: Iterable[str] = ()) -> None:
        """Remove the records of a model's versions, except serving, loading and unloading ones and those in `keep`."""
        active = {State.READY, State.LOADING, State.UNLOADING}
        with self._lock:
            serving = self._serving.get(name)
            versions = {*keep, *(serving.handles if serving is not None else ())}
            for model, version in list(self._records):
                if model == name and version not in versions and self._records[model, version].state not in active:
                    del self._records[model, version]

    def publish(self, name: str, serving: Serving | None) -> None:
        """Replace the serving versions of a model (None: none serve).

        LOADING versions become READY, or UNAVAILABLE if all their instances have died since.
        """
        with self._lock:
            all_serving = dict(self._serving)
            all_serving.pop(name, None)
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

    def _find(self, name: str, version: str) -> tuple[Serving, ModelHandle]:
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
                f"{_UNKNOWN} {quoted} is not a valid name or version: names have letters, digits, '_', '-' and '.', "
                "versions are numbers or labels"
            )
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


# One report is shared by all requests within this time, and longer if creating it takes long: any number of viewers takes
# only a small share of the interpreter's time.
_FRESH_NS = 400 * NS_PER_MS
_SHARE = 20


class ServerOverview:
    """Status of all models for the server's own page; called on the event loop.

    Args:
        registry: registry of the models.
        repositories: folders of models.
        clock: monotonic nanoseconds.
    """

    def __init__(self, registry: Registry, repositories: Sequence[Path], clock: Clock = monotonic_ns) -> None:
        self._registry = registry
        self._repositories = repositories
        self._clock = clock
        self._started_ns = clock()
        self._stale_ns = self._started_ns
        self._status: Mapping[str, object] = {}
        self._refresh_task: asyncio.Task[None] | None = None

    async def status(self) -> Mapping[str, object]:
        """Return time, readiness, and for every version its state and reason, and its counters and gauges if it serves."""
        if self._refresh_task is None and self._clock() >= self._stale_ns:
            self._refresh_task = asyncio.create_task(self._refresh())
        if self._refresh_task is not None:
            # Shared by all callers: the cancellation of one must not cancel it for the others.
            await asyncio.shield(self._refresh_task)
        return self._status

    async def layers(self, model: str, version: str = "") -> Mapping[str, object]:
        """Return the compute time of each layer of a serving version, as measured by `headrace inspect --publish`.

        Args:
            model: name of the model.
            version: version number or label; "" is the latest.

        Raises:
            NotFound, Unavailable: no such version, or it does not serve.
            NotFound: the layers of the served file have not been measured.
        """
        handle = self._registry.lease(model, version)
        try:
            number, engine = handle.spec.version, str(handle.spec.parameters.get("engine.file", ""))
        finally:
            handle.release()
        folder = find(self._repositories, model)
        cure = f"measure them with `headrace inspect {model} --version {number} --publish`"
        try:
            report = None if folder is None else await asyncio.to_thread(read_layers, folder.path / number)
        except ConfigError as error:
            raise NotFound(str(error)) from None
        if report is None:
            raise NotFound(f"no layer times are published for model '{model}' version {number}: {cure}")
        # Reports of an engine that no longer serves are not shown; a model's own file has no engine name.
        if report.artefact != engine and (engine or is_artefact_name(report.artefact)):
            raise NotFound(f"the measured layers are those of {report.artefact}, which does not serve: {cure}")
        return report.to_json()

    async def _refresh(self) -> None:
        try:
            now_ns = self._clock()
            # Not on the event loop: a thousand models take a tenth of a second.
            self._status = await asyncio.to_thread(self._collect, now_ns)
            self._stale_ns = now_ns + max(_FRESH_NS, _SHARE * (self._clock() - now_ns))
        finally:
            self._refresh_task = None

    def _collect(self, now_ns: int) -> Mapping[str, object]:
        handles = {(model, version): handle for model, version, handle in self._registry.sources()}
        models = []
        for row in self._registry.index():
            handle = handles.get((str(row["name"]), str(row["version"])))
            models.append({**row, "serving": None if handle is None else _serving(handle)})
        models_ready, models_expected = self._registry.model_counts()
        return {
            "time_ns": now_ns,
            "uptime_ns": now_ns - self._started_ns,
            "ready": self._registry.ready(),
            "models_ready": models_ready,
            "models_expected": models_expected,
            "buckets_per_doubling": 1 << SCHEMA,
            "models": models,
        }


def _serving(handle: ModelHandle) -> Mapping[str, object]:
    spec, totals, load = handle.spec, handle.recorder.totals(), handle.load()
    latency = totals.phases["total"].native
    return {
        "platform": spec.platform,
        "engine": str(spec.parameters.get("engine.precision", "")),
        **{name: str(spec.parameters.get(f"headrace.{name}", "")) for name in PLACEMENT},
        "max_batch_size": spec.max_batch_size and handle.policy.batch.max_rows,
        "instances": handle.policy.instances,
        "living": load.instances,
        "restarts": handle.restarts,
        "parked": handle.evicted,
        "queued": load.depth,
        "wait_ns": load.wait_ns,
        "in_flight": load.in_flight,
        "late": load.late,
        "requests": totals.requests,
        "rows": totals.rows,
        "failures": dict(totals.failures),
        "batches": dict(totals.reasons),
        "sizes": {str(rows): size.count for rows, size in sorted(totals.sizes.items())},
        "queue_ns": totals.queue_ns,
        "assemble_ns": totals.assemble_ns,
        "compute_ns": totals.compute_ns,
        "split_ns": totals.split_ns,
        "total_ns": totals.request_ns,
        # Values that count as zero have the index below the first one, which ends where the first one begins.
        "latency": {str(FIRST_NATIVE - 1 + index): int(latency[index]) for index in latency.nonzero()[0].tolist()},
    }


def explain(registry: Registry, model: str, version: str = "") -> dict[str, object]:
    """Return the bottlenecks of a version, most important first, and the figures of the last seconds; thread-safe.

    Args:
        registry: registry of the versions.
        model: name of the model.
        version: version number or label; "" is the latest.

    Returns:
        name, version, limit (one word), summary (a sentence), findings (kind, explanation, cure, setting and
        expected of each) and numbers.

    Raises:
        NotFound, Unavailable: see `Registry.lease`.
    """
    handle = registry.lease(model, version)
    try:
        snapshot = LoadSnapshot(
            handle.recorder.recent(),
            handle.policy,
            handle.latency_table,
            handle.alive,
            handle.depth,
            handle.spec.max_batch_size > 0,
            handle.evicted,
        )
        load = handle.load(by_level=False)
        figures = {"predicted_wait_us": load.wait_ns / NS_PER_US, "late_since_load": load.late}
        bottlenecks = [*_off_gpu(handle), *find_bottlenecks(snapshot)]
        first = bottlenecks[0]
        return {
            "name": model,
            "version": handle.spec.version,
            "limit": first.kind,
            "summary": f"{first.explanation}; cure: {first.cure}" if first.cure else first.explanation,
            "findings": [asdict(bottleneck) for bottleneck in bottlenecks],
            "numbers": snapshot_figures(snapshot) | figures,
        }
    finally:
        handle.release()


def _off_gpu(handle: ModelHandle) -> list[Bottleneck]:
    """Return a bottleneck if the CPU serves a version although a GPU is present or requested; else empty."""
    reason = handle.spec.parameters.get("headrace.not_on_gpu")
    if not reason:
        return []
    explanation = f"{handle.spec.parameters.get('headrace.runtime')} runs it on the CPU, not on the GPU: {reason}"
    return [
        Bottleneck(
            "not_on_gpu", explanation, 'see docs/gpu.md, "Which runtime serves a model"', "optimization.precision"
        )
    ]
