"""Objectives, priority levels and clients of a configuration, as a policy of the data plane."""

from __future__ import annotations

from typing import Any

from headrace.config.model_config import ModelConfig
from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.core.quota import Quota
from headrace.inference.scheduling.policy import HandlePolicy, LevelPolicy, QueueLimits, RateLimits, Sharing
from headrace.models.version_policies import handle_policy


def policy(**fields: Any) -> HandlePolicy:
    return handle_policy(ModelConfig.model_validate({"max_batch_size": 4, **fields}))


def test_nothing_is_promised_shared_or_limited_unasked() -> None:
    result = policy(dynamic_batching={"max_queue_delay_microseconds": 5})
    assert result.batch.objective_ns == 0
    assert (result.level_policies, result.aging_ns, result.sharing, result.rate_limits) == ({}, 0, None, None)
    assert result.limits == QueueLimits()


def test_an_objective_needs_no_batching() -> None:
    result = policy(slo={"p99_ms": 2.5})
    assert (result.batch.objective_ns, result.batch.merge) == (2_500_000, False)


def test_each_level_has_its_queue_policy_or_the_default() -> None:
    default = {"default_timeout_microseconds": 7_000, "max_queue_size": 10, "allow_timeout_override": True}
    level_queue_policies = {2: {"timeout_action": "DELAY", "max_queue_size": 3}}
    levels = {"priority_levels": 3, "default_priority_level": 2}
    result = policy(
        dynamic_batching={**levels, "default_queue_policy": default, "priority_queue_policy": level_queue_policies}
    )
    usual = LevelPolicy(max_count=10, queue_timeout_ns=7 * NS_PER_MS, timeout_override=True)
    assert result.level_policies == {1: usual, 2: LevelPolicy(max_count=3, demote_on_timeout=True), 3: usual}
    assert (result.levels, result.default_level, result.aging_ns) == (3, 2, 10 * NS_PER_S)
    assert result.limits.max_count == 23
    assert (result.limits.max_size_bytes, result.queue_policy) == (QueueLimits().max_size_bytes, usual)


def test_one_level_without_a_bound_has_room_beside_the_others() -> None:
    levels = {"priority_levels": 2, "default_priority_level": 1}
    few = policy(dynamic_batching={**levels, "priority_queue_policy": {1: {"max_queue_size": 5}}})
    assert few.limits == QueueLimits()
    many = policy(dynamic_batching={**levels, "priority_queue_policy": {1: {"max_queue_size": 50_000}}})
    assert many.limits.max_count == 50_000


def test_a_single_queue_has_the_default_bound() -> None:
    result = policy(dynamic_batching={"default_queue_policy": {"max_queue_size": 9}})
    assert (result.limits.max_count, result.level_policies) == (9, {})


def test_levels_age_as_configured() -> None:
    levels = {"priority_levels": 2, "default_priority_level": 1}
    assert policy(dynamic_batching=levels, priority_aging_microseconds=1_000).aging_ns == NS_PER_MS
    assert policy(dynamic_batching=levels, priority_aging_microseconds=0).aging_ns == 0
    assert policy(dynamic_batching={}, priority_aging_microseconds=1_000).aging_ns == 0


def test_clients_share_and_are_limited() -> None:
    limits = {"default": {"requests_per_s": 2.5}, "clients": {"shop": {"requests_per_s": 100, "burst": 5}}}
    result = policy(fair_sharing={"weights": {"shop": 3}, "default_weight": 0.5}, rate_limits=limits)
    assert result.sharing == Sharing({"shop": 3.0}, 0.5)
    assert result.rate_limits == RateLimits({"shop": Quota(100.0, 5)}, Quota(2.5, 2))
    assert policy(fair_sharing={}).sharing == Sharing({}, 1.0)
    assert policy(rate_limits={"clients": {"shop": {"requests_per_s": 1}}}).rate_limits == RateLimits(
        {"shop": Quota(1.0, 1)}, None
    )


def test_predicted_waits_are_bounded_unless_the_configuration_bounds_the_queue() -> None:
    def wait_ns(**fields: Any) -> int:
        return policy(**fields).max_wait_ns

    def queue(**fields: Any) -> dict[str, Any]:
        return {"dynamic_batching": {"default_queue_policy": fields}}

    assert wait_ns() == wait_ns(dynamic_batching={}) == NS_PER_S
    assert wait_ns(**queue(max_queue_size=9)) == 0, "the queue size is the bound"
    assert wait_ns(**queue(default_timeout_microseconds=5_000_000)) == 0
    assert wait_ns(max_queue_wait_microseconds=0) == 0
    assert wait_ns(max_queue_wait_microseconds=7_000, **queue(max_queue_size=9)) == 7 * NS_PER_MS
    levels = {"priority_levels": 2, "default_priority_level": 1}
    one = {**levels, "priority_queue_policy": {1: {"max_queue_size": 5}}}
    assert wait_ns(dynamic_batching=one) == NS_PER_S, "the other level has no bound"
    assert wait_ns(dynamic_batching={**one, "default_queue_policy": {"max_queue_size": 5}}) == 0
