"""Totals in the JSON of Triton's statistics extension."""

from __future__ import annotations

from headrace.observability.totals import Totals


def to_triton(name: str, version: str, totals: Totals) -> dict[str, object]:
    """Statistics of one model version.

    Counts are of requests unless Triton counts otherwise: `inference_count` is rows, `execution_count` batches, `batch_stats`
    has one row per batch size seen.
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
            "success": _duration(requests, totals.request_ns),
            "fail": _duration(failed, totals.failure_ns),
            "queue": _duration(requests, totals.queue_ns),
            "compute_input": _duration(requests, totals.assembly_ns),
            "compute_infer": _duration(requests, totals.compute_ns),
            "compute_output": _duration(requests, totals.split_ns),
            "cache_hit": _duration(0, 0),
            "cache_miss": _duration(0, 0),
        },
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": _duration(size.count, size.assembly_ns),
                "compute_infer": _duration(size.count, size.compute_ns),
                "compute_output": _duration(size.count, size.split_ns),
            }
            for rows, size in sorted(totals.sizes.items())
        ],
    }


def _duration(count: int, time_ns: int) -> dict[str, int]:
    return {"count": count, "ns": time_ns}
