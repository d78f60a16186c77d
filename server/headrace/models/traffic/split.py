"""Traffic of one model: selects a target for each request that names no version, and applies the promotion rules.

`RoutedHandle` is a version that was selected: it counts its answers and errors, and copies its requests.

Reports are read by other threads: they copy what the event loop changes, in one step of the interpreter.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

from headrace.config.traffic_config import ALL_SHARES, Traffic, model_of, share_units, target_order
from headrace.core.clock import Clock, monotonic_ns
from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import BadRequest, Conflict, HeadraceError, Unavailable
from headrace.core.request import InferRequest, InferResponse, ModelLoad
from headrace.core.response_bodies import TrafficReport, VersionTraffic
from headrace.inference.scheduling.version_handle import VersionHandle
from headrace.models.traffic.comparison import OutputComparison
from headrace.models.traffic.contract import contract_problem
from headrace.models.traffic.figures import Sums, VersionFigures, broken_rule, missing_evidence
from headrace.models.traffic.shadow import ShadowJob, ShadowQueue
from headrace.observability.metrics_traffic import TrafficRow
from headrace.wire.requests.status import http_status

logger = logging.getLogger("headrace.traffic")

# Cancelled requests have 499.
_FIRST_SERVER_ERROR = 500


class ServedVersions(Protocol):
    """The served versions; see `headrace.models.registry.Registry`."""

    def lease(self, name: str, version: str) -> VersionHandle:
        """Lease a version, "" for the stable one; raises NotFound or Unavailable."""

    def serving(self, name: str, version: str) -> VersionHandle | None:
        """Return the version that serves under a number, "" for the stable one; None if there is none."""

    def versions(self, name: str) -> Sequence[str]:
        """Return the numbers of the served versions, ascending."""


_HASH_BITS = 64


class ShareSelector:
    """Distributes requests in fixed shares, without chance.

    After N requests each target has had its share of N, less or more by under one request. The slots of a target have a release
    time and a deadline; the earliest deadline among the released ones is next. This keeps every deadline where the shares sum up
    to one (Tijdeman, The chairman assignment problem, 1980).

    Args:
        shares: of each target, in units that sum up to `ALL_SHARES`.
    """

    __slots__ = ("_counts", "_shares", "_slot")

    def __init__(self, shares: Sequence[int]) -> None:
        if sum(shares) != ALL_SHARES:
            raise ValueError(f"the shares sum up to {sum(shares)}: they must sum up to {ALL_SHARES}")
        self._shares = tuple(shares)
        self._counts = [0] * len(shares)
        self._slot = 0

    def next(self) -> int:
        """Return the index of the next target."""
        slot, counts, selected, earliest = self._slot, self._counts, 0, -1
        for index, share in enumerate(self._shares):
            if share and counts[index] * ALL_SHARES // share <= slot:
                deadline = -(-(counts[index] + 1) * ALL_SHARES // share)
                if earliest < 0 or deadline < earliest:
                    selected, earliest = index, deadline
        counts[selected] += 1
        self._slot = slot + 1
        if self._slot == ALL_SHARES:  # each target has had exactly its share
            self._slot, self._counts = 0, [0] * len(counts)
        return selected


def sticky_index(model: str, value: str, shares: Sequence[int]) -> int:
    """Return the target of a header's value: equal in every process and after every restart.

    Args:
        model: name of the model, so that values are distributed anew for each model.
        value: of the header.
        shares: of each target, in units that sum up to `ALL_SHARES`. A larger share of the first target moves values to it only.
    """
    content = f"{model}\0{value}".encode("utf-8", "surrogatepass")
    point = int.from_bytes(blake2b(content, digest_size=_HASH_BITS // 8).digest(), "big") * ALL_SHARES >> _HASH_BITS
    for index, share in enumerate(shares):
        point -= share
        if point < 0:
            return index
    return len(shares) - 1


class RoutedCompletion(LoopCompletion):
    """Completion of a routed request: settled with the outcome of the version's own completion.

    Args:
        mailbox: of the event loop.
        inner: completion of the version.
        handle: that has started it.
        received_ns: monotonic arrival of the request.
        job: copy of the request, None for none.
    """

    __slots__ = ("_handle", "_inner", "_job", "_received_ns")

    def __init__(
        self, mailbox: Mailbox, inner: LoopCompletion, handle: RoutedHandle, received_ns: int, job: ShadowJob | None
    ) -> None:
        super().__init__(mailbox)
        self._inner: LoopCompletion | None = inner
        self._handle, self._received_ns, self._job = handle, received_ns, job
        if inner.woken:  # the request ran on the event loop
            self._take()
        else:
            inner.then(self._take)

    def _take(self) -> None:
        """Count the outcome of the version, and settle with it."""
        inner, job = self._inner, self._job
        self._inner = self._job = None
        if inner is None or self.is_settled:
            return
        outcome = inner.outcome or Unavailable("the request was withdrawn")
        if isinstance(outcome, InferResponse):
            self._handle.split.on_answer(self._handle, self._received_ns, job, outcome)
        self.settle_now(outcome)

    def finish(self) -> None:
        """Abandon the version's request if the caller has ended this one."""
        super().finish()
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.abandon()


class RoutedHandle:
    """A leased version, for `headrace.wire.requests.service`; implements `Handle`. Ownership: the event loop.

    Args:
        split: that has selected the version.
        target: version number, or "model:NAME" for a version of another model.
        handle: of the version.
        mailbox: of the event loop.
        figures: of the version.

    Attributes:
        split, target, handle, figures: see Args.
        spec, recorder, protocol_cache: of the version.
    """

    __slots__ = ("_mailbox", "figures", "handle", "protocol_cache", "recorder", "spec", "split", "target")

    def __init__(
        self, split: TrafficSplit, target: str, handle: VersionHandle, mailbox: Mailbox, figures: VersionFigures
    ) -> None:
        self.split, self.target, self.handle, self._mailbox, self.figures = split, target, handle, mailbox, figures
        self.spec, self.recorder, self.protocol_cache = handle.spec, handle.recorder, handle.protocol_cache

    @property
    def has_cache(self) -> bool:
        """True if responses may come from a response cache."""
        return self.handle.has_cache

    def admit(self) -> None:
        """Check that the version accepts requests now; raises HeadraceError before a request is decoded."""
        self.handle.admit()

    def check_load(self, received_ns: int, deadline_ns: int, client: str) -> None:
        """Reject a request before it is decoded, if its model is overloaded; raises HeadraceError."""
        self.handle.check_load(received_ns, deadline_ns, client)

    def infer(self, request: InferRequest) -> LoopCompletion:
        """Start a request, and copy it for the shadow if it is due; raises as `VersionHandle.infer`."""
        inner = self.handle.infer(request)
        job = self.split.copy_for_shadow(self, request)  # the version computes meanwhile
        return RoutedCompletion(self._mailbox, inner, self, request.received_ns, job)

    def load(self, by_level: bool = True) -> ModelLoad:
        """Return the load of the version; also of each priority level if `by_level`."""
        return self.handle.load(by_level)

    def queue_load(self, now_ns: int) -> tuple[int, int]:
        """Return the number of queued requests and the predicted wait in nanoseconds, as `load` does for less."""
        return self.handle.queue_load(now_ns)

    def record_failure(self, error: HeadraceError, received_ns: int, answered: InferResponse | None = None) -> None:
        """Count a failed request, as an error of the version if the server is at fault."""
        self.handle.record_failure(error, received_ns, answered)
        if http_status(error) >= _FIRST_SERVER_ERROR:
            self.split.on_error(self, answered is not None)

    def release(self) -> None:
        """End the lease."""
        self.handle.release()


class TrafficSplit:
    """Distributes the requests of one model that name no version. Ownership: the event loop.

    A target is a version of the model, by its number, or the stable version of another model, as "model:NAME".

    Args:
        name: of the model.
        traffic: configuration in force.
        versions: the served versions.
        shadows: runs shadow requests.
        mailbox: of the event loop.
        on_undone: called with the split, its traffic before, version, rule and reason after a rule has taken the share of a
            version.
        clock: returns monotonic nanoseconds.

    Attributes:
        name, traffic: see Args.
        routed: requests by target, since the model has traffic.
        undone: reason by target whose share a rule has taken.
        undone_counts: number of these events by target and rule.
        shadow_counts: shadow requests by version and outcome: compared, failed, or the reason of a drop.
    """

    def __init__(
        self,
        name: str,
        traffic: Traffic,
        versions: ServedVersions,
        shadows: ShadowQueue,
        mailbox: Mailbox,
        on_undone: Callable[[TrafficSplit, Traffic, str, str, str], None],
        clock: Clock = monotonic_ns,
    ) -> None:
        self.name = name
        self._versions, self._shadows, self._mailbox, self._clock = versions, shadows, mailbox, clock
        self._on_undone = on_undone
        self._targets: dict[str, RoutedHandle] = {}
        self._contracts: dict[str, tuple[VersionHandle, VersionHandle, str]] = {}
        self.routed: Counter[str] = Counter()
        self.undone: dict[str, str] = {}
        self.undone_counts: Counter[tuple[str, str]] = Counter()
        self.shadow_counts: Counter[tuple[str, str]] = Counter()
        self.traffic = traffic
        self._use(traffic)

    def apply(self, traffic: Traffic) -> None:
        """Use another configuration; figures of the versions stay."""
        if traffic != self.traffic:
            for target, share in traffic.versions.items():
                if share_units(share):  # a new share is a new attempt
                    self.undone.pop(target, None)
            self._use(traffic)

    def _use(self, traffic: Traffic) -> None:
        self.traffic = traffic
        shares = {target: share_units(share) for target, share in traffic.versions.items()}
        ascending = sorted(shares, key=target_order)
        # The stable version is last: a larger share of a canary takes sticky values from it alone.
        self._order = [*ascending, ""]
        self._shares = [*(shares[target] for target in ascending), ALL_SHARES - sum(shares.values())]
        self._selector = ShareSelector(self._shares)
        shadow = traffic.shadow
        self._shadow_version = "" if shadow is None else str(shadow.version)
        units = 0 if shadow is None else share_units(shadow.share)
        self._shadow_selector = ShareSelector((units, ALL_SHARES - units))
        for target in self._targets.values():
            target.figures.apply(traffic.rules)

    # Requests

    def lease(self, headers: Mapping[str, str]) -> RoutedHandle:
        """Lease the version of a request that names none.

        Args:
            headers: sticky headers of the request by name.

        Raises:
            NotFound, Unavailable: no version serves.
        """
        header = self.traffic.sticky_header
        value = headers.get(header, "") if header else ""
        index = sticky_index(self.name, value, self._shares) if value else self._selector.next()
        target = self._order[index]
        handle = self._lease_ready(target)
        if handle is None:  # its share goes to the stable version, and without that one to any target with a share
            others = ("", *sorted(self._order[:-1], key=lambda target: -share_units(self.traffic.versions[target])))
            for target in others:
                handle = self._lease_ready(target)
                if handle is not None:
                    break
        if handle is None:
            target, handle = "", self._versions.lease(self.name, "")
        target = target or handle.spec.version
        self.routed[target] += 1
        return self._routed_handle(target, handle)

    def _serving(self, target: str) -> VersionHandle | None:
        """Return the version that serves as a target, "" for the stable one; None if there is none, or its tensors differ."""
        model = model_of(target)
        if not model:
            return self._versions.serving(self.name, target)
        handle = self._versions.serving(model, "")
        return None if handle is None or self._contract_problem(target, handle) else handle

    def _contract_problem(self, target: str, handle: VersionHandle) -> str:
        """Return why another model cannot answer the requests of this one; "" if it can."""
        stable = self._versions.serving(self.name, "")
        if stable is None:
            return f"no version of model '{self.name}' serves whose tensors could be compared"
        known = self._contracts.get(target)
        if known is None or known[0] is not stable or known[1] is not handle:
            known = self._contracts[target] = stable, handle, contract_problem(stable, handle)
            if known[2]:
                logger.warning("model %s: %s gets no request of its traffic: %s", self.name, target, known[2])
        return known[2]

    def problem(self, target: str) -> str:
        """Return why a target that is another model gets no request; "" if it gets its share, and for versions."""
        model = model_of(target)
        if not model:
            return ""
        handle = self._versions.serving(model, "")
        return f"model '{model}' does not serve" if handle is None else self._contract_problem(target, handle)

    def _lease_ready(self, target: str) -> VersionHandle | None:
        """Lease a version that can serve; None for another."""
        handle = self._serving(target)
        if handle is None or not handle.lease():
            return None
        try:
            handle.admit()
        except HeadraceError:
            handle.release()
            return None
        return handle

    def _routed_handle(self, target: str, handle: VersionHandle) -> RoutedHandle:
        """Return the routed form of a version; the figures start anew with each loaded version."""
        routed = self._targets.get(target)
        if routed is None or routed.handle is not handle:
            routed = RoutedHandle(self, target, handle, self._mailbox, VersionFigures(self.traffic.rules))
            self._targets[target] = routed
        return routed

    def _is_stable(self, handle: VersionHandle) -> bool:
        return handle is self._versions.serving(self.name, "")

    def on_answer(self, routed: RoutedHandle, received_ns: int, job: ShadowJob | None, response: InferResponse) -> None:
        """Count an answer, and queue its shadow request."""
        now_ns = self._clock()
        routed.figures.add_answer(now_ns - received_ns, now_ns)
        if job is not None:
            self._shadows.add(job, response)
        elif self._shadow_version:
            self._shadows.run_next()
        self._check(routed, now_ns)

    def on_error(self, routed: RoutedHandle, was_answered: bool) -> None:
        """Count an error of the server; `was_answered`: the request was counted by `on_answer`."""
        now_ns = self._clock()
        routed.figures.add_error(now_ns, was_answered)
        self._check(routed, now_ns)

    # Shadow requests

    def copy_for_shadow(self, routed: RoutedHandle, request: InferRequest) -> ShadowJob | None:
        """Copy a request of the stable version if the shadow's share has one due; None for none."""
        version = self._shadow_version
        if not version or routed.target == version or not self._is_stable(routed.handle):
            return None
        if self._shadow_selector.next():
            return None
        shadow = self._versions.serving(self.name, version)
        on_result = self._on_shadow
        if shadow is None:
            on_result("not_ready")
            return None
        if shadow.spec.inputs != routed.spec.inputs or shadow.spec.max_batch_size != routed.spec.max_batch_size:
            on_result("other_inputs")
            return None
        return self._shadows.copy(request, routed.handle, self._lease_shadow, on_result)

    def _lease_shadow(self) -> VersionHandle | None:
        return self._lease_ready(self._shadow_version) if self._shadow_version else None

    def _on_shadow(self, result: OutputComparison | str) -> None:
        """Count the outcome of a shadow request."""
        version = self._shadow_version
        if not version:  # removed since
            return
        self.shadow_counts[version, result if isinstance(result, str) else "compared"] += 1
        if isinstance(result, str) and result != "failed":
            return
        handle = self._versions.serving(self.name, version)
        if handle is None:
            return
        rows, agreeing, difference = (1, 0, 0.0) if isinstance(result, str) else result
        routed, now_ns = self._routed_handle(version, handle), self._clock()
        routed.figures.add_comparison(rows, agreeing, difference, now_ns)
        self._check(routed, now_ns)

    # Rules

    def _check(self, routed: RoutedHandle, now_ns: int) -> None:
        """Take the share of a target that breaks a rule."""
        target, rules, before = routed.target, self.traffic.rules, self.traffic
        if rules is None or not share_units(before.versions.get(target, "0%")):
            return
        if self._targets.get(target) is not routed:  # a request of a version that was replaced
            return
        stable = self._versions.serving(self.name, "")
        if stable is None or stable.spec.version == target:  # nothing could serve its share
            return
        broken = broken_rule(rules, routed.figures.window(now_ns))
        if broken is not None:
            self._use(before.with_share(target, "0%"))
            self.undone[target] = broken[1]
            self.undone_counts[target, broken[0]] += 1
            self._on_undone(self, before, target, *broken)

    def check_promotion(self, target: str) -> None:
        """Raise the reason why a target may not be promoted.

        Raises:
            BadRequest: the target has no share and is no shadow.
            Conflict: it is not served, or the rules are not met.
        """
        if target not in self.traffic.versions and target != self._shadow_version:
            listed = (
                ", ".join(sorted({*self.traffic.versions, self._shadow_version} - {""}, key=target_order)) or "none"
            )
            raise BadRequest(
                f"version {target[:140]!r} of model '{self.name}' has no share and is no shadow: choose from {listed}"
            )
        reason = self.promotion_problem(target)
        if reason:
            raise Conflict(f"version {target} of model '{self.name}' is not promoted: {reason}")

    def promotion_problem(self, target: str) -> str:
        """Return why a target may not be promoted; "" if it may."""
        problem, handle = self.problem(target), self._serving(target)
        if problem:
            return problem
        if handle is None or not handle.ready:
            return "it does not serve"
        if target in self.undone:
            return f"its share was taken ({self.undone[target]}); set a share again first"
        rules = self.traffic.rules
        if rules is None:
            return ""
        figures = self.figures(target)
        window = Sums() if figures is None else figures.window(self._clock())
        broken = broken_rule(rules, window)
        return broken[1] if broken is not None else missing_evidence(rules, window)

    # Reports

    def share(self, target: str) -> float:
        """Return the share of a target in requests that name no version, from 0 to 1."""
        stable = self._versions.serving(self.name, "")
        units = share_units(self.traffic.versions.get(target, "0%"))
        if stable is not None and stable.spec.version == target:
            units += self._shares[-1]
        return units / ALL_SHARES

    def targets(self) -> list[str]:
        """Return the served versions and what the configuration names: versions by number, then models by name."""
        traffic = self.traffic
        return sorted({*self._versions.versions(self.name), *traffic.named, *traffic.versions}, key=target_order)

    def state(self, target: str) -> str:
        """Return the state of a target: stable, canary, shadow, undone, idle (served without a share), or not_ready."""
        handle = self._serving(target)
        if target in self.undone:
            return "undone"
        if handle is None or not handle.ready:
            return "not_ready"
        if self._is_stable(handle):
            return "stable"
        if share_units(self.traffic.versions.get(target, "0%")):
            return "canary"
        return "shadow" if target == self._shadow_version else "idle"

    def figures(self, target: str) -> VersionFigures | None:
        """Return the figures of a target; None while it has had no traffic."""
        routed = self._targets.get(target)
        return None if routed is None or routed.handle is not self._serving(target) else routed.figures

    def rows(self) -> Iterator[TrafficRow]:
        """Yield a row of the metrics for each target."""
        undone, shadow = dict(self.undone_counts), dict(self.shadow_counts)
        for target in self.targets():
            figures = self.figures(target)
            totals = Sums() if figures is None else figures.totals
            is_shadow = target == self._shadow_version
            yield TrafficRow(
                self.name,
                target,
                self.state(target),
                self.share(target),
                self.routed[target],
                {rule: count for (other, rule), count in undone.items() if other == target},
                {outcome: count for (other, outcome), count in shadow.items() if other == target}
                if is_shadow
                else None,
                totals.rows,
                totals.agreeing,
                totals.difference,
            )

    def report(self) -> TrafficReport:
        """Return configuration, shares, states and figures as JSON values."""
        traffic = self.traffic
        return {
            "model": self.name,
            "sticky_header": traffic.sticky_header,
            "shadow": None if traffic.shadow is None else traffic.shadow.model_dump(mode="json"),
            "rules": None if traffic.rules is None else traffic.rules.model_dump(mode="json", exclude_none=True),
            "versions": [self._report(target) for target in self.targets()],
        }

    def _report(self, target: str) -> VersionTraffic:
        state, figures = self.state(target), self.figures(target)
        is_candidate = target in self.traffic.versions or target == self._shadow_version
        sums = None if figures is None else figures.totals
        window = None if figures is None else figures.window(self._clock())
        return {
            "version": target,
            "state": state,
            "share": self.share(target),
            "reason": self.undone.get(target) or self.problem(target),
            "promotion": self.promotion_problem(target) if is_candidate and state != "stable" else "",
            "routed": self.routed[target],
            "requests": 0 if window is None else window.requests,
            "errors": 0 if window is None else window.errors,
            "p99_ms": None if figures is None else figures.p99_ms(),
            "comparisons": 0 if window is None else window.comparisons,
            "agreement": None if window is None or not window.rows else window.agreeing / window.rows,
            "max_difference": None if sums is None or not sums.comparisons else _finite(sums.difference),
            "shadow": {
                outcome: count for (other, outcome), count in dict(self.shadow_counts).items() if other == target
            },
        }


def _finite(value: float) -> float | str:
    """Return a number that JSON has; text for infinity."""
    return "Infinity" if value == float("inf") else value
