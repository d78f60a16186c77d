"""Ragged batches on TensorRT: the same cases for a real GPU and for a fake.

Texts of different length share batches of two models: `plan` has only a plan, `built` an ONNX file and its engine. Values are
small whole numbers, so that answers are exact.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import headrace
import numpy as np
import onnx
from headrace.config.model_folder import read_model_folder
from headrace.config.serving_plan import CUDA_RUNTIME
from headrace.core.errors import BadRequest
from headrace.core.tensor import Array
from headrace_engines.__main__ import main
from headrace_engines.progress import silent
from headrace_engines.project import read_spec
from headrace_engines.targets.base import TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support.models import add_model
from tests.support.ragged_models import ragged_spans

ROWS, MOST = 8, 64
MODELS = ("plan", "built")
CONFIG = f"""
max_batch_size: {ROWS}
max_queue_wait_microseconds: 0  # a slow machine runs a hundred requests in more than the default of 1 s
proof: warn
input: [{{name: ELEMENTS, data_type: fp32, dims: [-1], allow_ragged_batch: true}}]
output: [{{name: SUM, data_type: fp32, dims: [1]}}, {{name: DOUBLED, data_type: fp32, dims: [-1]}},
  {{name: LONGEST, data_type: fp32, dims: [1]}}]
batch_input:
- {{kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO, target_name: [OFFSETS], data_type: int32, source_input: [ELEMENTS]}}
- {{kind: BATCH_MAX_ELEMENT_COUNT_AS_SHAPE, target_name: [MAX_SHAPE], data_type: fp32, source_input: [ELEMENTS]}}
batch_output: [{{target_name: [DOUBLED], source_input: [ELEMENTS]}}]
dynamic_batching: {{max_queue_delay_microseconds: 2000}}
instance_group: [{{kind: gpu, count: 2}}]
optimization: {{profiles: [{{shapes: {{ELEMENTS: [[1], [32], [{MOST}]]}}}}]}}
"""


def make_repository(folder: Path) -> Path:
    """Build both models; returns the repository."""
    repository, model = folder / "repository", ragged_spans()
    for name in MODELS:
        (repository / name / "1").mkdir(parents=True)
        backend = "backend: tensorrt" if name == "plan" else ""
        (repository / name / "config.yaml").write_text(backend + CONFIG)
    onnx.save(model, repository / "built" / "1" / "model.onnx")
    profiles = read_spec(read_model_folder(repository / "built", repository).config).profiles
    plan = repository / "plan" / "1" / "model.plan"
    TensorRtTarget(optimization_level=1).build(model, TargetSpec("fp32", profiles), plan, silent)
    words = [
        "--model-repository",
        str(repository),
        "--cache",
        str(folder / "store"),
        "--state-dir",
        str(folder / "state"),
    ]
    assert main(["build", "built", "--publish-slower", "--target", "tensorrt", *words]) == 0
    return repository


def text(length: int, seed: int) -> Array:
    """One request of `length` elements."""
    return np.random.default_rng(seed).integers(0, 100, (1, length)).astype(np.float32)


def check_answer(answer: dict[str, Array], elements: Array) -> None:
    """Compare an answer with that of the request alone; LONGEST depends on the batch."""
    assert answer["SUM"].tolist() == [[elements.sum()]]
    assert np.array_equal(answer["DOUBLED"], 2 * elements)
    assert elements.size <= answer["LONGEST"].item() <= MOST


async def check_answers(server: headrace.Server, model: str, lengths: list[int]) -> None:
    """Requests alone, then together: every answer is that of the request alone. Their elements exceed those of a batch."""
    served, texts = server.model(model), [text(length, seed) for seed, length in enumerate(lengths)]
    for elements in texts[:10]:
        answer = await served.infer_async({"ELEMENTS": elements})
        check_answer(answer, elements)
        assert answer["LONGEST"].item() == elements.size
    answers = await asyncio.gather(*[served.infer_async({"ELEMENTS": elements}) for elements in texts])
    for elements, answer in zip(texts, answers, strict=True):
        check_answer(answer, elements)
    longest = [answer["LONGEST"].item() for answer in answers]
    shared = [size for size, elements in zip(longest, texts, strict=True) if size > elements.size]
    assert len(texts) < 20 or shared, "no batch had several requests"


async def check_bounds(server: headrace.Server, model: str) -> None:
    """A request that exceeds the profile is refused, alone and beside others, whose answers are right."""
    served, texts = server.model(model), [text(length, seed) for seed, length in enumerate((MOST, 1, 5, MOST - 1, 7))]
    requests = [*texts[:2], text(MOST + 1, 9), *texts[2:]]
    answers = await asyncio.gather(
        *[served.infer_async({"ELEMENTS": elements}) for elements in requests], return_exceptions=True
    )
    for elements, answer in zip(requests, answers, strict=True):
        if elements.size > MOST:
            assert isinstance(answer, BadRequest), answer
            assert f"ELEMENTS [{MOST + 1}]" in str(answer)
            assert f"ELEMENTS [1] to [{MOST}]" in str(answer)
        else:
            assert isinstance(answer, dict), answer
            check_answer(answer, elements)
    for length in (0, MOST + 1):
        assert "optimization.profiles" in await refusal(server, model, text(length, 1))
    # Parts of a request would be requests of their own, with sums of their own.
    assert f"{ROWS + 1} rows" in await refusal(server, model, np.ones((ROWS + 1, 1), np.float32))


async def refusal(server: headrace.Server, model: str, elements: Array) -> str:
    """Return the text of the error of a request that is refused as the client's fault."""
    try:
        await server.model(model).infer_async({"ELEMENTS": elements})
    except BadRequest as error:
        return str(error)
    raise AssertionError(f"{elements.shape} elements were accepted")


async def check_cancelled(server: headrace.Server, model: str) -> None:
    """Requests are cancelled at any time; the others get their own answers."""
    served = server.model(model)
    texts = [text(1 + seed * 7 % 40, seed) for seed in range(120)]
    tasks = [asyncio.ensure_future(served.infer_async({"ELEMENTS": elements})) for elements in texts]
    for number, task in enumerate(tasks):
        if number % 3 == 0:
            task.cancel()
        if number % 10 == 0:
            await asyncio.sleep(0)
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    for number, (elements, answer) in enumerate(zip(texts, answers, strict=True)):
        if isinstance(answer, dict):
            check_answer(answer, elements)
        else:
            assert isinstance(answer, asyncio.CancelledError), answer
            assert number % 3 == 0


def check_all(repository: Path) -> None:
    """Serve both models with TensorRT and run every case."""

    async def run() -> None:
        async with headrace.Server(repository, state_dir="") as server:
            for model in MODELS:
                assert server.model(model).spec.parameters["headrace.runtime"] == "tensorrt"
                lengths = np.random.default_rng(3).integers(1, MOST + 1, 60).tolist() + [1] * 30
                await check_answers(server, model, lengths)
                await check_bounds(server, model)
                await check_cancelled(server, model)

    asyncio.run(run())


def check_cuda_provider(repository: Path) -> None:
    """Serve a model without an engine with ONNX Runtime's CUDA provider, which joins requests too."""
    accelerator = "execution_accelerators: {gpu_execution_accelerator: [{name: cuda}]}"
    config = CONFIG.replace(f"profiles: [{{shapes: {{ELEMENTS: [[1], [32], [{MOST}]]}}}}]", accelerator)
    assert accelerator in config
    add_model(repository, "m", ragged_spans(), files={"config.yaml": config})

    async def run() -> None:
        async with headrace.Server(repository, state_dir="") as server:
            assert server.model("m").spec.parameters["headrace.runtime"] == CUDA_RUNTIME
            await check_answers(server, "m", [1, MOST, *range(1, 30)])
            await check_cancelled(server, "m")

    asyncio.run(run())
