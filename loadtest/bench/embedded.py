"""Requests to `headrace.Server` in this process, without a network. Uses public names only, and runs under any checkout's Python:

    PYTHON loadtest/bench/embedded.py model_repository tiny --callers 64 --seconds 4

prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

import headrace
import numpy as np
import uvloop

_WARM_UP_S = 0.5


async def measure(repository: Path, name: str, callers: int, seconds: float) -> dict[str, float]:
    """Return rate, latencies and processor time of callers that send their next request after an answer.

    Args:
        repository: model repository.
        name: of the model; its inputs are FP32.
        callers: requests in flight.
        seconds: length of the sample, behind a warm-up.
    """
    async with headrace.Server(repository, models=[name], state_dir="") as server:
        model = server.model(name)
        inputs = {tensor.name: np.ones((1, *tensor.shape[1:]), np.float32) for tensor in model.spec.inputs.values()}
        latencies_us: list[float] = []
        first_s = time.monotonic() + _WARM_UP_S
        end_s = first_s + seconds

        async def caller() -> None:
            while (sent_s := time.monotonic()) < end_s:
                await model.infer_async(inputs)
                if sent_s >= first_s:
                    latencies_us.append((time.monotonic() - sent_s) * 1e6)

        async def processor_time() -> float:
            await asyncio.sleep(_WARM_UP_S)
            before_s = time.process_time()
            await asyncio.sleep(seconds)
            return time.process_time() - before_s

        calls = asyncio.gather(*[caller() for _ in range(callers)])
        cpu_s, _ = await asyncio.gather(processor_time(), calls)
        cuts = statistics.quantiles(latencies_us, n=100)
        return {
            "requests": len(latencies_us),
            "requests_per_s": len(latencies_us) / seconds,
            "p50_us": cuts[49],
            "p99_us": cuts[98],
            "server_us": cpu_s * 1e6 / len(latencies_us),
        }


def main() -> None:
    """Start from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("repository", type=Path)
    parser.add_argument("model")
    parser.add_argument("--callers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(measure(options.repository, options.model, options.callers, options.seconds))))


if __name__ == "__main__":
    main()
