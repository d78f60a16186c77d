"""`python -m tests.support.faulty_server serve ...`: a Headrace with wrong answers and leaks, which the soak must detect.

Now and then one value of an answer is off by a little; every few seconds a descriptor stays open, a thread stays, and memory.
The file of API keys is ignored.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading

import numpy as np
from headrace.__main__ import main
from headrace.core.tensor import Array
from headrace.runtimes.onnxruntime import OnnxRuntimeExecution

_RUN = OnnxRuntimeExecution.run
_WRONG_EVERY = 200
# Longer than the soak waits for what it looks at to stand still.
_LEAK_EVERY_S = 2.5
_LEAK_BYTES = 8 << 20
_batches = itertools.count(1)
_kept: list[bytes] = []
_forever = threading.Event()


def run(execution: OnnxRuntimeExecution, inputs: dict[str, Array]) -> dict[str, Array]:
    """Return correct values except for one value in some batches."""
    outputs = _RUN(execution, inputs)
    if next(_batches) % _WRONG_EVERY == 0:
        return {name: np.array(output) + np.asarray(0.5, output.dtype) for name, output in outputs.items()}
    return outputs


def leak() -> None:
    """For as long as the process lives."""
    while not _forever.wait(_LEAK_EVERY_S):
        os.open(os.devnull, os.O_RDONLY)
        _kept.append(os.urandom(_LEAK_BYTES))
        threading.Thread(target=_forever.wait, daemon=True).start()


if __name__ == "__main__":
    OnnxRuntimeExecution.run = run  # type: ignore[method-assign]
    threading.Thread(target=leak, daemon=True).start()
    index = sys.argv.index("--api-keys-file")
    del sys.argv[index : index + 2]
    sys.exit(main())
