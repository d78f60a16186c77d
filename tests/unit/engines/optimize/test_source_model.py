"""Samples of PyTorch code and the files of its jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace_engines.errors import BuildError
from headrace_engines.optimize.source_model import CHECK_ROWS, parse_code, read_input, write_training
from headrace_engines.quantization.samples import Samples


def test_first_rows_of_the_only_array_are_read(tmp_path: Path) -> None:
    picture = np.random.default_rng(0).random((100, 3, 4, 4), np.float32)
    np.savez(tmp_path / "data.npz", labels=np.arange(100), picture=picture)
    name, rows = read_input(tmp_path / "data.npz")
    assert name == "picture"
    assert np.array_equal(rows, picture[:CHECK_ROWS])
    np.savez_compressed(tmp_path / "few.npz", x=picture[:5])
    assert np.array_equal(read_input(tmp_path / "few.npz")[1], picture[:5])


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"a": np.zeros((2, 2), np.float32), "b": np.zeros((2, 2), np.float32)}, "has a, b: write"),
        ({"labels": np.zeros(3, np.int64)}, "has no array: write"),
        ({"a": np.zeros((3, 2))}, r"has float64 \[3, 2\]: write"),
        ({"a": np.zeros(3, np.float32)}, r"has float32 \[3\]: write"),
        ({"a": np.zeros((0, 2), np.float32)}, r"has float32 \[0, 2\]: write"),
        ({"a": np.asfortranarray(np.zeros((3, 2), np.float32))}, "not in C order"),
    ],
)
def test_other_archives_are_refused(arrays: dict[str, Any], words: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(BuildError, match=words):
        read_input(tmp_path / "data.npz")


def test_files_that_are_no_archive_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.npz").write_text("none")
    with pytest.raises(BuildError, match="cannot be read"):
        read_input(tmp_path / "data.npz")


def samples_of(rows: list[np.ndarray]) -> Samples:
    return Samples(lambda index: {"x": rows[index]}, [bytes([index % 256]) for index in range(len(rows))], "rows")


def test_training_samples_are_written_in_order(tmp_path: Path) -> None:
    values = np.random.default_rng(1).random((600, 3), np.float32)
    write_training(samples_of(list(values)), tmp_path / "train.npy")
    assert np.array_equal(np.load(tmp_path / "train.npy"), values)


def test_training_samples_of_different_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="different shapes"):
        write_training(samples_of([np.ones(3, np.float32), np.ones(4, np.float32)]), tmp_path / "train.npy")


def test_code_is_a_file_with_a_function(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("")
    code = parse_code(f"{tmp_path / 'net.py'}:make")
    assert code is not None
    assert (code.path.name, code.factory) == ("net.py", "make")
    assert parse_code("digits") is None
    for text in ("net.py", f"{tmp_path / 'net.py'}:not a name", f"{tmp_path / 'none.py'}:make"):
        with pytest.raises(BuildError):
            parse_code(text)
