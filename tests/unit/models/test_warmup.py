"""The requests that a version warms up with: what they hold, and what is refused before anything runs."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from headrace.config import model_folder
from headrace.config.model_folder import ModelFolder, read_model_folder
from headrace.core.errors import ConfigError
from headrace.core.tensor import BF16, BY_NAME, BYTES, DATATYPES, Array, Datatype
from headrace.models.warmup import Warmup, WarmupRunner, make_warmups
from headrace.runtimes.base import Execution, InputRefused

from tests.support.models import add_model, identity, sum_difference

RAW = struct.pack("<6f", *range(6))


def read(
    repository: Path, feed: str, datatype: str = "FP32", data: bytes = b"", batch_size: int = 2, more: str = ""
) -> ModelFolder:
    """A model Y = X of shape (batch, 3) with one warm-up."""
    config = (
        f"max_batch_size: 4\nmodel_warmup {{ name: 'w' batch_size: {batch_size} {more} "
        f"inputs {{ key: 'X' value {{ {feed} }} }} }}\n"
    )
    folder = add_model(repository, "m", identity(datatype, ("batch", 3)), config=config)
    (folder / "warmup").mkdir()
    (folder / "warmup" / "x.raw").write_bytes(data)
    return read_model_folder(folder, repository)


def arrays(folder: ModelFolder) -> Array:
    (warmup,) = make_warmups(folder.config, folder.path)
    return warmup.inputs["X"]


@pytest.mark.parametrize("kind", DATATYPES, ids=str)
def test_zeros_and_random_values_of_every_datatype(tmp_path: Path, kind: Datatype) -> None:
    zeros = arrays(read(tmp_path / "zero", "zero_data: true", kind.name))
    random = arrays(read(tmp_path / "random", "random_data: true", kind.name))
    for array in (zeros, random):
        assert array.shape == (2, 3)
        assert array.dtype == kind.dtype
    empty: object = b"" if kind is BYTES else 0
    assert all(value == empty for value in zeros.reshape(-1).tolist())
    if kind is BYTES:
        assert set(random.reshape(-1).tolist()) <= {b"0", b"1"}
    elif kind is BF16:
        values = (random.astype(np.uint32) << 16).view(np.float32)
        assert ((values >= 0) & (values < 1)).all()
    else:
        values = random.astype(np.float64)
        assert ((values >= 0) & (values <= 1)).all()


def test_a_file_holds_one_row_for_all_or_every_row(tmp_path: Path) -> None:
    assert arrays(read(tmp_path / "a", "input_data_file: 'x.raw'", data=RAW[:12])).tolist() == [[0, 1, 2], [0, 1, 2]]
    assert arrays(read(tmp_path / "b", "input_data_file: 'x.raw'", data=RAW)).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(("more", "runs"), [("", 1), ("count: 0", 1), ("count: 3", 3)])
def test_a_count_of_0_means_once_as_in_triton(tmp_path: Path, more: str, runs: int) -> None:
    folder = read(tmp_path, "zero_data: true", more=more)
    assert [warmup.count for warmup in make_warmups(folder.config, folder.path)] == [runs]


def test_a_file_of_texts(tmp_path: Path) -> None:
    data = b"".join(struct.pack("<I", len(text)) + text for text in (b"a", b"", b"ccc"))
    folder = read(tmp_path, "input_data_file: 'x.raw'", "BYTES", data)
    assert arrays(folder).tolist() == [[b"a", b"", b"ccc"], [b"a", b"", b"ccc"]]
    for broken in (data[:-1], data + b"\0", data + b"\xff\xff\xff\xff", data[: data.index(b"ccc") - 4]):
        (folder.path / "warmup" / "x.raw").write_bytes(broken)
        with pytest.raises(ConfigError, match=r"m/warmup/x\.raw"):
            make_warmups(folder.config, folder.path)


def test_a_file_that_changed_after_the_check_is_refused(tmp_path: Path) -> None:
    folder = read(tmp_path, "input_data_file: 'x.raw'", data=RAW)
    for broken in (RAW[:-1], RAW + RAW, b""):
        (folder.path / "warmup" / "x.raw").write_bytes(broken)
        with pytest.raises(ConfigError, match=r"row|multiple of"):
            make_warmups(folder.config, folder.path)
    (folder.path / "warmup" / "x.raw").unlink()
    with pytest.raises(ConfigError, match="cannot be read") as refused:
        make_warmups(folder.config, folder.path)
    assert str(tmp_path) not in str(refused.value)


@pytest.mark.parametrize(
    ("feed", "message", "options"),
    [
        ("zero_data: true dims: [4]", "do not match input X", {}),
        ("zero_data: true dims: [2, 3]", "do not match input X", {}),
        ("zero_data: true dims: [-1]", "leave a size open", {}),
        ("zero_data: true data_type: TYPE_INT8", "TYPE_INT8", {}),
        ("zero_data: true", "max_batch_size is 4", {"batch_size": 5}),
        ("zero_data: true", "count is 20000", {"more": "count: 20000"}),
        ("input_data_file: 'x.raw'", "one row takes 12", {"data": RAW[:13]}),
        ("input_data_file: 'nowhere'", "is missing", {}),
        ("input_data_file: '../config.pbtxt'", "leads out", {}),
        ("input_data_file: '/etc/passwd'", "leads out", {}),
        ("", "exactly one of", {}),
        ("zero_data: false", "exactly one of", {}),
    ],
)
def test_invalid_samples_are_reported_with_the_configuration(
    tmp_path: Path, feed: str, message: str, options: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        read(tmp_path, feed, **options)  # type: ignore[arg-type]
    assert "m/config.pbtxt:2" in str(refused.value)


def test_a_link_out_of_the_repository_is_refused(tmp_path: Path) -> None:
    read(tmp_path / "r", "input_data_file: 'x.raw'", data=RAW)
    (tmp_path / "secret").write_bytes(RAW)
    link = tmp_path / "r" / "m" / "warmup" / "x.raw"
    link.unlink()
    link.symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="leads out of the repository"):
        read_model_folder(tmp_path / "r" / "m", tmp_path / "r")


def test_an_input_without_data_is_reported(tmp_path: Path) -> None:
    config = "model_warmup { inputs { key: 'A' value { zero_data: true } } }"
    add_model(tmp_path, "m", sum_difference(), config=config)
    with pytest.raises(ConfigError, match="does not feed input B"):
        read_model_folder(tmp_path / "m", tmp_path)


def test_more_than_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folder, "MAX_INPUT_BYTES", 23)
    with pytest.raises(ConfigError, match="more than 23 bytes"):
        read(tmp_path, "zero_data: true")


def test_a_model_without_a_batch_dimension(tmp_path: Path) -> None:
    config = "model_warmup { inputs { key: 'X' value { random_data: true } } }"
    add_model(tmp_path, "plain", identity("FP32", (2, 3)), config=config)
    add_model(tmp_path, "scalar", identity("INT64", ()), config=config)
    for name, shape in (("plain", (2, 3)), ("scalar", ())):
        folder = read_model_folder(tmp_path / name, tmp_path)
        assert folder.config.max_batch_size == 0
        assert arrays(folder).shape == shape


def test_all_samples_run_their_count_and_errors_propagate() -> None:
    ran: list[dict[str, Array]] = []

    class Model(Execution):
        def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
            ran.append(inputs)
            if len(ran) > 3:
                raise InputRefused("no")
            return {}

        def close(self) -> None:
            pass

    one = np.zeros(1, BY_NAME["FP32"].dtype)
    WarmupRunner("m", [Warmup("a", {"X": one}, 2), Warmup("b", {}, 1)])(Model())
    assert [list(inputs) for inputs in ran] == [["X"], ["X"], []]
    with pytest.raises(InputRefused):
        WarmupRunner("m", [Warmup("a", {"X": one}, 1)])(Model())
