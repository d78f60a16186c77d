"""Statistics of a model version under the names of Triton's statistics extension."""

from __future__ import annotations

from headrace.core.response_bodies import Duration, TritonStatistics
from headrace.observability.counters import Totals


def to_triton(name: str, version: str, totals: Totals) -> TritonStatistics:
    """Return the statistics of one model version under Triton's names.

    As in Triton, `inference_count` counts rows, `execution_count` batches, and all others requests; `batch_stats` has one entry
    for each batch size that occurred. Requests that the response cache answered count in `success` and `queue` only. A
    request that failed after its answer counts in `fail`, with its time, and in the phases that it ran through.
    """
    requests = totals.requests
    failed = sum(totals.failures.values())
    return {
        "name": name,
        "version": version,
        "last_inference": totals.last_ms,
        "inference_count": totals.rows,
        "execution_count": totals.executions,
        "inference_stats": {
            "success": _duration(totals.successes, totals.success_ns),
            "fail": _duration(failed, totals.failure_ns),
            "queue": _duration(requests + totals.cache_hits, totals.queue_ns),
            "compute_input": _duration(requests, totals.assemble_ns),
            "compute_infer": _duration(requests, totals.compute_ns),
            "compute_output": _duration(requests, totals.split_ns),
            "cache_hit": _duration(totals.cache_hits, totals.cache_hit_ns),
            "cache_miss": _duration(totals.cache_misses, totals.cache_miss_ns),
        },
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": _duration(size.count, size.assemble_ns),
                "compute_infer": _duration(size.count, size.compute_ns),
                "compute_output": _duration(size.count, size.split_ns),
            }
            for rows, size in sorted(totals.sizes.items())
        ],
    }


def _duration(count: int, time_ns: int) -> Duration:
    return {"count": count, "ns": time_ns}
