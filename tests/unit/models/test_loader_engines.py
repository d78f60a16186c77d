"""A built engine beside a model: it serves where it fits, and never takes the model down where it does not."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.config.model_config import ModelConfig
from headrace.config.optimization_config import requested_precision
from headrace.models.control_policy import ControlPolicy
from headrace.models.registry import Registry

from tests.support.control_thread import index, infer_values, put, running, same
from tests.support.fake_builder import publish
from tests.support.models import add_model, affine, sum_difference

INT8 = "optimization: {precision: int8}\n"
ALL = ControlPolicy("none")
ENGINE = affine(seed=2).SerializeToString()
OTHER_MACHINE = {
    "target": "onnxruntime",
    "version": "1.2",
    "device": "cpu",
    "capability": "abacus",
    "driver": 0,
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    put(tmp_path / "repository", 1, config=INT8)
    return tmp_path / "repository"


def reason_of(registry: Registry, name: str = "m") -> str:
    state, reason = index(registry)[name, "1"]
    assert state == "READY"
    return reason


async def serves(repository: Path, seed: int) -> str:
    """Load the repository, see that the answers are those of a seed; what the index says beside READY."""
    async with running(repository, ALL) as (_, registry):
        assert same(await infer_values(registry), seed)
        reason = reason_of(registry)
    assert str(repository.parent) not in reason
    return reason


async def test_a_matching_engine_serves_instead_of_the_model(
    repository: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = publish(repository / "m", 1, ENGINE)

    caplog.set_level(logging.INFO, "headrace")
    async with running(repository, ALL) as (_, registry):
        assert same(await infer_values(registry), 2)
        assert reason_of(registry) == ""
        handle = registry.lease("m", "")
        assert handle.spec.parameters == {
            "headrace.runtime": "onnxruntime",
            "headrace.device": "CPU",
            "headrace.precision": "int8",
            "headrace.artefact": path.name,
            "engine.file": path.name,
            "engine.precision": "int8",
            "engine.below_accuracy_bar": False,
            "engine.top1_agreement": 0.9875,
            "engine.cosine": 0.999,
        }
        handle.release()
    lines = [record.getMessage() for record in caplog.records if "runs the engine" in record.getMessage()]
    assert lines == [f"model m version 1 runs the engine {path.name}: int8, top-1 agreement with FP32 98.8 %"]


async def test_an_engine_below_its_bar_serves_with_a_mark(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    publish(repository / "m", 1, ENGINE, forced=True, refusal=["top-1 agreement is 71.0 %, wanted are 90 %"])
    reason = await serves(repository, 2)
    assert reason == "the int8 engine is below its accuracy bar: top-1 agreement is 71.0 %, wanted are 90 %"
    assert any(r.levelno == logging.WARNING and "below its accuracy bar" in r.getMessage() for r in caplog.records)


def spoil_stamp(folder: Path) -> None:
    (folder / "1" / "build.json").write_text("{")


def spoil_engine(folder: Path) -> None:
    (path,) = (folder / "1").glob("model.*.onnx")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def shorten_engine(folder: Path) -> None:
    (path,) = (folder / "1").glob("model.*.onnx")
    path.write_bytes(path.read_bytes()[:-1])


def remove_engine(folder: Path) -> None:
    (path,) = (folder / "1").glob("model.*.onnx")
    path.unlink()


def link_engine(folder: Path) -> None:
    (path,) = (folder / "1").glob("model.*.onnx")
    path.rename(folder.parent.parent / "elsewhere")
    path.symlink_to(folder.parent.parent / "elsewhere")


def change_model(folder: Path) -> None:
    model = affine(seed=1)
    model.producer_name = "somebody else"
    (folder / "1" / "model.onnx").write_bytes(model.SerializeToString())


def change_config(folder: Path) -> None:
    (folder / "config.yaml").write_text(INT8 + "max_batch_size: 2\n")


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (spoil_stamp, "is not JSON, or truncated"),
        (spoil_engine, "has been changed: its digest is another one"),
        (shorten_engine, "has been changed: it has "),
        (remove_engine, " is missing"),
        (link_engine, " is a link or no file"),
        (change_model, "built from another model.onnx"),
        (change_config, "built for another configuration"),
    ],
)
async def test_an_engine_that_does_not_fit_is_passed_over_with_the_reason_and_a_cure(
    tmp_path: Path, act: Callable[[Path], None], words: str
) -> None:
    repository = tmp_path / "repository"
    put(repository, 1, config=INT8)
    publish(repository / "m", 1, ENGINE)
    act(repository / "m")

    async with running(repository, ALL) as (_, registry):
        assert same(await infer_values(registry), 1)
        reason = reason_of(registry)
        assert reason.startswith("model.onnx serves in place of the int8 engine: ")
        assert words in reason
        assert reason.endswith(" (headrace build m --target onnxruntime)")
        assert str(tmp_path) not in reason


@pytest.mark.parametrize(("overridden", "option"), [(True, " --precision int8"), (False, "")])
async def test_the_remedy_names_the_requested_precision(tmp_path: Path, overridden: bool, option: str) -> None:
    """Without a configured precision, `headrace build m` alone would build FP32."""
    repository = tmp_path / "repository"
    put(repository, 1)
    publish(repository / "m", 1, ENGINE, overridden=overridden)
    change_model(repository / "m")
    assert (await serves(repository, 1)).endswith(f" (headrace build m --target onnxruntime{option})")


async def test_an_engine_of_another_machine_stays_aside(repository: Path) -> None:
    publish(repository / "m", 1, ENGINE, machine=OTHER_MACHINE)
    assert "built for cpu abacus with ONNX Runtime 1.2; this is " in await serves(repository, 1)


async def test_only_requested_engines_are_reported_missing(repository: Path) -> None:
    expected = "model.onnx serves in place of the int8 engine: none is built (headrace build m --target onnxruntime)"
    assert await serves(repository, 1) == expected
    (repository / "m" / "config.yaml").unlink()
    assert await serves(repository, 1) == ""
    # A demo model's own stamp is none of an engine.
    (repository / "m" / "1" / "build.json").write_text(json.dumps({"recipe": 1}))
    assert await serves(repository, 1) == ""


def external_data(location: str) -> bytes:
    model = affine(seed=2)
    weights = model.graph.initializer[0]
    onnx.external_data_helper.set_external_data(weights, location, 0, len(weights.raw_data))
    weights.ClearField("raw_data")
    weights.data_location = onnx.TensorProto.EXTERNAL
    return model.SerializeToString()


def poisoned() -> bytes:
    """A valid file with an unknown operator."""
    model = affine(seed=2)
    model.graph.node[0].op_type = "NoSuchOperator"
    return model.SerializeToString()


@pytest.mark.parametrize(
    "engine",
    [b"", b"\x00" * 64, ENGINE[: len(ENGINE) // 2], poisoned(), sum_difference().SerializeToString()],
    ids=["empty", "garbage", "truncated", "unknown operator", "another model"],
)
async def test_the_model_serves_if_its_engine_is_broken(repository: Path, engine: bytes) -> None:
    """Attack 20: what was stamped so does not load; the stamp's digests are right."""
    path = publish(repository / "m", 1, engine)
    reason = await serves(repository, 1)
    assert reason.startswith(f"model.onnx serves in place of the int8 engine, which cannot be loaded: {path.name}")
    assert reason.endswith("(headrace build m --target onnxruntime --rebuild)")
    assert "export the model again" not in reason, "it is the engine that is broken"


@pytest.mark.parametrize("location", ["../../../secret", "link"])
async def test_an_engine_reads_nothing_outside_of_its_folder(repository: Path, location: str) -> None:
    """Attack 20: weights that lie elsewhere."""
    secret = repository.parent / "secret"
    secret.write_bytes(bytes(4096))
    folder = repository / "m" / "1"
    (folder / "link").symlink_to(secret)
    engine_file = publish(repository / "m", 1, ENGINE)
    stamps = json.loads((folder / "build.json").read_text())
    engine_file.write_bytes(external_data(location))
    stamps["builds"][0] |= {"size_bytes": engine_file.stat().st_size}
    (folder / "build.json").write_text(json.dumps(stamps))
    assert f'are stored in "{location}", which ' in await serves(repository, 1)


async def test_an_engine_published_for_this_machine_reloads_only_its_model(repository: Path) -> None:
    async with running(repository, names=frozenset({"m"})) as (reconciler, registry):
        first = registry.lease("m", "")
        publish(repository / "m", 1, ENGINE, machine=OTHER_MACHINE)
        await reconciler.load("m", None, {})
        other = registry.lease("m", "")
        assert other is first, "an engine for another machine is no reason to load the model anew"
        assert "built for cpu abacus" in reason_of(registry), "but the index shows it"
        publish(repository / "m", 1, ENGINE)
        assert same(await infer_values(registry), 1)
        await reconciler.load("m", None, {})
        assert same(await infer_values(registry), 2)
        assert reason_of(registry) == ""
        engine = registry.lease("m", "")
        await reconciler.load("m", None, {})
        again = registry.lease("m", "")
        assert again is engine
        for path in (repository / "m" / "1").glob("model.*.onnx"):
            path.unlink()
        await reconciler.load("m", None, {})
        assert same(await infer_values(registry), 1), "an engine that has gone is no reason to stop serving"
        for handle in (first, other, engine, again):
            handle.release()


async def test_a_model_that_is_called_like_an_engine_is_still_the_model(tmp_path: Path) -> None:
    name = "model.0123456789ab.onnx"
    put(tmp_path / "repository", 1, config=f"default_model_filename: {name}\n")
    folder = tmp_path / "repository" / "m" / "1"
    (folder / "model.onnx").rename(folder / name)

    async with running(tmp_path / "repository", names=frozenset({"m"})) as (reconciler, registry):
        assert same(await infer_values(registry), 1)
        (folder / name).write_bytes(ENGINE)
        await reconciler.load("m", None, {})
        assert same(await infer_values(registry), 2)


@pytest.mark.parametrize("options", ["fallback: onnxruntime\n", "build_on_load: true\n", "platform: tensorrt_plan\n"])
async def test_a_model_for_tensorrt_runs_its_onnx_file_on_a_machine_without_a_gpu(tmp_path: Path, options: str) -> None:
    repository = tmp_path / "repository"
    put(repository, 1, config="backend: tensorrt\n" + options)
    (repository / "m" / "1" / "model.plan").write_bytes(b"for a GPU")

    async with running(repository, ALL, builder=("false",)) as (_, registry):
        assert same(await infer_values(registry), 1)
        if "build" not in options:
            assert reason_of(registry).startswith("model.onnx serves on the CPU: ")


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ({}, "fp32"),
        ({"precision": "best"}, "best"),
        ({"execution_accelerators": {"gpu_execution_accelerator": [{"name": "tensorrt"}]}}, "fp32"),
        (
            {
                "execution_accelerators": {
                    "gpu_execution_accelerator": [
                        {"name": "other", "parameters": {"precision_mode": "FP16"}},
                        {"name": "tensorrt", "parameters": {"precision_mode": "INT8"}},
                    ]
                }
            },
            "int8",
        ),
    ],
)
def test_the_requested_precision(options: dict[str, Any], precision: str) -> None:
    assert requested_precision(ModelConfig.model_validate({"optimization": options}).optimization) == precision


async def test_every_version_has_its_own_engine(repository: Path) -> None:
    add_model(repository, "m", affine(seed=3), version=2)
    (repository / "m" / "config.yaml").write_text(INT8 + "version_policy: {all: {}}\n")
    publish(repository / "m", 2, ENGINE)

    async with running(repository, ALL) as (_, registry):
        assert same(await infer_values(registry, version="1"), 1)
        assert same(await infer_values(registry, version="2"), 2)
        assert "none is built" in index(registry)["m", "1"][1]
        assert index(registry)["m", "2"] == ("READY", "")
        assert np.isfinite(await infer_values(registry)).all()
