"""Measures the memory growth of a process that loads an ONNX file and runs it; run as a file in a process of its own.

A used process would reuse freed memory and show too little growth. The result includes the weights (with a second copy if ONNX
Runtime packs them for its kernels), the arena for the activations of the batch, and allocations of the libraries. The standard
input is {"path", "threads", "shapes": {input: [..]}}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

_RUNS = 3
_NUMPY = {"float": "f4", "float16": "f2", "double": "f8", "bool": "?"}


def main() -> None:
    """Print the memory growth in bytes."""
    request = json.load(sys.stdin)
    options = ort.SessionOptions()
    options.intra_op_num_threads = request["threads"]
    options.log_severity_level = 4
    before_bytes = _resident_bytes()
    session = ort.InferenceSession(request["path"], options, providers=["CPUExecutionProvider"])
    inputs = {}
    for node in session.get_inputs():
        element = node.type.removeprefix("tensor(").removesuffix(")")
        dtype = np.dtype(object) if element == "string" else np.dtype(_NUMPY.get(element, element))
        inputs[node.name] = np.full(request["shapes"][node.name], "" if element == "string" else 0, dtype)
    inputs_bytes = sum(array.nbytes for array in inputs.values())
    for _ in range(_RUNS):
        session.run(None, inputs)
    sys.stdout.write(str(max(0, _resident_bytes() - before_bytes - inputs_bytes)))


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    # The peak: systems without /proc report nothing else. In KiB except on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
