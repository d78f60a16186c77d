"""A GPU that fails for good, over real sockets; the GPUs are fakes in the server's process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import lost_gpu_cases as cases
from tests.support.fake_gpu import install_gpu
from tests.support.fake_gpu_server import GPUS
from tests.support.gpu_pipeline_cases import make_repository
from tests.support.gpu_servers import COMMAND
from tests.support.serving import serving

pytestmark = pytest.mark.slow


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        install_gpu(patch)
        return make_repository(tmp_path, cases.GPUS)


def test_requests_go_on_on_another_gpu(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "fail"
    env = {cases.FILE: str(file), GPUS: "2"}
    with serving(repository, tmp_path, *cases.OPTIONS, env=env, command=COMMAND) as server:
        cases.check_other_gpu_serves(server, file)


def test_the_next_process_serves_if_all_gpus_fail(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "fail"
    env = {cases.FILE: str(file), GPUS: "2"}
    with serving(repository, tmp_path, *cases.WITH_FRONT_ENDS, env=env, command=COMMAND) as server:
        cases.check_next_process_serves(server, file)
