"""The built-in step tokenize: ids, padding, limits, and files that are no tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from headrace.core.errors import BadRequest, ConfigError
from headrace.core.tensor import Array
from headrace.inference.pipelines.steps.options import TokenizeOptions
from headrace.inference.pipelines.steps.tokenize import MAX_TEXT_BYTES, Tokenizer

tokenizers = pytest.importorskip("tokenizers")
VOCABULARY = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "the": 4, "cat": 5, "sat": 6}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def texts(*words: str | bytes) -> Array:
    array: Array = np.empty((len(words), 1), object)
    array[:, 0] = [word.encode() if isinstance(word, str) else word for word in words]
    return array


def test_the_length_is_padded_to_a_multiple_or_to_a_fixed_one(file: Path) -> None:
    assert Tokenizer(file, TokenizeOptions(multiple_of=8)).tokenize(texts("cat"))["input_ids"].shape == (1, 8)
    fixed = Tokenizer(file, TokenizeOptions(pad_to=6, pad_id=9)).tokenize(texts("cat"))
    assert fixed["input_ids"].tolist() == [[2, 5, 3, 9, 9, 9]]
    assert Tokenizer(file, TokenizeOptions()).tokenize(texts(""))["input_ids"].tolist() == [[2, 3]]


def test_long_texts_are_cut_at_max_length_only(file: Path) -> None:
    cut = Tokenizer(file, TokenizeOptions(max_length=4)).tokenize(texts("the cat sat sat"))
    assert cut["input_ids"].tolist() == [[2, 4, 5, 3]]
    with pytest.raises(BadRequest, match="a text has 6 tokens, the step pads to 4"):
        Tokenizer(file, TokenizeOptions(pad_to=4)).tokenize(texts("the cat sat sat"))


def test_special_tokens_may_be_left_out(file: Path) -> None:
    plain = Tokenizer(file, TokenizeOptions(special_tokens=False)).tokenize(texts("the cat"))
    assert plain["input_ids"].tolist() == [[4, 5]]
    assert Tokenizer(file, TokenizeOptions(special_tokens=False)).tokenize(texts(""))["input_ids"].tolist() == [[0]]


def test_other_texts_are_the_clients_error(file: Path) -> None:
    tokenizer = Tokenizer(file, TokenizeOptions())
    with pytest.raises(BadRequest, match="not UTF-8 at byte 2"):
        tokenizer.tokenize(texts(b"ab\xff"))
    with pytest.raises(BadRequest, match="at most 1000000"):
        tokenizer.tokenize(texts("x" * (MAX_TEXT_BYTES + 1)))


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer.json is missing"):
        Tokenizer(tmp_path / "tokenizer.json", TokenizeOptions())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer.json is no tokenizer"):
        Tokenizer(tmp_path / "tokenizer.json", TokenizeOptions())
