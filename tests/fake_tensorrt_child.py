"""TensorRT on a simulated GPU in a process of a model's own; a plan that holds `crash` ends the process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from server.backends.tensorrt_backend import TensorRtBackend, TensorRtModel
from server.core.ledger import Account
from tests.fake_streams import LateCuda, install
from tests.fake_tensorrt import fake_tensorrt

FACTORY = "tests.fake_tensorrt_child:Backend"


class Backend:
    """See `server.backends.base.Backend`."""

    def __init__(self) -> None:
        patch, cuda = pytest.MonkeyPatch(), LateCuda()
        install(patch, cuda)
        patch.setitem(sys.modules, "tensorrt", fake_tensorrt(cuda))
        self._inner = TensorRtBackend()

    def load(
        self, file: Path, instances: int, parameters: dict[str, str], account: Account | None = None
    ) -> TensorRtModel:
        if file.read_bytes() == b"crash":
            os.abort()
        return self._inner.load(file, instances, parameters, account)
