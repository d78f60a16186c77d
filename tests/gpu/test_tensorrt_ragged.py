"""Ragged batches on a real GPU: every answer is that of the request alone, with batches in flight and bounded by the profile."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort
import pytest
from headrace.runtimes.onnxruntime_cuda import PROVIDER

from tests.support import gpu_ragged_cases as cases
from tests.support.gpu_marks import gpu_marks

pytestmark = gpu_marks(180, "pydantic", "onnx", "onnxruntime")


def test_every_answer_is_that_of_the_request_alone(tmp_path: Path) -> None:
    cases.check_all(cases.make_repository(tmp_path))


@pytest.mark.skipif(PROVIDER not in ort.get_available_providers(), reason="needs onnxruntime-gpu")
def test_the_cuda_provider_joins_requests_too(tmp_path: Path) -> None:
    cases.check_cuda_provider(tmp_path)
