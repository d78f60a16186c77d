"""`python -m tests.fake_gpu_server serve ...`: a real server in a process whose GPU and TensorRT are fakes."""

from __future__ import annotations

import sys

import pytest

from server.__main__ import main
from tests.fake_streams import LateCuda, install
from tests.fake_tensorrt import fake_tensorrt

if __name__ == "__main__":
    cuda, patch = LateCuda(), pytest.MonkeyPatch()
    install(patch, cuda)
    patch.setitem(sys.modules, "tensorrt", fake_tensorrt(cuda))
    sys.exit(main())
