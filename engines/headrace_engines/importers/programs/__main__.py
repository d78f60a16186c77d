"""Entry point of the process with a framework; started by path, in the interpreter of the framework.

    PYTHON .../programs/__main__.py FOLDER

FOLDER/request.json is the request. The process writes FOLDER/model.onnx and a description, then runs the model on the inputs of
the files that lines on standard input name. Messages to the builder are lines of JSON on the standard output that the process was
started with; the output of the user's code goes to standard error.

Loads its package from its own folder, without that folder on `sys.path`: packages of the builder's interpreter must not be
importable in that of a framework.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

_PACKAGE = "headrace_import_programs"


def _load_package() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != folder]
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        raise ImportError(_PACKAGE)
    package = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    _load_package()
    sys.exit(importlib.import_module(_PACKAGE + ".exchange").serve(sys.argv[1]))
