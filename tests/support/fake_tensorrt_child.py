"""TensorRT on a simulated GPU in a process of a model's own; a plan that holds `crash` ends the process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from headrace.core.ledger import MemoryAccount
from headrace.runtimes import base
from headrace.runtimes.tensorrt.backend import TensorRtBackend, TensorRtModel

from tests.support.fake_gpu import install_gpu

FACTORY = "tests.support.fake_tensorrt_child:Backend"


class Backend(base.Backend):
    """TensorRT backend on the fake GPU."""

    def __init__(self) -> None:
        install_gpu(pytest.MonkeyPatch())
        self._inner = TensorRtBackend()

    def load(
        self, file: Path, instances: int, parameters: dict[str, str], account: MemoryAccount | None = None
    ) -> TensorRtModel:
        if file.read_bytes() == b"crash":
            os.abort()
        return self._inner.load(file, instances, parameters, account)
