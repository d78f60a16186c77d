"""`headrace checksums` and `--model-keys-file` on a real server: signed models serve, a changed one never does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.models import add_model, affine
from tests.support.serving import Server, run_headrace, serving


def headrace(*words: str | Path, status: int = 0) -> str:
    """Run a command, and return what it prints."""
    done = run_headrace(*words, timeout_s=120)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a key pair without suffix."""
    path = tmp_path_factory.mktemp("keys") / "team"
    assert f"--model-keys-file {path}.pub" in headrace("checksums", "new-key", path, "--no-password")
    return path


@pytest.fixture
def repository(tmp_path: Path, key: Path) -> Path:
    """The signed models a and b."""
    folder = tmp_path / "repository"
    for seed, name in enumerate("ab", 1):
        add_model(folder, name, affine(seed=seed))
    text = headrace("checksums", "write", folder, "--secret-key", f"{key}.key")
    assert f"{folder / 'a' / 'SHA256SUMS'}: 1 file, signed for the model a" in text
    return folder


def index(server: Server) -> dict[str, tuple[str, str]]:
    status, _, answer = server.request("POST", "/v2/repository/index", b"{}")
    assert status == 200
    return {row["name"]: (row["state"], row.get("reason", "")) for row in json.loads(answer)}


def load(server: Server, name: str) -> tuple[int, str]:
    status, _, answer = server.request("POST", f"/v2/repository/models/{name}/load", b"{}")
    return status, answer.decode()


def change(repository: Path, name: str) -> None:
    """Replace the weights: the model would load, and answer something else."""
    add_model(repository, name, affine(seed=9))


@pytest.mark.parametrize("processes", [[], ["--front-ends", "1"]])
def test_a_changed_model_is_refused_and_the_good_one_serves(repository: Path, key: Path, processes: list[str]) -> None:
    change(repository, "b")
    options = ["--model-keys-file", f"{key}.pub", "--model-control", "explicit", "--load-model", "*", *processes]
    with serving(repository, repository.parent, *options) as server:
        rows = index(server)
        assert rows["a"] == ("READY", "")
        assert rows["b"][0] == "UNAVAILABLE"
        assert "b/1/model.onnx: error: has SHA-256" in rows["b"][1]
        assert server.request("GET", "/v2/models/b/ready")[0] != 200
        change(repository, "a")
        status, text = load(server, "a")
        assert status == 400
        assert "SHA256SUMS lists" in text
        assert index(server)["a"][0] == "READY"
        assert "the last load failed: a/1/model.onnx" in index(server)["a"][1]
        assert server.request("GET", "/v2/models/a/ready")[0] == 200
        headrace("checksums", "write", repository / "a", "--secret-key", f"{key}.key")
        assert load(server, "a")[0] == 200
        assert index(server)["a"] == ("READY", "")


def test_verify_and_validate_find_what_the_server_refuses(repository: Path, key: Path, tmp_path: Path) -> None:
    text = headrace("checksums", "verify", repository, "--model-keys-file", f"{key}.pub")
    assert "OK a: 1 file, signed with the key" in text
    assert "OK a: 1 file" in headrace("checksums", "verify", repository / "a")
    validate = ("validate", repository, "--no-load", "--model-keys-file", f"{key}.pub")
    assert "2 good models, 0 errors" in headrace(*validate)
    headrace("checksums", "write", repository / "b", "--secret-key", f"{key}.key", "--model-name", "c")
    assert "is for the model 'c', not for 'b'" in headrace(*validate, status=1)
    headrace("checksums", "write", repository / "b")
    assert "b/SHA256SUMS.minisig: error: is missing" in headrace(*validate, status=1)
    change(repository, "a")
    assert "a/1/model.onnx: error: has SHA-256" in headrace("validate", repository, "--no-load", status=1)
    assert "a/1/model.onnx: error: has SHA-256" in headrace("checksums", "verify", repository, status=1)
    (repository / "b" / "SHA256SUMS").unlink()
    assert "b: has no SHA256SUMS" in headrace("checksums", "verify", repository, status=1)
    text = headrace("checksums", "write", repository, "--model-name", "x", status=1)
    assert "names one model, and there are 2" in text


def test_a_server_does_not_start_without_usable_keys(repository: Path, tmp_path: Path) -> None:
    words = ("serve", repository, "--http-port", "0", "--grpc-port", "0", "--model-keys-file", tmp_path / "none.pub")
    assert "cannot be read: No such file or directory" in headrace(*words, status=1)
    for command in (("validate",), ("checksums", "verify")):
        text = headrace(*command, repository, "--model-keys-file", tmp_path / "none.pub", status=1)
        assert "none.pub: error: cannot be read: No such file or directory" in text
        assert "Traceback" not in text
