"""Traffic of all models: `TrafficRouter` has a split for each model with `traffic`, and changes it on request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from pydantic import ValidationError

from headrace.config.traffic_config import MODEL_PREFIX, Traffic, model_of, target_order, traffic_problems
from headrace.core.clock import Clock, monotonic_ns
from headrace.core.completion import Mailbox
from headrace.core.errors import BadRequest, NotFound
from headrace.core.response_bodies import TrafficReport
from headrace.models.traffic.contract import contract_problem
from headrace.models.traffic.shadow import ShadowQueue
from headrace.models.traffic.split import ServedVersions, TrafficSplit
from headrace.observability.metrics_traffic import TrafficRow

logger = logging.getLogger("headrace.traffic")


class TrafficRegistry(ServedVersions, Protocol):
    """The part of `headrace.models.registry.Registry` that keeps the traffic in force."""

    def set_traffic(self, name: str, traffic: Traffic | None) -> None:
        """Use other traffic for a model until its configuration changes, None for its configuration; waits for processes."""

    def replace_traffic(self, name: str, before: Traffic, traffic: Traffic) -> None:
        """Use other traffic for a model if `before` is in force; waits for processes."""

    def traffic(self, name: str) -> Traffic | None:
        """Return the traffic in force of a model; None without any."""


class TrafficRouter:
    """Splits the traffic of models. Ownership: the event loop; `publish` is called by any thread.

    Args:
        registry: served versions, and the traffic in force.
        loop: event loop of the server.
        set_headers: called with the sticky headers of all models before a split reads them.
        clock: returns monotonic nanoseconds.

    Attributes:
        splits: by model; replaced as a whole.
    """

    def __init__(
        self,
        registry: TrafficRegistry,
        loop: asyncio.AbstractEventLoop,
        set_headers: Callable[[frozenset[str]], None] = lambda _names: None,
        clock: Clock = monotonic_ns,
    ) -> None:
        self.splits: Mapping[str, TrafficSplit] = {}
        self._registry, self._loop, self._clock = registry, loop, clock
        self._set_headers = set_headers
        self._mailbox = Mailbox(loop)
        self._shadows = ShadowQueue(loop, clock)

    def publish(self, name: str, traffic: Traffic | None) -> None:
        """Use the traffic of a model from its next request on; any thread may call."""
        try:
            self._loop.call_soon_threadsafe(self._apply, name, traffic)
        except RuntimeError:  # the loop is closed
            logger.debug("the traffic of model %s is not applied: the server has ended", name)

    def _apply(self, name: str, traffic: Traffic | None) -> None:
        split = self.splits.get(name)
        if traffic is None:
            if split is not None:
                self.splits = {model: other for model, other in self.splits.items() if model != name}
                self._update_headers()
            return
        if split is not None:
            split.apply(traffic)
        else:
            split = TrafficSplit(
                name, traffic, self._registry, self._shadows, self._mailbox, self._on_undone, self._clock
            )
            self.splits = {**self.splits, name: split}
        self._update_headers()

    def _update_headers(self) -> None:
        self._set_headers(frozenset(split.traffic.sticky_header for split in self.splits.values()) - {""})

    def _on_undone(self, split: TrafficSplit, before: Traffic, version: str, rule: str, reason: str) -> None:
        logger.warning(
            "model %s: the traffic of version %s is undone by rule %s: %s", split.name, version, rule, reason
        )
        self._loop.run_in_executor(None, self._registry.replace_traffic, split.name, before, split.traffic)

    # Control

    def report(self, name: str) -> TrafficReport | None:
        """Return shares, states and figures of a model; None without traffic. Any thread may call."""
        split = self.splits.get(name)
        return None if split is None else split.report()

    def rows(self) -> Iterator[TrafficRow]:
        """Yield a row of the metrics for each version of each model with traffic; any thread may call."""
        for split in self.splits.values():
            yield from split.rows()

    def show(self, model: str) -> TrafficReport:
        """Return shares, states and figures of a model; raises NotFound without traffic."""
        report = self.report(model)
        if report is None:
            self._registry.lease(model, "").release()  # raises the error of an unknown model
            raise NotFound(
                f"model '{model}' has no traffic configuration: write `traffic` in its configuration, or POST shares"
            )
        return report

    async def change(self, name: str, changes: Mapping[str, Any]) -> TrafficReport:
        """Change the traffic of a model, and return it.

        Args:
            name: of the model.
            changes: fields of `Traffic` to replace; or `promote`, a target that gets all traffic; or `reset`, True for the
                traffic of the configuration.

        Raises:
            NotFound, Unavailable: the model does not exist or does not serve.
            BadRequest: the changes are invalid.
            Conflict: the target may not be promoted.
        """
        handle = self._registry.lease(name, "")
        is_sequence, is_decoupled = handle.policy.sequences is not None, handle.spec.decoupled
        handle.release()
        traffic = self._changed(name, changes)
        for problem in traffic_problems(traffic, name, is_sequence, is_decoupled):
            raise BadRequest(f"{problem.message}: {problem.cure}")
        # On another thread: with front-end processes it waits until they have applied it.
        await asyncio.to_thread(self._registry.set_traffic, name, traffic)
        return self.report(name) or {"model": name, "sticky_header": "", "shadow": None, "rules": None, "versions": []}

    def _changed(self, name: str, changes: Mapping[str, Any]) -> Traffic | None:
        """Return the traffic after the changes; None for that of the configuration."""
        actions = [action for action in ("promote", "reset") if changes.get(action)]
        fields = {field: value for field, value in changes.items() if field not in ("promote", "reset")}
        if len(actions) + bool(fields) != 1:
            raise BadRequest("one change is needed: shares and other fields of `traffic`, or promote, or reset: true")
        if changes.get("reset"):
            return None
        if version := changes.get("promote"):
            split = self.splits.get(name)
            if split is None:
                raise BadRequest(f"model '{name}' has no traffic configuration: there is no version to promote")
            split.check_promotion(str(version))
            logger.info("model %s: version %s is promoted, it gets all traffic", name, version)
            return split.traffic.promoted(str(version))
        before = self._registry.traffic(name)
        document = {} if before is None else before.model_dump(mode="json", exclude_defaults=True)
        try:
            traffic = Traffic.model_validate({**document, **fields})
        except ValidationError as error:
            detail = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, detail["loc"])) or "traffic"
            raise BadRequest(f"{place}: {detail['msg'].removeprefix('Value error, ')}"[:500]) from None
        unknown = sorted(traffic.named - set(self._registry.versions(name)), key=int)
        if unknown:
            served = ", ".join(self._registry.versions(name))
            raise BadRequest(f"version {', '.join(unknown)} of model '{name}' is not served: served are {served}")
        for target in sorted(traffic.versions, key=target_order):
            if (model := model_of(target)) and model != name:  # itself: see `traffic_problems`
                self._check_model(name, model)
        return traffic

    def _check_model(self, name: str, model: str) -> None:
        """Raise BadRequest if another model cannot answer the requests of a model."""
        stable, other = self._registry.serving(name, ""), self._registry.serving(model, "")
        if other is None:
            raise BadRequest(f"{MODEL_PREFIX}{model} of the traffic does not serve: load model '{model}' first")
        if stable is not None and (problem := contract_problem(stable, other)):
            raise BadRequest(f"model '{model}' cannot answer the requests of model '{name}': {problem}")

    def close(self) -> None:
        """End shadow requests."""
        self._shadows.close()
