"""Loads of models with checksums: at start, on request, by polling and on the first request of a client."""

from __future__ import annotations

from pathlib import Path

import pytest
from headrace.config.model_folder import read_model_folder
from headrace.core.errors import ConfigError
from headrace.core.ledger import CPU
from headrace.models.control_policy import ControlPolicy
from headrace.models.folders import open_paths
from headrace.models.gpu_model_cache import GpuModelCache
from headrace.models.integrity.checksums import CHECKSUMS, SIGNATURE, write_checksums
from headrace.models.integrity.signatures import create_key_pair, read_secret_key, sign_checksums
from headrace.models.integrity.verified_copy import ModelVerifier, open_verifier
from headrace.models.registry import Registry

from tests.support.control_thread import index, infer_values, put, running, same
from tests.support.fake_builder import command
from tests.support.models import add_model, affine
from tests.support.waiting import until_async

ALL, POLL = ControlPolicy("none"), ControlPolicy("poll", poll_interval_s=0.05, settle_s=0.05)
LISTED = "SHA256SUMS lists"


class Signed:
    """A repository with the model "m", a state folder, and a key pair."""

    def __init__(self, folder: Path) -> None:
        self.repository = folder / "repository"
        self.model = self.repository / "m"
        self.state = folder / "state"
        secret, self.public = create_key_pair(folder / "key", "")
        self._key = read_secret_key(secret, lambda: "")
        put(self.repository, 1)
        self.sign()

    def sign(self, name: str = "m") -> None:
        sign_checksums(self.model, write_checksums(self.model), self._key, name)

    def verifier(self, *, keys: bool = True) -> ModelVerifier:
        return open_verifier(str(self.public) if keys else "", self.state)

    def copies(self) -> list[Path]:
        while True:
            try:
                return sorted(self.state.glob("headrace-verified-*/*/m"))
            except FileNotFoundError:  # a folder that is being removed
                continue


@pytest.fixture
def signed(tmp_path: Path) -> Signed:
    """A signed model."""
    return Signed(tmp_path)


def refusal(registry: Registry) -> str:
    """Return state and reason of the model in the index, which has one row."""
    ((state, reason),) = index(registry).values()
    return f"{state}: {reason}"


async def test_a_signed_model_is_served_from_its_copy(signed: Signed) -> None:
    async with running(signed.repository, ALL, verifier=signed.verifier()) as (_, registry):
        assert index(registry) == {("m", "1"): ("READY", "")}
        assert same(await infer_values(registry), 1)
        assert len(signed.copies()) == 1
    assert list(signed.state.iterdir()) == []


async def test_only_signed_models_are_served_with_keys(signed: Signed) -> None:
    add_model(signed.repository, "plain", affine(seed=3))
    add_model(signed.repository, "listed", affine(seed=3))
    write_checksums(signed.repository / "listed")

    async with running(signed.repository, ALL, verifier=signed.verifier()) as (_, registry):
        rows = index(registry)
        assert rows["m", "1"] == ("READY", "")
        assert "has no SHA256SUMS: only signed models are served" in rows["plain", ""][1]
        assert "listed/SHA256SUMS.minisig: error: is missing" in rows["listed", ""][1]
        assert not registry.serving("plain", "")
        assert not registry.serving("listed", "")

    async with running(signed.repository, ALL, verifier=signed.verifier(keys=False)) as (_, registry):
        assert {state for state, _ in index(registry).values()} == {"READY"}


@pytest.mark.parametrize("keys", [True, False])
async def test_the_good_version_serves_on_while_a_load_is_refused(signed: Signed, keys: bool) -> None:
    async with running(signed.repository, verifier=signed.verifier(keys=keys)) as (reconciler, registry):
        await reconciler.load("m", None, {})
        first = registry.serving("m", "")
        await reconciler.load("m", None, {})
        assert registry.serving("m", "") is first, "the same checksums load nothing again"
        put(signed.repository, 2)
        with pytest.raises(ConfigError, match=LISTED):
            await reconciler.load("m", None, {})
        assert refusal(registry).startswith("READY: the last load failed: m/1/model.onnx: error: has SHA-256")
        assert same(await infer_values(registry), 1)
        (signed.model / "config.yaml").write_text("max_batch_size: 1\n")
        with pytest.raises(ConfigError, match=r"config\.yaml: error: is not listed"):
            await reconciler.load("m", None, {})
        signed.sign()
        await reconciler.load("m", None, {})
        assert same(await infer_values(registry), 2)
        assert refusal(registry) == "READY: "
        await until_async(lambda: len(signed.copies()) == 1)
        await reconciler.unload("m", False)
        await until_async(lambda: signed.copies() == [])


async def test_a_load_request_cannot_bring_what_is_not_signed(signed: Signed) -> None:
    async with running(signed.repository, verifier=signed.verifier()) as (reconciler, registry):
        content = affine(seed=9).SerializeToString()
        for config, files in (("{}", {}), ("{}", {"1/model.onnx": content})):
            with pytest.raises(ConfigError, match="which are not signed"):
                await reconciler.load("m", config, files)
        assert same(await infer_values(registry), 1)


async def test_without_keys_a_configuration_of_a_request_is_used_with_verified_files(signed: Signed) -> None:
    async with running(signed.repository, verifier=signed.verifier(keys=False)) as (reconciler, registry):
        await reconciler.load("m", '{"max_batch_size": 2}', {})
        assert registry.config("m")["max_batch_size"] == 2
        put(signed.repository, 2)
        with pytest.raises(ConfigError, match=LISTED):
            await reconciler.load("m", '{"max_batch_size": 2}', {})
        await reconciler.load("m", "{}", {"1/model.onnx": affine(seed=9).SerializeToString()})
        assert same(await infer_values(registry), 9)


async def test_a_signed_model_of_another_name_is_refused(signed: Signed) -> None:
    signed.model.rename(signed.repository / "n")

    async with running(signed.repository, ALL, verifier=signed.verifier()) as (_, registry):
        assert "n/SHA256SUMS.minisig: error: is for the model 'm', not for 'n'" in refusal(registry)


async def test_polling_waits_for_the_checksums_of_a_new_version(signed: Signed) -> None:
    async with running(signed.repository, POLL, verifier=signed.verifier()) as (_, registry):
        assert same(await infer_values(registry), 1)
        put(signed.repository, 2, version=2)
        await until_async(lambda: "m/2/model.onnx: error: is not listed" in index(registry)["m", "1"][1])
        assert same(await infer_values(registry), 1)
        signed.sign()
        await until_async(lambda: ("m", "2") in index(registry) and index(registry)["m", "2"] == ("READY", ""))
        assert same(await infer_values(registry), 2)


async def test_the_first_request_loads_the_bytes_that_were_verified(signed: Signed) -> None:
    cache = GpuModelCache()
    cache.ledger.set_limit(CPU, 1 << 30)

    async with running(signed.repository, ALL, verifier=signed.verifier(), gpu_model_cache=cache) as (_, registry):
        assert index(registry)["m", "1"] == ("READY", "not loaded: loaded on demand")
        put(signed.repository, 2)
        assert same(await infer_values(registry), 1)


async def test_a_pipeline_has_a_copy_with_its_empty_version(signed: Signed) -> None:
    pipeline = signed.repository / "both"
    (pipeline / "1").mkdir(parents=True)
    (pipeline / "config.yaml").write_text(
        "platform: ensemble\nensemble_scheduling:\n  step:\n"
        "  - {model_name: m, model_version: -1, input_map: {X: X}, output_map: {Y: Y}}\n"
        "input: [{name: X, data_type: TYPE_FP32, dims: [16]}]\noutput: [{name: Y, data_type: TYPE_FP32, dims: [4]}]\n"
        "max_batch_size: 4\n"
    )
    write_checksums(pipeline)

    async with running(signed.repository, ALL, verifier=signed.verifier(keys=False)) as (_, registry):
        assert index(registry)["both", "1"] == ("READY", "")


async def test_an_engine_is_built_from_the_copy_and_into_it(signed: Signed, tmp_path: Path) -> None:
    (signed.model / "config.yaml").write_text("optimization: {precision: int8}\nbuild_on_load: true\n")
    signed.sign()
    orders = tmp_path / "orders"
    builder = command(orders)
    (orders / "engine.onnx").write_bytes(affine(seed=2).SerializeToString())

    async with running(signed.repository, builder=builder, verifier=signed.verifier()) as (reconciler, registry):
        await reconciler.load("m", None, {})
        put(signed.repository, 7)  # what the builder must not read
        await until_async(lambda: index(registry)["m", "1"] == ("READY", ""))
        assert same(await infer_values(registry), 2)
        (copy,) = signed.copies()
        assert any(path.name.startswith("model.") and path.name != "model.onnx" for path in (copy / "1").iterdir())
        assert [path.name for path in (signed.model / "1").iterdir()] == ["model.onnx"]


async def test_code_of_a_python_model_is_not_started_before_its_check(signed: Signed) -> None:
    folder = signed.repository / "code"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(f"open({str(signed.state.parent / 'ran')!r}, 'w').close()\n")
    (folder / "config.yaml").write_text("backend: python\n")
    write_checksums(folder)
    other = signed.repository / "other"
    (other / "1").mkdir(parents=True)
    (other / "1" / "model.py").write_text("raise SystemExit\n")
    (folder / "1" / "model.py").write_text(f"open({str(signed.state.parent / 'ran')!r}, 'w').close()  # changed\n")

    async with running(signed.repository, ALL, verifier=signed.verifier(keys=False)) as (_, registry):
        assert "code/1/model.py: error: has SHA-256" in index(registry)["code", ""][1]
        assert not (signed.state.parent / "ran").exists()


def test_a_folder_without_versions_is_refused_with_checksums(signed: Signed, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (signed.model / "1" / "model.onnx").rename(bare / "model.onnx")
    (signed.model / CHECKSUMS).rename(bare / CHECKSUMS)
    with pytest.raises(ConfigError, match="only checked in a model's folder with version folders"), open_paths([bare]):
        pass
    assert (signed.model / SIGNATURE).exists()


def test_the_copy_is_read_as_the_folder_is(signed: Signed) -> None:
    copy = signed.verifier().copy(signed.model, signed.repository, None)
    assert copy is not None
    assert (
        read_model_folder(copy.path, copy.repository).config
        == read_model_folder(signed.model, signed.repository).config
    )
    copy.release()
