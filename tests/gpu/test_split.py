"""A model cut in two parts on real GPUs: answers are those of the whole, and its tensors go from GPU to GPU."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from headrace.config.model_folder import read_model_folder
from headrace.runtimes.cuda.peers import peer_copy

from tests.gpu.test_tensorrt_commands import run
from tests.support import split_cases as cases
from tests.support.gpu_marks import gpu_marks
from tests.support.gpu_pipeline_cases import OPTIONS
from tests.support.serving import serving

pytestmark = gpu_marks(180, "fastapi", "uvicorn")


def test_parts_on_one_gpu(tmp_path: Path) -> None:
    with serving(cases.make_repository(tmp_path, (0, 0)), tmp_path, *OPTIONS) as server:
        cases.check_answers(server)
    assert "Traceback" not in server.text, server.text


@pytest.mark.usefixtures("two_gpus")
def test_parts_on_two_gpus(tmp_path: Path) -> None:
    assert peer_copy(0, 1) is not None, "the log says why"
    with serving(cases.make_repository(tmp_path, (0, 1)), tmp_path, *OPTIONS) as server:
        cases.check_answers(server)
    for words in ("Traceback", "no copies from GPU"):
        assert words not in server.text, server.text


@pytest.mark.usefixtures("two_gpus")
def test_the_command_gives_each_part_a_gpu(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    (repository / cases.NAME / "1").mkdir(parents=True)
    onnx.save(cases.stack(), repository / cases.NAME / "1" / "model.onnx")
    (repository / cases.NAME / "config.yaml").write_text(f"max_batch_size: {cases.ROWS}\ndynamic_batching: {{}}\n")
    options = ("--model-repository", str(repository))
    done, _ = run("split", cases.NAME, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    for gpu, part in enumerate((f"{cases.NAME}_part1", f"{cases.NAME}_part2")):
        assert read_model_folder(repository / part, repository).config.instance_group[0].gpus == (gpu,)
        words = ("--target", "tensorrt", "--precision", "fp32", "--cache", str(tmp_path / "cache"))
        done, _ = run("build", part, "--publish-slower", *options, *words)
        assert done.returncode == 0, done.stdout + done.stderr
    with serving(repository, tmp_path, *OPTIONS) as server:
        cases.check_answers(server)
    assert "no copies from GPU" not in server.text, server.text
