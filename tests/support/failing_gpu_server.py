"""`python -m tests.support.failing_gpu_server serve ...`: a real server on a real GPU 0 that fails for good on request.

Once the file exists that the environment names, a kernel writes to an address that is not there, in a context of the engine
process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from headrace.__main__ import main
from headrace.runtimes.cuda.driver import current, is_context_usable, load
from headrace.runtimes.cuda.kernels.loading import compile_cuda
from headrace.server.front_ends.engine_process import EngineProcess

from tests.support.lost_gpu_cases import FILE

COMMAND = (sys.executable, "-m", "tests.support.failing_gpu_server")
_KERNEL = 'extern "C" __global__ void fail(int* address) { *address = 1; }'


def fail() -> None:
    """Wait for the file, then make every later call of a GPU in this process fail; the log says what came of it."""
    path = Path(os.environ[FILE])
    while not path.exists():
        time.sleep(0.02)
    path.unlink()  # the next process goes on
    driver = load()
    with current(0):
        code = compile_cuda(_KERNEL, "fail.cu", driver.Device(0).compute_capability())
        driver.module_from_buffer(code).get_function("fail")(np.uint64(0), block=(1, 1, 1), grid=(1, 1))
        try:
            driver.Context.synchronize()
            result = "works on"
        except driver.Error as error:
            result = f"fails: {error}, its context is usable: {is_context_usable()}"
        sys.stderr.write(f"GPU 0 {result}\n")


def run(process: EngineProcess, original: Callable[[EngineProcess], int] = EngineProcess.run) -> int:
    """Run an engine process, a fork of this one, that fails on request."""
    threading.Thread(target=fail, daemon=True).start()
    return original(process)


if __name__ == "__main__":
    EngineProcess.run = run  # type: ignore[method-assign, assignment]
    sys.exit(main())
