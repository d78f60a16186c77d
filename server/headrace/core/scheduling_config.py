"""How a configuration tells batching, queueing, instances and versions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from headrace.core.config_base import (
    ConfigPart,
    Count,
    Duration,
    Flag,
    PositiveCount,
    Problem,
    Problems,
    Text,
    Version,
    one_of,
)

# More levels than anybody tells apart; each level is a queue of its own.
MAX_PRIORITY_LEVELS = 1024


class QueuePolicy(ConfigPart):
    """Limits on the time in the queue and on its length."""

    timeout_action: Annotated[Literal["REJECT", "DELAY"], *one_of(("REJECT", "DELAY"))] = Field(
        default="REJECT",
        description="After the timeout, `REJECT` refuses the request and `DELAY` puts it behind all others.",
    )
    default_timeout_microseconds: Duration = Field(
        default=0, description="Maximum time in the queue, in microseconds; 0: no limit."
    )
    allow_timeout_override: Flag = Field(
        default=False,
        description="Allows a request's parameter `timeout`, in microseconds, to shorten "
        "`default_timeout_microseconds`. As in Triton, it has no effect if that is 0. Without the override "
        "the parameter is ignored.",
    )
    max_queue_size: Count = Field(
        default=0, description="Maximum requests in the queue; further ones are refused. 0: the server's own bound."
    )


class DynamicBatching(ConfigPart):
    """Merges waiting requests into batches. An empty block enables it with the defaults."""

    preferred_batch_size: tuple[PositiveCount, ...] = Field(
        default=(), description="Batch sizes in rows that run without further delay; `max_batch_size` if absent."
    )
    max_queue_delay_microseconds: Duration = Field(
        default=0, description="Maximum delay of the oldest request to form a larger batch, in microseconds."
    )
    preserve_ordering: Flag = Field(default=False, description="Sends responses in the order of the requests.")
    priority_levels: Annotated[int, Field(strict=True, ge=0, le=MAX_PRIORITY_LEVELS)] = Field(
        default=0, description="Number of priority levels; 1 is the highest. 0: no priorities."
    )
    default_priority_level: Count = Field(
        default=0,
        description="Level of requests without a priority or with one outside the levels; required with "
        "`priority_levels`.",
    )
    default_queue_policy: QueuePolicy = Field(
        default=QueuePolicy(), description="Queue policy of every level that has none in `priority_queue_policy`."
    )
    priority_queue_policy: dict[Annotated[int, Field(ge=1)], QueuePolicy] = Field(
        default={}, description="Queue policies by priority level."
    )

    @model_validator(mode="after")
    def _check(self) -> DynamicBatching:
        problems = []
        levels = self.priority_levels
        if levels and not 1 <= self.default_priority_level <= levels:
            message = f"default_priority_level {self.default_priority_level} is not one of the {levels} priority_levels"
            problems.append(Problem(("default_priority_level",), message, f"write a level from 1 to {levels}"))
        if not levels and self.default_priority_level:
            message = "default_priority_level is set, priority_levels is not"
            problems.append(Problem(("default_priority_level",), message, "set priority_levels, or remove it"))
        if self.preserve_ordering and levels > 1:
            message = "preserve_ordering and several priority_levels contradict each other"
            problems.append(Problem(("preserve_ordering",), message, "keep one of them"))
        problems += [
            Problem(
                ("priority_queue_policy", level), f"there is no priority level {level}", f"priority_levels is {levels}"
            )
            for level in self.priority_queue_policy
            if level > levels
        ]
        if problems:
            raise Problems(problems)
        return self


InstanceKind = Literal["KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"]


class InstanceGroup(ConfigPart):
    """Instances of the model that run in parallel."""

    name: Text = Field(default="", description="Name in the log; the model's name and a number if absent.")
    kind: Annotated[InstanceKind, *one_of(("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"), "KIND_")] = Field(
        default="KIND_AUTO", description="Device of the instances; KIND_AUTO follows the machine."
    )
    count: PositiveCount = Field(default=1, description="Number of instances (on each GPU of `gpus` for KIND_GPU).")
    gpus: tuple[Count, ...] = Field(default=(), description="GPU numbers; all the machine's GPUs if absent.")

    @property
    def is_default(self) -> bool:
        """True if the configuration names no instance group and this one stands in for it."""
        return not self.model_fields_set & {"kind", "count", "gpus"}

    @model_validator(mode="after")
    def _check(self) -> InstanceGroup:
        if self.kind == "KIND_CPU" and self.gpus:
            raise Problems(
                [Problem(("gpus",), "gpus are named in a group of KIND_CPU", "remove gpus, or write KIND_GPU")]
            )
        return self


class LatestVersions(ConfigPart):
    """Serve the highest version numbers."""

    num_versions: PositiveCount = Field(default=1, description="Number of versions.")


class AllVersions(ConfigPart):
    """Serve every version."""


class SpecificVersions(ConfigPart):
    """Serve the listed versions."""

    versions: tuple[Version, ...] = Field(min_length=1, description="Version numbers.")


class VersionPolicy(ConfigPart):
    """Selects the served versions; exactly one of the three fields."""

    latest: LatestVersions | None = Field(default=None, description="The highest version numbers.")
    all: AllVersions | None = Field(default=None, description="Every version: `all: {}`.")
    specific: SpecificVersions | None = Field(default=None, description="The listed versions.")

    @model_validator(mode="after")
    def _check(self) -> VersionPolicy:
        if (self.latest, self.all, self.specific).count(None) != 2:
            raise Problems([Problem((), "one policy is needed", "write exactly one of latest, all, specific")])
        return self


LATEST_VERSION = VersionPolicy(latest=LatestVersions())
