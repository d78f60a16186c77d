"""`python -m tests.support.fixed_machine serve ...`: any command, on a machine as the file MACHINE describes it.

What names the machine are ONNX Runtime's version, the CPU's features and the number of cores. They are replaced where Python
reads them, before anything of ours is imported, so that no name of ours matters.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

MACHINE = "MACHINE"


def install(machine: dict[str, Any]) -> None:
    """Make this process believe in a machine.

    Args:
        machine: "onnxruntime", "cpuinfo" and "cores".
    """
    version, read_text = importlib.metadata.version, Path.read_text
    importlib.metadata.version = lambda name: machine["onnxruntime"] if name == "onnxruntime" else version(name)

    def read(path: Path, *args: Any, **options: Any) -> str:
        return machine["cpuinfo"] if str(path) == "/proc/cpuinfo" else read_text(path, *args, **options)

    Path.read_text = read
    os.sched_getaffinity = lambda process: set(range(machine["cores"]))


if __name__ == "__main__":
    install(json.loads(Path(os.environ[MACHINE]).read_text()))
    words = sys.argv[1:]
    if words[0] in ("build", "inspect", "compare", "engines", "models"):  # `headrace` would start a new interpreter
        from headrace_engines.__main__ import main
    else:
        from headrace.__main__ import main
    sys.exit(main(words))
