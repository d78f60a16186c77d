"""Protobuf messages of Triton's gRPC service and model configuration, from the package tritonclient.

`import tritonclient.grpc` also imports its client and with it grpcio, which the server does not need.
The modules with the messages need neither. They are imported here with an empty module in place of their package, which is
removed at once: a later `import tritonclient.grpc` loads the whole package, with the same message classes.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = "tritonclient.grpc"


def _import_messages() -> tuple[Any, Any]:
    """Import `model_config_pb2` and `service_pb2` without the package's `__init__`."""
    if _PACKAGE in sys.modules:
        return _modules()
    client = find_spec("tritonclient")
    if client is None or not client.submodule_search_locations:
        raise ImportError("the package tritonclient is not installed: pip install 'tritonclient[grpc]'")
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(Path(folder) / "grpc") for folder in client.submodule_search_locations]
    sys.modules[_PACKAGE] = package
    try:
        return _modules()
    finally:
        del sys.modules[_PACKAGE]


def _modules() -> tuple[Any, Any]:
    return importlib.import_module(f"{_PACKAGE}.model_config_pb2"), importlib.import_module(f"{_PACKAGE}.service_pb2")


model_config_pb2, service_pb2 = _import_messages()
