"""Triton's messages without the rest of tritonclient; each case in a process of its own, as imports happen once."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "code",
    [
        "from headrace.config.triton_messages import service_pb2\n"
        "service_pb2.ModelInferRequest(model_name='m')\n"
        "heavy = {'grpc', 'tritonclient.grpc', 'tritonclient.grpc._client'} & set(sys.modules)\n"
        "assert not heavy, heavy\n",
        "from headrace.config.triton_messages import model_config_pb2, service_pb2\n"
        "import tritonclient.grpc as client\n"
        "assert client.service_pb2 is service_pb2 and client.model_config_pb2 is model_config_pb2\n"
        "assert client.InferenceServerClient and sys.modules['tritonclient.grpc'] is client\n"
        "import tritonclient.grpc.service_pb2 as again\n"
        "assert again is service_pb2\n",
        "import tritonclient.grpc as client\n"
        "from headrace.config.triton_messages import model_config_pb2, service_pb2\n"
        "assert client.service_pb2 is service_pb2 and client.model_config_pb2 is model_config_pb2\n"
        "assert sys.modules['tritonclient.grpc'] is client\n",
        "sys.modules['tritonclient'] = None\n"
        "try:\n"
        "    import headrace.config.triton_messages\n"
        "except ImportError as error:\n"
        "    assert 'tritonclient' in str(error)\n"
        "else:\n"
        "    raise SystemExit('imported')\n",
    ],
    ids=["nothing more is imported", "the package later", "the package before", "not installed"],
)
def test_messages_are_imported_alone(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
